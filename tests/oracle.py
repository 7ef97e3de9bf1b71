"""Holds our transcription against openai-whisper's on the same weights and the same samples."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import whisper.decoding
from sensorium.engine.engine import Engine
from sensorium.models.base import GenerationOutput, GenerationRequest
from sensorium.models.speech import SpeechProcessor, TranscriptionOptions
from sensorium.models.whisper_seek import WhisperThresholds
from sensorium.processors.media import MediaLimits, decode_audio
from whisper.model import Whisper

from .reference_runner import Attempt, attempts, reference_transcribe

DEFAULT_THRESHOLDS = WhisperThresholds()
NARROW = 1e-3  # where the reference's two best logits are closer, either is right


@dataclass
class DecodeTrace:
    """One try of the reference at a window: sampled ids, and at each step how far the best logit led."""

    tokens: list[int]
    leads: list[float]


@dataclass
class Comparison:
    """decoded: our tries; narrow: the try from which the paths part at a tie, if they do."""

    ours: Any
    reference: dict[str, Any]
    decoded: list[Attempt] = field(default_factory=list)
    narrow: int | None = None


class Recorder:
    """A program that remembers the requests and outputs of the one that it wraps."""

    def __init__(self, program: Any) -> None:
        self.program = program
        self.requests: list[GenerationRequest] = []
        self.outputs: dict[int, GenerationOutput] = {}

    def start(self) -> list[GenerationRequest]:
        return self._keep(self.program.start())

    def accept(self, output: GenerationOutput) -> list[GenerationRequest]:
        # Without chunking there is one request at a time: the output belongs to the latest.
        self.outputs[len(self.requests) - 1] = output
        return self._keep(self.program.accept(output))

    def take_events(self) -> list[Any]:
        return self.program.take_events()

    def result(self) -> Any:
        return self.program.result()

    def _keep(self, requests: list[GenerationRequest]) -> list[GenerationRequest]:
        self.requests += requests
        return requests

    def decoded(self) -> list[tuple[int, ...]]:
        """Per try the ids of its greedy or sampled completion."""
        return [
            self.outputs[index].completions[0].token_ids
            for index, request in enumerate(self.requests)
            if request.key.step == "decode"
        ]


@contextmanager
def traced_reference() -> Iterator[list[DecodeTrace]]:
    """Records every greedy decoding of the reference while the context lasts."""
    traces: list[DecodeTrace] = []
    update, finalize = whisper.decoding.GreedyDecoder.update, whisper.decoding.GreedyDecoder.finalize
    leads: list[float] = []

    def traced_update(self: Any, tokens: torch.Tensor, logits: torch.Tensor, sums: torch.Tensor) -> Any:
        best = logits[0].topk(2).values
        leads.append(float(best[0] - best[1]))
        return update(self, tokens, logits, sums)

    def traced_finalize(self: Any, tokens: torch.Tensor, sums: torch.Tensor) -> Any:
        ids = tokens[0, 0].tolist()
        traces.append(DecodeTrace(ids[len(ids) - len(leads) :], list(leads)))
        leads.clear()
        return finalize(self, tokens, sums)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whisper.decoding.GreedyDecoder, "update", traced_update)
        patch.setattr(whisper.decoding.GreedyDecoder, "finalize", traced_finalize)
        yield traces


def compare(
    engine: Engine,
    model: str,
    reference: Whisper,
    audio: np.ndarray,
    options: TranscriptionOptions,
    thresholds: WhisperThresholds = DEFAULT_THRESHOLDS,
) -> Comparison:
    """Runs both; raises AssertionError unless they are equal, or part where the reference's lead is narrow."""
    processor: SpeechProcessor = engine.model(model).processor  # type: ignore[assignment]
    recorder = Recorder(processor.transcription(audio, options))
    ours = engine.run(model, recorder).wait(600)
    tries = attempts(recorder.requests)
    with traced_reference() as traces:
        try:
            theirs = reference_transcribe(reference, audio, options, tries, thresholds)
        except (AssertionError, IndexError):
            theirs = None  # the tries differ: whether they may is decided below
    for number, ids in enumerate(recorder.decoded()):
        assert number < len(traces), "ours tried more often than the reference"
        trace = traces[number]
        eot = reference_eot(reference)
        want = trace.tokens[: trace.tokens.index(eot)] if eot in trace.tokens else trace.tokens
        if list(ids) == want:
            continue
        first = next(
            i for i, pair in enumerate(zip([*ids, eot], [*want, eot], strict=False)) if pair[0] != pair[1]
        )
        lead = trace.leads[first]
        assert lead < NARROW, f"try {number} parts at token {first}, where the reference leads by {lead:.4f}"
        return Comparison(ours, theirs or {}, tries, narrow=number)
    assert theirs is not None, "the reference made other tries"
    assert_equal(recorder.program.raw_segments, theirs["segments"])
    assert ours.language == theirs["language"]
    assert_user_view(ours, theirs["segments"], len(audio) / 16000)
    return Comparison(ours, theirs, tries)


