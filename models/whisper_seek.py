"""Whisper's seek loop: one chain of windows, each beginning where the last closed segment before it ended.

The algorithm is the reference's (Radford et al. 2022, section 4.5, and openai-whisper's transcribe): decode a
window, warmer if need be, cut its tokens into segments, time their words, find where to go on.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor

from ..processors.audio import FRAMES_PER_SECOND, N_FRAMES, window
from ..processors.inputs import MultiModalFeature, MultiModalInputs, media_hash
from .base import Completion, GenerationOutput, GenerationRequest, LogitsProcessor, SamplingParams
from .speech import TranscriptionOptions
from .whisper_rules import NoSpeechProbe, TokenProbabilityProbe
from .whisper_segments import (
    Clip,
    DraftSegment,
    clear_empty,
    compression_ratio,
    frame_seconds,
    last_end,
    split_window,
)
from .whisper_timing import add_word_times, align_words, skip_hallucinations
from .whisper_tokenizer import WhisperTokenizer

MISSING_PROBE = "the engine answered without the probe it was asked for"

Work = Generator[GenerationRequest, GenerationOutput, Any]


@dataclass(frozen=True)
class WhisperThresholds:
    """When a decoded window is retried, taken for silence, or kept from prompting the next one.

    compression_ratio: above it the text is too repetitive. logprob: below this average it was guessed.
    no_speech: above it, and with a guessed text, the window is silence.
    prompt_reset_temperature: text sampled above it does not prompt the next window.
    """

    compression_ratio: float = 2.4
    logprob: float = -1.0
    no_speech: float = 0.6
    prompt_reset_temperature: float = 0.5


@dataclass(frozen=True)
class WhisperSpec:
    """What a program has to know of a model. name: whatever tells its encoder from every other."""

    name: str
    tokenizer: WhisperTokenizer
    rules: tuple[LogitsProcessor, ...]
    alignment_heads: tuple[tuple[int, int], ...]
    n_audio_ctx: int = 1500
    n_text_ctx: int = 448
    thresholds: WhisperThresholds = WhisperThresholds()

    @property
    def max_prompt(self) -> int:
        """Prompt tokens after <|startofprev|>: half the context less that token."""
        return self.n_text_ctx // 2 - 1


@dataclass
class WhisperAudio:
    """A file's spectrogram and its windows.

    mel: float32 [n_mels, content_frames + 3000], the last 3,000 frames being silence.
    """

    mel: Tensor
    duration: float
    spec: WhisperSpec
    _features: dict[Clip, MultiModalFeature] = field(default_factory=dict)

    @property
    def content_frames(self) -> int:
        return self.mel.shape[-1] - N_FRAMES

    def feature(self, seek: int, size: int) -> MultiModalFeature:
        """Frames [seek, seek + size) as encoder input; equal windows have equal hashes, computed once."""
        key = (seek, size)
        if key not in self._features:
            digest = media_hash(window(self.mel, seek, size).numpy(), "log-mel", self.spec.name)
            self._features[key] = MultiModalFeature(
                "audio", digest, lambda: window(self.mel, seek, size), self.spec.n_audio_ctx
            )
        return self._features[key]


class WorkKey(NamedTuple):
    """Names a request within its program. step: "language", "decode" or "align"."""

    lane: int
    step: str
    seek: int
    temperature: float = 0.0


@dataclass(frozen=True)
class Decoded:
    """The best continuation of one window at one temperature."""

    tokens: tuple[int, ...]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


@dataclass(frozen=True)
class WindowDone:
    """A window's segments in their final form, and the frame at which the next window begins."""

    next_seek: int
    segments: list[DraftSegment]


def temperature_ladder(temperature: float, fallback: bool) -> tuple[float, ...]:
    """The temperatures tried one after another: up to 1.0 in steps of 0.2."""
    if not fallback:
        return (temperature,)
    steps = max(0, math.floor((1.0 - temperature) / 0.2 + 1e-6))
    return tuple(round(temperature + 0.2 * step, 6) for step in range(steps + 1))


