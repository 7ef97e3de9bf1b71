"""faster-whisper as a peer of the speech benchmark, on the same CTranslate2 files.

torch stays out of this module: faster-whisper does not use it, and its memory would be counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .bench_rounds import Measurement
from .bench_task import SpeechTask

WINDOW = 30.0  # seconds
BATCH_SIZE = 8


@dataclass(frozen=True)
class FasterWhisperRunner:
    """model: path of a CTranslate2 directory. workers × threads_per_worker share the cores."""

    model: Path
    compute_type: str
    batched: bool
    workers: int
    threads_per_worker: int
    task: SpeechTask

    def open(self) -> FasterWhisperSession:
        # Optional: only the bench extra installs it, and only this process needs it.
        from faster_whisper import BatchedInferencePipeline, WhisperModel

        model = WhisperModel(
            str(self.model),
            device="cpu",
            compute_type=self.compute_type,
            cpu_threads=self.threads_per_worker,
            num_workers=self.workers,
        )
        return FasterWhisperSession(BatchedInferencePipeline(model) if self.batched else model, self)


class FasterWhisperSession:
    def __init__(self, model: Any, runner: FasterWhisperRunner) -> None:
        self._model = model
        self._runner = runner

    def run(self, number: int) -> Measurement:
        return self._runner.task.measure(number, self._transcribe)

    def _transcribe(self, samples: np.ndarray) -> str:
        if self._runner.batched:
            # Its defaults beyond this: no timestamps, no fallback, windows independent of each other.
            clips = windows(len(samples) / self._runner.task.sample_rate)
            segments, _ = self._model.transcribe(
                samples, beam_size=1, batch_size=BATCH_SIZE, clip_timestamps=clips
            )
        else:
            # best_of is the number of tries at one temperature; ours makes one.
            segments, _ = self._model.transcribe(samples, beam_size=1, best_of=1)
        return "".join(segment.text for segment in segments)


def windows(seconds: float) -> list[dict[str, float]]:
    """The whole recording in clips of at most 30 s; the batched pipeline wants them if it is to find none."""
    starts = np.arange(0.0, seconds, WINDOW)
    return [{"start": float(start), "end": float(min(start + WINDOW, seconds))} for start in starts]