def reference_eot(reference: Whisper) -> int:
    return 50257 if reference.is_multilingual else 50256


def assert_equal(ours: list[Any], theirs: list[dict[str, Any]]) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.tokens == other["tokens"]
        assert mine.seek == other["seek"]
        # The reference decodes the bytes of a cut character to U+FFFD; ours never shows that.
        if "�" not in other["text"]:
            assert mine.text == other["text"]
        words = other.get("words")
        tolerance = 0.02 if words else 0.0
        assert mine.start == pytest.approx(other["start"], abs=tolerance + 1e-9)
        assert mine.end == pytest.approx(other["end"], abs=tolerance + 1e-9)
        assert mine.temperature == other["temperature"]
        assert mine.avg_logprob == pytest.approx(other["avg_logprob"], abs=1e-3)
        assert mine.no_speech_prob == pytest.approx(other["no_speech_prob"], abs=1e-3)
        assert mine.compression_ratio == pytest.approx(other["compression_ratio"])
        if words is not None:
            assert [w.word for w in mine.words] == [w["word"] for w in words]
            for got, want in zip(mine.words, words, strict=True):
                assert got.start == pytest.approx(want["start"], abs=0.02 + 1e-9)
                assert got.end == pytest.approx(want["end"], abs=0.02 + 1e-9)
                assert got.probability == pytest.approx(float(want["probability"]), abs=1e-3)


def assert_user_view(ours: Any, theirs: list[dict[str, Any]], duration: float) -> None:
    """What users see is the reference's without blank segments and with ends clamped to the duration."""
    shown = [s for s in theirs if s["text"].strip() and s["start"] < min(s["end"], duration)]
    assert [list(s.tokens) for s in ours.segments] == [s["tokens"] for s in shown]
    assert [s.id for s in ours.segments] == list(range(len(shown)))
    previous = 0.0
    for segment in ours.segments:
        assert previous <= segment.start < segment.end <= duration + 1e-9
        previous = segment.start


def speech_files(media: Path) -> list[Path]:
    """Every recording with speech in it, by the index."""
    with open(media / "audio" / "INDEX.tsv", newline="") as index:
        rows = list(csv.DictReader(index, delimiter="\t"))
    return [media / "audio" / row["file"] for row in rows if row["language"] != "none"]


def samples(path: Path) -> np.ndarray:
    return decode_audio(path.read_bytes(), MediaLimits()).samples


def concatenation(media: Path, seconds: float, gap: float = 0.4) -> np.ndarray:
    """Speech files in the index's order with pauses between, up to a length: the same array every time."""
    pieces, total = [], 0
    for path in speech_files(media) * 4:
        if total >= seconds * 16000:
            break
        pieces += [samples(path), np.zeros(int(gap * 16000), np.float32)]
        total += sum(len(p) for p in pieces[-2:])
    return np.concatenate(pieces)[: int(seconds * 16000)]
