"""Nouns of speech recognition shared by the speech models, the server and the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from .base import ModelInfo, Program

Task = Literal["transcribe", "translate"]


@dataclass(frozen=True)
class ChunkingStrategy:
    """Cut the file at silences and decode the pieces side by side, unconditioned on each other.

    The defaults are those of "auto"; a client's server_vad object sets them.
    threshold: speech probability in (0, 1). Paddings and silences in milliseconds.
    """

    threshold: float = 0.5
    prefix_padding_ms: int = 400
    silence_duration_ms: int = 160


@dataclass(frozen=True)
class TranscriptionOptions:
    """Everything that shapes one transcription; see the API documentation for the meaning of each field.

    language: a code of the model's languages ("en"), or None to detect it.
    clip_timestamps: seconds, start, end, start, end …; an odd count ends at the end of the file.
    """

    task: Task = "transcribe"
    language: str | None = None
    prompt: str | None = None
    hotwords: str | None = None
    temperature: float = 0.0
    temperature_fallback: bool = True
    beam_size: int = 1
    best_of: int = 1
    condition_on_previous_text: bool = True
    word_timestamps: bool = False
    vad_filter: bool = True
    chunking: ChunkingStrategy | None = None
    clip_timestamps: tuple[float, ...] = ()
    hallucination_silence_threshold: float | None = None
    seed: int = 0


@dataclass(frozen=True)
class Word:
    """A word as the model wrote it (leading space, punctuation attached), seconds, mean token probability."""

    word: str
    start: float
    end: float
    probability: float


@dataclass(frozen=True)
class Segment:
    """A stretch of speech. Times in seconds with 0 ≤ start < end ≤ duration; starts never decrease.

    seek: first 10 ms frame of the window it was decoded in. tokens: ids with their timestamp ids. The last
    four numbers belong to the whole window. words is None unless they were asked for.
    """

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: tuple[int, ...]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    words: tuple[Word, ...] | None = None


@dataclass(frozen=True)
class Transcription:
    """The finished work. language is a code ("en"); text is the segments' texts joined."""

    task: Task
    language: str
    duration: float
    text: str
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class Progress:
    """Event: audio up to `seconds` is done. `segments` became final; ids and order continue across events."""

    seconds: float
    segments: tuple[Segment, ...]


class OptionError(ValueError):
    """An option that this model cannot honour; `param` names the option for the user."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class SpeechProcessor(Protocol):
    """The ModelProcessor of a model that serves transcription."""

    info: ModelInfo
    languages: Mapping[str, str]  # code → lower-case English name

    def resolve_language(self, language: str) -> str:
        """A code or English name or alias, any case → code. Raises OptionError("language")."""

    def transcription(self, audio: np.ndarray, options: TranscriptionOptions) -> Program:
        """audio: float32 [samples], 16 kHz mono in [-1, 1]. The program's events are Progress, its result a
        Transcription. Runs speech detection and the log-mel, so call it in a worker thread. Raises OptionError."""
