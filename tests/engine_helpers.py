"""Programs and requests for engine tests: fixed lists of work whose outputs are kept."""

from __future__ import annotations

from typing import Any

import torch
from sensorium.engine.request import Request
from sensorium.models.base import GenerationOutput, GenerationRequest, SamplingParams
from sensorium.processors.inputs import MultiModalFeature, MultiModalInputs

ENCODER_LEN = 1500
EOT = 50257


def mel_feature(number: int, n_mels: int = 80, frames: int = 2 * ENCODER_LEN) -> MultiModalFeature:
    """A window of fixed noise, another one for each number."""

    def data() -> torch.Tensor:
        return torch.randn(n_mels, frames, generator=torch.Generator().manual_seed(number))

    return MultiModalFeature("audio", f"noise-{number}", data, ENCODER_LEN)


def work(
    key: object,
    prompt: tuple[int, ...],
    feature: MultiModalFeature | None = None,
    **params: Any,
) -> GenerationRequest:
    features = (feature,) if feature else ()
    params.setdefault("stop_token_ids", (EOT,))
    return GenerationRequest(key, MultiModalInputs(prompt, features), SamplingParams(**params))


class WorkList:
    """A program: all its work at once; its result maps each key to its output."""

    def __init__(self, *works: GenerationRequest) -> None:
        self.works = list(works)
        self.outputs: dict[object, GenerationOutput] = {}

    def start(self) -> list[GenerationRequest]:
        return self.works

    def accept(self, output: GenerationOutput) -> list[GenerationRequest]:
        self.outputs[output.key] = output
        return []

    def take_events(self) -> list[Any]:
        return []

    def result(self) -> dict[object, GenerationOutput]:
        return self.outputs


class Owner:
    """Stands for a ProgramRun where only the scheduler is tested."""

    done = False

    def __init__(self) -> None:
        self.delivered: list[GenerationOutput] = []

    def deliver(self, output: GenerationOutput) -> None:
        self.delivered.append(output)


def make_request(number: int, model: str, piece: GenerationRequest, owner: Any, priority: int = 0) -> Request:
    return Request(number, model, piece, owner, number, priority)