def attempt_seed(seed: int, seek: int, temperature: float) -> int:
    """The generator's seed of one attempt at one window: 0 … 2**63 - 1, the same in every run."""
    digest = hashlib.sha256(f"{seed}/{seek}/{temperature:.6f}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def best_completion(completions: Sequence[Completion]) -> Completion:
    """The likeliest per token, the end of text not counted as one; the first of equals."""

    def score(completion: Completion) -> float:
        length = len(completion.token_ids)
        return completion.cumulative_logprob / length if length else -math.inf

    return max(completions, key=score)


@dataclass(frozen=True)
class UserPrompt:
    """Ids of what a user wants shown before the audio: the end of the text, the beginning of the hotwords."""

    text: tuple[int, ...]
    hotwords: tuple[int, ...]

    @classmethod
    def of(cls, options: TranscriptionOptions, spec: WhisperSpec) -> UserPrompt:
        """Once for all lanes: a prompt may be a megabyte long."""
        texts = [(text or "").strip() for text in (options.prompt, options.hotwords)]
        prompt, hotwords = (" " + text if text else "" for text in texts)
        limit = spec.max_prompt
        return cls(spec.tokenizer.last_ids(prompt, limit), spec.tokenizer.first_ids(hotwords, limit))


class SeekLoop:
    """One chain of windows over `clips`, each prompted by the text before it."""

    def __init__(
        self,
        audio: WhisperAudio,
        options: TranscriptionOptions,
        language: str,
        clips: Sequence[Clip],
        lane: int,
        prompt: UserPrompt,
    ) -> None:
        self._audio = audio
        self._spec = audio.spec
        self._tokenizer = audio.spec.tokenizer
        self._options = options
        self._language = language
        self._clips = clips
        self._lane = lane
        self._sot_sequence = self._tokenizer.sot_sequence(language, options.task)
        self._context = list(prompt.text)
        self._hotwords = prompt.hotwords
        self._last_speech = 0.0
        self.done: list[WindowDone] = []

    def run(self) -> Work:
        """Yields one request at a time and is sent its output; windows appear in `done`."""
        for seek, end in self._clips:
            while seek < end:
                size = min(N_FRAMES, end - seek)
                window_done = yield from self._window(seek, size)
                if window_done.next_seek <= seek:  # odd weights must not keep it here for ever
                    window_done = replace(window_done, next_seek=seek + size)
                self.done.append(window_done)
                seek = window_done.next_seek

    def _window(self, seek: int, size: int) -> Generator[GenerationRequest, GenerationOutput, WindowDone]:
        feature = self._audio.feature(seek, size)
        decoded = yield from self._decode(seek, feature)
        thresholds, options = self._spec.thresholds, self._options
        if decoded.no_speech_prob > thresholds.no_speech and not decoded.avg_logprob > thresholds.logprob:
            return WindowDone(seek + size, [])

        split = split_window(decoded.tokens, self._tokenizer.timestamp_begin, size)
        segments = [self._segment(seek, span, decoded) for span in split.spans]
        next_seek = seek + split.advance

        silence_threshold = options.hallucination_silence_threshold
        if options.word_timestamps or silence_threshold is not None:
            yield from self._add_words(seek, size, feature, segments)
            words_end = last_end(segments)
            if words_end is not None and words_end > frame_seconds(seek) and not split.single_ending:
                next_seek = round(words_end * FRAMES_PER_SECOND)
            if silence_threshold is not None:
                resume = skip_hallucinations(
                    segments,
                    seek=seek,
                    size=size,
                    next_seek=next_seek,
                    single_ending=split.single_ending,
                    threshold=silence_threshold,
                    last_speech=self._last_speech,
                    content_frames=self._audio.content_frames,
                )
                if resume.discard_window:
                    return WindowDone(resume.seek, [])
                next_seek, segments = resume.seek, segments[: resume.kept]
            words_end = last_end(segments)
            if words_end is not None:
                self._last_speech = words_end

        clear_empty(segments)
        self._context.extend(token for segment in segments for token in segment.tokens)
        too_warm = decoded.temperature > thresholds.prompt_reset_temperature
        if too_warm or not options.condition_on_previous_text:
            self._context = []
        return WindowDone(next_seek, segments)

    def _segment(
        self, seek: int, span: tuple[float, float, tuple[int, ...]], decoded: Decoded
    ) -> DraftSegment:
        start, end, tokens = span
        offset = frame_seconds(seek)
        return DraftSegment(
            seek=seek,
            start=offset + start,
            end=offset + end,
            text=self._tokenizer.decode(token for token in tokens if token < self._tokenizer.eot),
            tokens=list(tokens),
            temperature=decoded.temperature,
            avg_logprob=decoded.avg_logprob,
            compression_ratio=decoded.compression_ratio,
            no_speech_prob=decoded.no_speech_prob,
        )

    def _prompt_ids(self) -> tuple[int, ...]:
        """[startofprev, hotwords, the context's end] and the sot sequence."""
        room = self._spec.max_prompt - len(self._hotwords)
        previous = [*self._hotwords, *self._context[max(0, len(self._context) - room) :]]
        return (*([self._tokenizer.sot_prev, *previous] if previous else []), *self._sot_sequence)

    def _decode(
        self, seek: int, feature: MultiModalFeature
    ) -> Generator[GenerationRequest, GenerationOutput, Decoded]:
        """Samples the window, warmer each time, until the text can be believed; the last try is kept."""
        options, thresholds = self._options, self._spec.thresholds
        prompt_ids = self._prompt_ids()
        probe = NoSpeechProbe(len(prompt_ids) - len(self._sot_sequence), self._tokenizer.no_speech)
        no_speech_prob = None
        for temperature in temperature_ladder(options.temperature, options.temperature_fallback):
            params = SamplingParams(
                max_tokens=min(self._spec.n_text_ctx // 2, self._spec.n_text_ctx + 1 - len(prompt_ids)),
                temperature=temperature,
                seed=attempt_seed(options.seed, seek, temperature) if temperature > 0 else None,
                num_sequences=options.best_of if temperature > 0 else 1,
                beam_size=1 if temperature > 0 else options.beam_size,
                stop_token_ids=(self._tokenizer.eot,),
                logits_processors=self._spec.rules,
                # The same prompt and audio every time: asked once.
                probe=probe if no_speech_prob is None else None,
            )
            output = yield self._request("decode", seek, temperature, prompt_ids, feature, params)
            if output.probe is not None:
                no_speech_prob = float(output.probe[0])
            assert no_speech_prob is not None, MISSING_PROBE
            best = best_completion(output.completions)
            text = self._tokenizer.decode(best.token_ids).strip()
            decoded = Decoded(
                best.token_ids,
                temperature,
                best.cumulative_logprob / (len(best.token_ids) + 1),
                compression_ratio(text),
                no_speech_prob,
            )
            guessed = decoded.avg_logprob < thresholds.logprob
            repetitive = decoded.compression_ratio > thresholds.compression_ratio
            silent = guessed and no_speech_prob > thresholds.no_speech
            if silent or not (guessed or repetitive):
                break
        return decoded

    def _add_words(
        self, seek: int, size: int, feature: MultiModalFeature, segments: list[DraftSegment]
    ) -> Work:
        """A second pass over the window's text: where did the decoder listen while it wrote each token?"""
        tokenizer = self._tokenizer
        text_ids = [token for segment in segments for token in segment.tokens if token < tokenizer.eot]
        timings = []
        if text_ids:
            prefix = len(self._sot_sequence)
            params = SamplingParams(
                max_tokens=0,
                probe=TokenProbabilityProbe(prefix, tuple(text_ids), tokenizer.eot),
                alignment_heads=self._spec.alignment_heads,
            )
            prompt_ids = (*self._sot_sequence, tokenizer.no_timestamps, *text_ids, tokenizer.eot)
            output = yield self._request("align", seek, 0.0, prompt_ids, feature, params)
            assert output.probe is not None, MISSING_PROBE
            assert output.alignment_scores is not None, "the engine answered without alignment scores"
            timings = align_words(
                tokenizer, self._language, text_ids, output.alignment_scores, output.probe, prefix, size
            )
        add_word_times(segments, timings, tokenizer.eot, self._last_speech)

    def _request(
        self,
        step: str,
        seek: int,
        temperature: float,
        prompt_ids: tuple[int, ...],
        feature: MultiModalFeature,
        params: SamplingParams,
    ) -> GenerationRequest:
        key = WorkKey(self._lane, step, seek, temperature)
        return GenerationRequest(key, MultiModalInputs(prompt_ids, (feature,)), params)
