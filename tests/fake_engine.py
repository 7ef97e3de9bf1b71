"""An engine without a model: it says scripted segments, at a scripted pace, through the real seam's types."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from sensorium.engine.engine import EngineDead, LoadedModel, ProgramAborted, ProgramFailed, UnknownModel
from sensorium.models.base import ModelError, ModelInfo
from sensorium.models.speech import (
    OptionError,
    Progress,
    Segment,
    Transcription,
    TranscriptionOptions,
    Word,
)

LANGUAGES = {"en": "english", "fr": "french", "de": "german"}


def segment(index: int, start: float, end: float, text: str, **changes: Any) -> Segment:
    """A segment whose words are its text's, spread evenly."""
    parts = text.split()
    step = (end - start) / max(len(parts), 1)
    words = tuple(Word(" " + p, start + i * step, start + (i + 1) * step, 0.9) for i, p in enumerate(parts))
    made = Segment(index, 0, start, end, text, (50364, 1, 2, 50464), 0.0, -0.25, 1.25, 0.01, words)
    return replace(made, **changes)


SPEECH = (
    segment(0, 0.0, 2.0, " And so, my fellow Americans,"),
    segment(1, 2.0, 4.0, ' ask not what "your" country can\'t do for 3.5 of you.'),
    segment(2, 4.0, 5.0, " Voilà --> fin…"),
)


@dataclass
class FakeProgram:
    """What the fake processor hands to the fake engine."""

    audio: np.ndarray
    options: TranscriptionOptions


@dataclass
class FakeProcessor:
    """Records what it was asked for."""

    info: ModelInfo
    languages: dict[str, str] = field(default_factory=lambda: dict(LANGUAGES))
    asked: list[FakeProgram] = field(default_factory=list)
    refuse: OptionError | None = None
    threads: set[str] = field(default_factory=set)

    def resolve_language(self, language: str) -> str:
        found = {**{code: code for code in self.languages}, **{n: c for c, n in self.languages.items()}}
        if language.lower() not in found:
            raise OptionError("language", f"Invalid language {language!r}.")
        return found[language.lower()]

    def transcription(self, audio: np.ndarray, options: TranscriptionOptions) -> FakeProgram:
        self.threads.add(threading.current_thread().name)
        if self.refuse is not None:
            raise self.refuse
        program = FakeProgram(audio, options)
        self.asked.append(program)
        return program


class FakeRun:
    """A run that says one segment every `pace` seconds in a thread of its own."""

    def __init__(self, engine: FakeEngine, program: FakeProgram) -> None:
        self._engine = engine
        self._program = program
        self._changed = threading.Condition()
        self._events: list[Progress] = []
        self._error: BaseException | None = None
        self._result: Transcription | None = None
        self.aborted_at: float | None = None
        threading.Thread(target=self._speak, daemon=True).start()

    def _speak(self) -> None:
        duration = len(self._program.audio) / 16_000
        for number, said in enumerate(self._engine.segments):
            with self._changed:
                if self._changed.wait_for(lambda: self._error is not None, self._engine.pace):
                    return
                if self._engine.fail_after == number:
                    self._error = ProgramFailed("the request failed inside the server")
                    self._changed.notify_all()
                    return
                self._events.append(Progress(min(said.end, duration), (said,)))
                self._changed.notify_all()
        options = self._program.options
        text = "".join(said.text for said in self._engine.segments)
        with self._changed:
            language = options.language or "en"
            self._result = Transcription(options.task, language, duration, text, tuple(self._engine.segments))
            self._changed.notify_all()

    @property
    def _over(self) -> bool:
        return self._error is not None or self._result is not None

    def iter_events(self) -> Iterator[Progress]:
        position = 0
        while True:
            fresh, over = self._after(position)
            yield from fresh
            position += len(fresh)
            if over:
                return

    def _after(self, position: int) -> tuple[list[Progress], bool]:
        """Waits for events past `position`; with them, whether there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or len(self._events) > position)
            return self._events[position:], self._over

    def wait(self, timeout: float | None = None) -> Transcription:
        with self._changed:
            self._changed.wait_for(lambda: self._over, timeout)
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    async def events(self) -> AsyncIterator[Progress]:
        position = 0
        while True:
            over, fresh = self._over, self._events[position:]
            for event in fresh:
                yield event
            position += len(fresh)
            if over and position == len(self._events):
                return
            await asyncio.sleep(0.01)

    async def result(self) -> Transcription:
        async for _ in self.events():
            pass
        return self.wait(0)

    def abort(self) -> None:
        with self._changed:
            if self._over:
                return
            self.aborted_at = time.monotonic()
            self._error = ProgramAborted("the request was aborted")
            self._changed.notify_all()


class FakeEngine:
    """The seam of the real engine: models, run, healthy, shutdown."""

    def __init__(self, segments: tuple[Segment, ...] = SPEECH, pace: float = 0.0) -> None:
        self.segments = segments
        self.pace = pace
        self.fail_after: int | None = None
        self.dead = False
        self.runs: list[FakeRun] = []
        self.stopped = False
        self.multilingual = self._add("whisper-base", {"transcription", "translation"})
        self.english = self._add("org/whisper-tiny.en", {"transcription"})
        self._add("chatty", {"chat"})

    def _add(self, name: str, capabilities: set[str]) -> FakeProcessor:
        processor = FakeProcessor(ModelInfo("fake", frozenset(capabilities)))
        models = self.__dict__.setdefault("_models", {})
        models[name] = LoadedModel(name, 1_700_000_000, processor, 448, 51_865)
        return processor

    def models(self) -> list[LoadedModel]:
        return list(self._models.values())

    def load(self, name: str, path: Path) -> LoadedModel:
        if name in self._models:
            raise ModelError(f"the model {name} is loaded already")
        if not (path / "config.json").exists():
            raise ModelError(f"{path}/config.json is not there\nat all")
        self._add(name, {"transcription"})
        return self.model(name)

    def unload(self, name: str) -> None:
        self.model(name)
        del self._models[name]

    def model(self, name: str) -> LoadedModel:
        if name not in self._models:
            raise UnknownModel(name)
        return self._models[name]

    @property
    def healthy(self) -> bool:
        return not self.dead

    def run(self, model: str, program: FakeProgram, priority: int = 0) -> FakeRun:
        self.model(model)
        if self.dead:
            raise EngineDead("the engine is not running")
        run = FakeRun(self, program)
        self.runs.append(run)
        return run

    def shutdown(self, drain: bool = True, timeout: float = 30) -> None:
        self.stopped = True

    def stats(self) -> dict[str, float]:
        return {}
