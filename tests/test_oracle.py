"""Transcription through the paged engine equals openai-whisper's, window by window, on real weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sensorium.engine.config import EngineConfig
from sensorium.engine.engine import Engine
from sensorium.models.speech import TranscriptionOptions
from sensorium.models.whisper_seek import WhisperThresholds
from whisper.model import Whisper

from .oracle import compare, concatenation, samples, speech_files
from .reference_model import load_reference

PLAIN = TranscriptionOptions(vad_filter=False)
WORDS = replace(PLAIN, word_timestamps=True)


@pytest.fixture(scope="module")
def engine(whisper_base_dir: Path, whisper_tiny_en_dir: Path) -> Iterator[Engine]:
    engine = Engine(EngineConfig(kv_cache_mb=512))
    engine.load("base", whisper_base_dir)
    engine.load("tiny.en", whisper_tiny_en_dir)
    engine.start()
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def base(whisper_base_dir: Path) -> Whisper:
    return load_reference(whisper_base_dir)


@pytest.fixture(scope="module")
def tiny_en(whisper_tiny_en_dir: Path) -> Whisper:
    return load_reference(whisper_tiny_en_dir)


def test_a_known_recording(engine: Engine, base: Whisper, media: Path) -> None:
    result = compare(engine, "base", base, samples(media / "audio/jfk_44k_stereo.flac"), WORDS)
    assert result.narrow is None
    text = result.ours.text.lower()
    assert result.ours.language == "en"
    assert all(part in text for part in ("my fellow americans", "your country", "do for you"))
    words = [word for segment in result.ours.segments for word in segment.words]
    assert all(word.start < word.end for word in words)
    (americans,) = [word for word in words if word.word.strip(" ,") == "Americans"]
    assert americans.start <= 1.8 <= americans.end


@pytest.mark.parametrize("name", ["es_test_clip.wav", "zh_chinese.flac"])
def test_other_languages(engine: Engine, base: Whisper, media: Path, name: str) -> None:
    compare(engine, "base", base, samples(media / "audio" / name), WORDS)


def test_an_english_only_model(engine: Engine, tiny_en: Whisper, media: Path) -> None:
    for name in ("jfk.mp3", "oai_meeting.wav", "librispeech_1272-128104-0000.flac"):
        compare(engine, "tiny.en", tiny_en, samples(media / "audio" / name), WORDS)


def test_the_fallback_ladder(engine: Engine, base: Whisper, media: Path) -> None:
    # No text is dense enough for this threshold, so every window goes up the whole ladder and is sampled.
    strict = WhisperThresholds(compression_ratio=0.5)
    processor = engine.model("base").processor
    spec = processor._spec
    processor._spec = replace(spec, thresholds=strict)
    try:
        audio = samples(media / "audio/oai_houseplant_care.mp3")
        result = compare(engine, "base", base, audio, replace(PLAIN, seed=3), strict)
    finally:
        processor._spec = spec
    assert [round(t.temperature, 1) for t in result.decoded[:6]] == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]


def test_translation_prompt_and_clips(engine: Engine, base: Whisper, media: Path) -> None:
    compare(engine, "base", base, samples(media / "audio/buzz_french.mp3"), replace(PLAIN, task="translate"))
    audio = samples(media / "audio/oai_houseplant_care.mp3")
    compare(engine, "base", base, audio, replace(PLAIN, prompt="Houseplant care, by Ms. Fernsby. " * 60))
    clips = replace(PLAIN, clip_timestamps=(2.0, 9.5, 14.0), language="en")
    compare(engine, "base", base, audio, clips)


def test_beam_search(engine: Engine, base: Whisper, media: Path) -> None:
    processor = engine.model("base").processor
    for name in ("jfk.mp3", "fr_dictee.aiff"):
        audio = samples(media / "audio" / name)
        options = replace(PLAIN, beam_size=5)
        ours = engine.run("base", processor.transcription(audio, options)).wait(120)
        theirs = base.transcribe(audio, fp16=False, beam_size=5, temperature=(0.0, 0.2, 0.4, 0.6, 0.8, 1.0))
        assert [list(s.tokens) for s in ours.segments] == [s["tokens"] for s in theirs["segments"]]


@pytest.mark.slow
@pytest.mark.parametrize("options", [PLAIN, WORDS], ids=["segments", "words"])
def test_every_recording(engine: Engine, base: Whisper, media: Path, options: TranscriptionOptions) -> None:
    files = speech_files(media)
    narrow = [p.name for p in files if compare(engine, "base", base, samples(p), options).narrow is not None]
    assert len(files) > 20
    assert len(narrow) <= 2, f"more ties than chance allows: {narrow}"


@pytest.mark.slow
def test_three_minutes(engine: Engine, base: Whisper, media: Path) -> None:
    result = compare(engine, "base", base, concatenation(media, 180), PLAIN)
    assert len(result.ours.segments) > 20


@pytest.mark.slow
def test_three_minutes_with_words_and_the_silence_rule(engine: Engine, base: Whisper, media: Path) -> None:
    audio = concatenation(media, 180, gap=3.0)
    compare(engine, "base", base, audio, replace(WORDS, hallucination_silence_threshold=1.0, language="en"))
