"""The speech benchmark's own side: the engine in this process, without a server around it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from ..engine.config import EngineConfig
from ..engine.engine import Engine
from ..models.speech import SpeechProcessor, Transcription, TranscriptionOptions
from . import logs
from .bench_rounds import Measurement
from .bench_task import SpeechTask
from .loading import start_engine

# Greedy; timestamps, the fallback ladder and the text before are on by default.
OPTIONS = TranscriptionOptions(vad_filter=False)


@dataclass(frozen=True)
class OurRunner:
    """model: path of its files."""

    model: Path
    config: EngineConfig
    task: SpeechTask

    def open(self) -> OurSession:
        logs.configure("error")
        return OurSession(start_engine(self.config, [str(self.model)]), self.task)


class OurSession:
    def __init__(self, engine: Engine, task: SpeechTask) -> None:
        self._engine = engine
        self._task = task
        self._model = engine.models()[0]

    def run(self, number: int) -> Measurement:
        return self._task.measure(number, self._transcribe)

    def _transcribe(self, samples: np.ndarray) -> str:
        processor = cast(SpeechProcessor, self._model.processor)
        program = processor.transcription(samples, OPTIONS)
        result: Transcription = self._engine.run(self._model.name, program).wait()
        return result.text
