"""A made-up model whose words and times are scripted, so that every branch of the seek loop can be reached.

Both our program and openai-whisper's transcribe run on the same script.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from sensorium.models import whisper_seek
from sensorium.models.base import Completion, GenerationOutput, GenerationRequest
from sensorium.models.speech import TranscriptionOptions
from sensorium.models.whisper_program import WhisperProgram
from sensorium.models.whisper_seek import WhisperAudio, WhisperSpec, temperature_ladder
from sensorium.models.whisper_segments import clips_from_seconds
from sensorium.models.whisper_timing import WordTiming, split_words
from torch import Tensor
from whisper import decoding, timing, tokenizer, utils
from whisper.model import ModelDimensions

# The package's attribute of this name is the function.
TRANSCRIBE = importlib.import_module("whisper.transcribe")


@dataclass(frozen=True)
class Window:
    """What one try at one window gives: sampled ids, their summed log-probability, and the word lengths.

    times: per word (pause before it, length) in steps of 0.02 s and its probability, used in turn.
    """

    tokens: tuple[int, ...]
    logprob: float
    no_speech: float
    times: tuple[tuple[int, int, float], ...] = ((0, 15, 0.9),)


LONG_SPEECH = Window((50364, 2425, 50464), -0.5, 0.0)
MAX_CALLS = 30  # from then on every window is done at once: scripts may creep on by 20 ms


@dataclass
class Script:
    """Answers try after try from `windows`, in turn. `calls`: what was asked, to be compared."""

    windows: Sequence[Window]
    calls: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)

    def next(self, temperature: float, prompt: Sequence[int]) -> Window:
        assert len(self.calls) < 10 * MAX_CALLS, "the loop does not end"
        self.calls.append((temperature, tuple(prompt)))
        return self.latest

    @property
    def latest(self) -> Window:
        call = len(self.calls) - 1
        return self.windows[call % len(self.windows)] if call < MAX_CALLS else LONG_SPEECH

    def words(self, kind: Any, pieces: Sequence[tuple[str, list[int]]], limit: int) -> list[Any]:
        """Made-up alignment of the latest window; no word ends beyond `limit` steps."""
        times = self.latest.times
        made, step = [], 0
        for index, (text, tokens) in enumerate(pieces):
            pause, length, probability = times[index % len(times)]
            start = min(step + pause, limit)
            step = min(start + length, limit)
            made.append(kind(text, list(tokens), start / 50, step / 50, probability))
        return made


def run_ours(
    script: Script, spec: WhisperSpec, frames: int, options: TranscriptionOptions
) -> tuple[WhisperProgram, list[Any]]:
    """The finished program and its events."""
    audio = WhisperAudio(torch.zeros(80, frames + 3000), frames / 100, spec)
    lanes = [clips_from_seconds(options.clip_timestamps, frames)]
    program = WhisperProgram(audio, options, options.language, (0, 3000), lanes)

    def aligned(
        _: Any, language: str, ids: list[int], scores: Tensor, p: Tensor, prefix: int, size: int
    ) -> Any:
        pieces = split_words(spec.tokenizer, [*ids, spec.tokenizer.eot], language)[:-1]
        return script.words(WordTiming, pieces, size // 2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whisper_seek, "align_words", aligned)
        waiting, events = list(program.start()), program.take_events()
        while waiting:
            waiting += program.accept(_answer(script, waiting.pop(0)))
            events += program.take_events()
    return program, events


def _answer(script: Script, request: GenerationRequest) -> GenerationOutput:
    if request.params.max_tokens == 0:
        return GenerationOutput(request.key, (), torch.zeros(1), torch.zeros(1, 1, 1))
    window = script.next(request.params.temperature, request.inputs.prompt_token_ids)
    probe = torch.tensor([window.no_speech]) if request.params.probe else None
    return GenerationOutput(request.key, (Completion(window.tokens, window.logprob, "stop"),), probe)


class ScriptedModel:
    """As much of openai-whisper's model as its transcribe() touches."""

    device = torch.device("cpu")
    dims = ModelDimensions(80, 1500, 1, 1, 1, 51865, 448, 1, 1, 1)
    is_multilingual = True
    num_languages = 99

    def __init__(self, script: Script) -> None:
        self.script = script
        self.no_speech: float | None = None

    def decode(self, mel: Tensor, options: decoding.DecodingOptions) -> decoding.DecodingResult:
        theirs = tokenizer.get_tokenizer(True, num_languages=99, language=options.language, task=options.task)
        prompt = [theirs.sot_prev, *options.prompt[-223:]] if options.prompt else []
        window = self.script.next(options.temperature, [*prompt, *theirs.sot_sequence])
        # Retries of one window share the probability of its first try, as on a real model.
        if options.temperature == self.first_temperature:
            self.no_speech = torch.tensor(window.no_speech).item()
        assert self.no_speech is not None
        text = theirs.decode(list(window.tokens)).strip()
        return decoding.DecodingResult(
            audio_features=mel,
            language=options.language,
            tokens=list(window.tokens),
            text=text,
            avg_logprob=window.logprob / (len(window.tokens) + 1),
            no_speech_prob=self.no_speech,
            temperature=options.temperature,
            compression_ratio=utils.compression_ratio(text),
        )

    first_temperature = 0.0


@contextmanager
def _scripted_parts(script: Script, frames: int) -> Iterator[None]:
    def find_alignment(
        _: Any, theirs: tokenizer.Tokenizer, text_tokens: list[int], mel: Tensor, num_frames: int
    ) -> list[timing.WordTiming]:
        words, ids = theirs.split_to_word_tokens([*text_tokens, theirs.eot])
        pieces = list(zip(words, ids, strict=True))[:-1]
        return script.words(timing.WordTiming, pieces, num_frames // 2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "find_alignment", find_alignment)
        patch.setattr(TRANSCRIBE, "log_mel_spectrogram", lambda *a, **k: torch.zeros(80, frames + 3000))
        yield


def run_reference(script: Script, frames: int, options: TranscriptionOptions) -> dict[str, Any]:
    """openai-whisper's transcribe() on the script."""
    model = ScriptedModel(script)
    ladder = temperature_ladder(options.temperature, options.temperature_fallback)
    model.first_temperature = ladder[0]
    with _scripted_parts(script, frames):
        return TRANSCRIBE.transcribe(
            model,
            torch.zeros(0),
            fp16=False,
            task=options.task,
            language=options.language,
            temperature=ladder,
            initial_prompt=options.prompt,
            condition_on_previous_text=options.condition_on_previous_text,
            word_timestamps=options.word_timestamps or options.hallucination_silence_threshold is not None,
            hallucination_silence_threshold=options.hallucination_silence_threshold,
            clip_timestamps=list(options.clip_timestamps) or "0",
        )
