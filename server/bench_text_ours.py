"""The text benchmark's own side: the engine in this process, without a server around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..engine.config import EngineConfig
from ..engine.engine import Engine
from ..models.base import GenerationOutput, GenerationRequest, SamplingParams
from ..models.text import GenerationProgram
from ..processors.inputs import MultiModalInputs
from . import logs
from .bench_rounds import Measurement
from .bench_text_task import Prompt, Task
from .loading import start_engine


@dataclass(frozen=True)
class OurTextRunner:
    """model: path of its files."""

    model: Path
    config: EngineConfig
    task: Task

    def open(self) -> OurTextSession:
        logs.configure("error")
        return OurTextSession(start_engine(self.config, [str(self.model)]), self.task)


class OurTextSession:
    def __init__(self, engine: Engine, task: Task) -> None:
        self._engine = engine
        self._task = task
        self._model = engine.models()[0].name

    def run(self, number: int) -> Measurement:
        return self._task.measure(number, self._generate)

    def _generate(self, prompt: Prompt, num_tokens: int, reuse: bool, arrived: Callable[[], None]) -> str:
        """Without reuse nothing is found either: prompts that have to be computed differ from the start."""
        params = SamplingParams(num_tokens, detokenize=True)  # greedy; without stop tokens
        request = GenerationRequest(0, MultiModalInputs(prompt), params, stream=True)
        run = self._engine.run(self._model, GenerationProgram([request]))
        for delta in run.iter_events():
            for _ in delta.token_ids:
                arrived()
        outputs: list[GenerationOutput] = run.wait()
        return outputs[0].completions[0].text
