"""Turns a recording and a user's wishes into a Whisper program."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from ..processors.audio import HOP_LENGTH, N_FRAMES, SAMPLE_RATE, log_mel_spectrogram
from ..processors.vad import SpeechDetector, SpeechRegion, VadOptions
from .base import ModelInfo, TextTokenizer
from .speech import ChunkingStrategy, OptionError, TranscriptionOptions
from .whisper_languages import LANGUAGES
from .whisper_program import WhisperProgram
from .whisper_rules import decoding_rules
from .whisper_seek import WhisperAudio, WhisperSpec, WhisperThresholds
from .whisper_segments import Clip, clips_from_seconds, intersect_clips
from .whisper_tokenizer import WhisperTokenizer

MAX_BEAM_SIZE = 8
MAX_BEST_OF = 8
FIRST_WINDOW: Clip = (0, N_FRAMES)


class WhisperProcessor:
    """The SpeechProcessor of every Whisper checkpoint; immutable, so one serves all threads."""

    tokenizer: TextTokenizer | None = None  # the programs make text of ids themselves

    def __init__(
        self,
        config: Mapping[str, Any],
        tokenizer_path: str | Path,
        model_name: str,
        thresholds: WhisperThresholds | None = None,
    ) -> None:
        """config: keys of the transformers configuration, and alignment_heads as (layer, head) pairs.

        model_name: tells this model's encoder outputs from every other's. thresholds: None for the
        reference's. Raises ModelError.
        """
        tokenizer = WhisperTokenizer(tokenizer_path, config["vocab_size"])
        self._n_mels = config["num_mel_bins"]
        self._spec = WhisperSpec(
            name=model_name,
            tokenizer=tokenizer,
            rules=decoding_rules(tokenizer),
            alignment_heads=alignment_heads(config),
            n_audio_ctx=config["max_source_positions"],
            n_text_ctx=config["max_target_positions"],
            thresholds=thresholds or WhisperThresholds(),
        )
        codes = tokenizer.language_codes if tokenizer.is_multilingual else ("en",)
        self.languages: Mapping[str, str] = MappingProxyType({code: LANGUAGES[code] for code in codes})
        capabilities = {"transcription", "translation"} if tokenizer.is_multilingual else {"transcription"}
        self.info = ModelInfo("whisper", frozenset(capabilities), config)

    def resolve_language(self, language: str) -> str:
        return self._spec.tokenizer.resolve_language(language)

    def transcription(self, audio: np.ndarray, options: TranscriptionOptions) -> WhisperProgram:
        """audio: float32 [samples], 16 kHz mono in [-1, 1]. Detects speech and computes the spectrogram.

        A recording without speech makes a program without work; its language is the one asked for, else
        English. Raises OptionError.
        """
        language = self._check(options)
        lanes, language_window = plan_lanes(audio, options)
        heard = audio if any(lanes) else audio[:0]  # hours of silence need no spectrogram
        mel = log_mel_spectrogram(heard, self._n_mels)
        spoken = WhisperAudio(mel, len(audio) / SAMPLE_RATE, self._spec)
        return WhisperProgram(spoken, options, language, language_window, lanes)

    def _check(self, options: TranscriptionOptions) -> str | None:
        """The language to decode in, None if it is to be found out. Raises OptionError."""
        multilingual = self._spec.tokenizer.is_multilingual
        if options.task == "translate" and not multilingual:
            raise OptionError("task", "this model knows English only and cannot translate")
        if not 0 <= options.temperature <= 1:
            raise OptionError("temperature", "temperature must be between 0 and 1")
        if not 1 <= options.beam_size <= MAX_BEAM_SIZE:
            raise OptionError("beam_size", f"beam_size must be from 1 to {MAX_BEAM_SIZE}")
        if not 1 <= options.best_of <= MAX_BEST_OF:
            raise OptionError("best_of", f"best_of must be from 1 to {MAX_BEST_OF}")
        silence = options.hallucination_silence_threshold
        if silence is not None and not (math.isfinite(silence) and silence >= 0):
            raise OptionError(
                "hallucination_silence_threshold",
                "hallucination_silence_threshold must be at least 0 seconds",
            )
        if options.language is not None:
            return self.resolve_language(options.language)
        return None if multilingual else "en"


def alignment_heads(config: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    """Ascending (layer, head) pairs; if the checkpoint names none, all heads of the upper layers."""
    listed = config.get("alignment_heads")
    if listed:
        return tuple(sorted((int(layer), int(head)) for layer, head in listed))
    layers, heads = config["decoder_layers"], config["decoder_attention_heads"]
    return tuple((layer, head) for layer in range(layers // 2, layers) for head in range(heads))


def plan_lanes(audio: np.ndarray, options: TranscriptionOptions) -> tuple[list[list[Clip]], Clip]:
    """What to decode: clips for each chain of windows; and the window (seek, size) to find the language in.

    With the speech gate, speech regions act as clips; with chunking, packed regions are decoded on their own.
    Chunking without the gate leaves nothing out: each chunk lasts until the next one. The language is that of
    the first speech, or, where speech is not looked for, of the file's first 30 s. Raises OptionError.
    """
    content_frames = len(audio) // HOP_LENGTH
    wanted = clips_from_seconds(options.clip_timestamps, content_frames)
    if not (wanted and (options.vad_filter or options.chunking)):
        return [wanted], FIRST_WINDOW

    speech = _region_clips(_find_speech(audio, options.chunking), content_frames)
    spoken = intersect_clips(speech, wanted)
    if options.chunking is None:
        lanes = [spoken]
    else:
        chunks = speech if options.vad_filter else _without_gaps(speech, content_frames)
        lanes = [intersect_clips([chunk], wanted) for chunk in chunks]
    if not spoken:
        return lanes, FIRST_WINDOW
    start, end = spoken[0]
    return lanes, (start, min(N_FRAMES, end - start))


def _find_speech(audio: np.ndarray, chunking: ChunkingStrategy | None) -> list[SpeechRegion]:
    detector = SpeechDetector()
    if chunking is None:
        return detector.speech_regions(audio)
    try:
        vad = VadOptions(
            threshold=chunking.threshold,
            min_silence_ms=chunking.silence_duration_ms,
            padding_ms=chunking.prefix_padding_ms,
        )
    except ValueError as error:
        raise OptionError("chunking_strategy", f"chunking_strategy: {error}") from error
    return detector.speech_chunks(audio, vad)


def _region_clips(regions: Sequence[SpeechRegion], content_frames: int) -> list[Clip]:
    edges = [edge / SAMPLE_RATE for region in regions for edge in (region.start, region.end)]
    return clips_from_seconds(edges, content_frames) if edges else []


def _without_gaps(chunks: Sequence[Clip], content_frames: int) -> list[Clip]:
    starts = [0, *(start for start, _ in chunks[1:])]
    return list(zip(starts, [*starts[1:], content_frames], strict=True))
