"""From options to programs: refusals, the speech gate, chunks, and where the language is looked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sensorium.models.base import GenerationRequest, ModelError
from sensorium.models.speech import ChunkingStrategy, OptionError, TranscriptionOptions
from sensorium.models.weights import open_whisper, tokenizer_file
from sensorium.models.whisper_processor import WhisperProcessor, alignment_heads, plan_lanes

from .oracle import samples

GATE = TranscriptionOptions()
OPEN = TranscriptionOptions(vad_filter=False)


@pytest.fixture(scope="module")
def base(whisper_base_dir: Path) -> WhisperProcessor:
    return WhisperProcessor(open_whisper(whisper_base_dir)[0], tokenizer_file(whisper_base_dir), "base")


@pytest.fixture(scope="module")
def tiny_en(whisper_tiny_en_dir: Path) -> WhisperProcessor:
    return WhisperProcessor(open_whisper(whisper_tiny_en_dir)[0], tokenizer_file(whisper_tiny_en_dir), "tiny")


@pytest.fixture(scope="module")
def spoken(media: Path) -> np.ndarray:
    """3 s of silence, 11 s of speech, 6 s of silence, 6.5 s of speech, 25 s of silence, 5.9 s of speech."""
    audio = media / "audio"
    return np.concatenate(
        [
            silence(3),
            samples(audio / "jfk_16k_mono.wav"),
            silence(6),
            samples(audio / "oai_meeting.wav"),
            silence(25),
            samples(audio / "librispeech_1272-128104-0000.flac"),
        ]
    )


def silence(seconds: float) -> np.ndarray:
    return np.zeros(int(seconds * 16000), np.float32)


def first_requests(
    processor: WhisperProcessor, audio: np.ndarray, options: TranscriptionOptions
) -> list[Any]:
    requests: list[GenerationRequest] = processor.transcription(audio, options).start()
    return requests


def test_what_a_model_says_of_itself(base: WhisperProcessor, tiny_en: WhisperProcessor) -> None:
    assert base.info.capabilities == {"transcription", "translation"}
    assert tiny_en.info.capabilities == {"transcription"}
    assert len(base.languages) == 99
    assert base.languages["de"] == "german"
    assert dict(tiny_en.languages) == {"en": "english"}
    assert base.resolve_language("Castilian") == "es"


@pytest.mark.parametrize(
    ("param", "changes"),
    [
        ("language", {"language": "klingon"}),
        ("temperature", {"temperature": 1.5}),
        ("temperature", {"temperature": float("nan")}),
        ("beam_size", {"beam_size": 0}),
        ("beam_size", {"beam_size": 9}),
        ("best_of", {"best_of": 9}),
        ("clip_timestamps", {"clip_timestamps": (3.0, 1.0)}),
        ("hallucination_silence_threshold", {"hallucination_silence_threshold": -1.0}),
        ("hallucination_silence_threshold", {"hallucination_silence_threshold": float("inf")}),
        ("chunking_strategy", {"chunking": ChunkingStrategy(threshold=1.0)}),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    base: WhisperProcessor, param: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(OptionError) as error:
        base.transcription(silence(1), replace(GATE, **changes))
    assert error.value.param == param
    assert "\n" not in str(error.value)


def test_english_only_models_refuse_the_rest(tiny_en: WhisperProcessor) -> None:
    for param, changes in (("task", {"task": "translate"}), ("language", {"language": "fr"})):
        with pytest.raises(OptionError) as error:
            tiny_en.transcription(silence(1), replace(GATE, **changes))
        assert error.value.param == param


def test_a_tokenizer_of_another_model(whisper_base_dir: Path, whisper_tiny_en_dir: Path) -> None:
    with pytest.raises(ModelError):
        WhisperProcessor(open_whisper(whisper_base_dir)[0], tokenizer_file(whisper_tiny_en_dir), "mixed")


def test_alignment_heads_default_to_the_upper_layers() -> None:
    sizes = {"decoder_layers": 4, "decoder_attention_heads": 2}
    assert alignment_heads(sizes) == ((2, 0), (2, 1), (3, 0), (3, 1))
    assert alignment_heads({**sizes, "alignment_heads": [[3, 1], [1, 0]]}) == ((1, 0), (3, 1))


@pytest.mark.parametrize("seconds", [0, 0.005, 3])
def test_silence_makes_no_work(base: WhisperProcessor, seconds: float) -> None:
    for options in (GATE, replace(GATE, chunking=ChunkingStrategy())):
        program = base.transcription(silence(seconds), options)
        assert program.start() == []
        assert program.result().segments == ()


def test_speech_regions_are_clips(spoken: np.ndarray) -> None:
    """Regions lie around the speech (by the lengths above), within the padding and a little slack."""
    (clips,), window = plan_lanes(spoken, GATE)
    assert len(clips) == 3
    for (start, end), (first, last) in zip(clips, [(300, 1400), (2000, 2646), (5146, 5732)], strict=True):
        assert first - 45 <= start <= first + 60
        assert last - 100 <= end <= last + 45
    assert window == (clips[0][0], clips[0][1] - clips[0][0])


def test_the_gate_keeps_to_the_users_clips(spoken: np.ndarray) -> None:
    (clips,), window = plan_lanes(spoken, replace(GATE, clip_timestamps=(5.0, 15.0, 40.0, 50.0)))
    assert len(clips) == 1
    assert clips[0][0] == 500
    assert clips[0][1] <= 1445
    assert window[0] == 500


def test_chunks_are_lanes_of_at_most_30_seconds(spoken: np.ndarray) -> None:
    chunked = replace(GATE, chunking=ChunkingStrategy())
    lanes, window = plan_lanes(spoken, chunked)
    assert [len(lane) for lane in lanes] == [1, 1]
    assert all(end - start <= 3000 for ((start, end),) in lanes)
    assert window[0] == lanes[0][0][0]

    complete, _ = plan_lanes(spoken, replace(chunked, vad_filter=False))
    assert [clip for lane in complete for clip in lane] == [
        (0, lanes[1][0][0]),
        (lanes[1][0][0], len(spoken) // 160),
    ]


def test_the_language_is_looked_for_in_the_first_speech(base: WhisperProcessor, spoken: np.ndarray) -> None:
    """Its window is the one that is decoded first, so it is encoded once."""
    for options in (GATE, replace(GATE, chunking=ChunkingStrategy())):
        program = base.transcription(spoken, options)
        (request,) = program.start()
        (start, size) = plan_lanes(spoken, options)[1]
        assert request.key.seek == start > 250
        assert request.inputs.mm_features[0] is program._audio.feature(start, size)


def test_without_the_gate_it_is_looked_for_in_the_first_30_seconds(
    base: WhisperProcessor, spoken: np.ndarray
) -> None:
    """Of the silence-padded file, as in the reference; the window to decode of a short file is another."""
    (request,) = first_requests(base, spoken[: 16000 * 10], OPEN)
    assert request.inputs.prompt_token_ids == (50258,)
    language_mel = request.inputs.mm_features[0].data()
    assert float(language_mel[:, 1100:].max()) < 0  # silence, not the zeros of padding
    (decode,) = first_requests(base, spoken[: 16000 * 10], replace(OPEN, language="en"))
    assert not decode.inputs.mm_features[0].data()[:, 1000:].any()


def test_several_lanes_start_at_once(base: WhisperProcessor, spoken: np.ndarray) -> None:
    options = replace(GATE, language="English", chunking=ChunkingStrategy())
    requests = first_requests(base, spoken, options)
    assert [request.key.lane for request in requests] == [0, 1]
    assert requests[0].inputs.prompt_token_ids == (50258, 50259, 50359)
