"""Speech detection: the package's own results on real recordings, and invariants on invented ones."""

from __future__ import annotations

import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sensorium.processors import vad
from sensorium.processors.media import decode_audio
from sensorium.processors.vad import SpeechDetector, SpeechRegion, VadOptions, find_regions, pack_regions

SPEECH = (
    "jfk_16k_mono.wav",
    "fw_multilingual_en_de.mp3",
    "oai_houseplant_care.mp3",
    "oai_meeting.wav",
    "librispeech_1272-128104-0000.flac",
    "f5_ref_en.wav",
    "sglomni_query_to_cars.wav",
    "zh_chinese.flac",
    "autocut_test001.mp4",
    "num123_mono_8bit_44k.wav",
)
NO_SPEECH = ("ina_silence2sec.wav", "auditok_dtmf.ogg", "sglomni_cough.wav")
THREADS = """
import torch
torch.set_num_threads(3)
import threading, numpy
from sensorium.processors.vad import SpeechDetector
SpeechDetector().speech_regions(numpy.zeros(16000, numpy.float32))
seen = []
thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
thread.start(); thread.join()
print(torch.get_num_threads(), seen[0])
"""
FRAME = vad.FRAME_SAMPLES

frame_values = st.one_of(
    st.sampled_from([0.0, 0.2, 0.349, 0.35, 0.4, 0.5, 0.9, 1.0]), st.floats(0, 1, width=32)
)
probability_arrays = st.integers(0, 400).flatmap(lambda n: arrays(np.float32, n, elements=frame_values))
option_values = st.builds(
    VadOptions,
    threshold=st.sampled_from([0.01, 0.1, 0.5, 0.9]),
    min_silence_ms=st.sampled_from([0, 32, 100, 160, 500, 2000]),
    padding_ms=st.sampled_from([0, 30, 400, 3000]),
    min_speech_ms=st.sampled_from([0, 31, 250]),
)


@pytest.fixture(scope="module")
def detector() -> SpeechDetector:
    return SpeechDetector()


@pytest.fixture(scope="module")
def package() -> Any:
    """The silero_vad package and its own model; importing it changes torch's threads, which is undone."""
    threads = torch.get_num_threads()
    import silero_vad  # here, because of that side effect

    torch.set_num_threads(threads)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return silero_vad, silero_vad.load_silero_vad()


def coloured_noise(seconds: float, exponent: float, level: float) -> np.ndarray:
    """Noise whose power falls with frequency to the given exponent: 0 white, 1 pink, 2 brown."""
    count = int(seconds * 16_000)
    spectrum = np.fft.rfft(np.random.default_rng(7).standard_normal(count))
    spectrum[1:] /= np.arange(1, len(spectrum)) ** (exponent / 2)
    spectrum[0] = 0
    signal = np.fft.irfft(spectrum, count)
    return np.clip(signal / signal.std() * level, -1, 1).astype(np.float32)


@pytest.mark.parametrize("name", [*SPEECH, *NO_SPEECH])
def test_equals_the_package(media: Path, detector: SpeechDetector, package: Any, name: str) -> None:
    silero_vad, model = package
    samples = decode_audio(media / "audio" / name).samples
    with torch.no_grad():
        theirs = model.audio_forward(torch.from_numpy(samples)[None], 16_000)[0].numpy()
    ours = detector.probabilities(samples)
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() < 1e-4
    for silence, padding in ((2000, 400), (160, 400), (100, 30), (300, 0)):
        expected = silero_vad.get_speech_timestamps_from_probs(
            theirs.tolist(),
            min_silence_duration_ms=silence,
            speech_pad_ms=padding,
            audio_length_samples=len(samples),
        )
        found = detector.speech_regions(samples, VadOptions(min_silence_ms=silence, padding_ms=padding))
        assert len(found) == len(expected)
        for region, theirs_region in zip(found, expected, strict=True):
            assert abs(region.start - theirs_region["start"]) <= 2 * FRAME
            assert abs(region.end - theirs_region["end"]) <= 2 * FRAME


@pytest.mark.parametrize("name", SPEECH)
def test_speech_is_found(media: Path, detector: SpeechDetector, name: str) -> None:
    samples = decode_audio(media / "audio" / name).samples
    regions = detector.speech_regions(samples)
    assert regions
    assert sum(r.end - r.start for r in regions) > 0.6 * len(samples)


@pytest.mark.parametrize("name", NO_SPEECH)
def test_what_is_not_speech_yields_nothing(media: Path, detector: SpeechDetector, name: str) -> None:
    assert detector.speech_regions(decode_audio(media / "audio" / name).samples) == []


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("level", [0.0, 0.001, 0.01, 0.1, 0.3])
def test_noise_and_zeros_yield_nothing(detector: SpeechDetector, exponent: float, level: float) -> None:
    assert detector.speech_regions(coloured_noise(20, exponent, level)) == []


@pytest.mark.parametrize("count", [0, 1, 511, 512, 513])
def test_tiny_inputs(detector: SpeechDetector, count: int) -> None:
    samples = np.zeros(count, np.float32)
    assert len(detector.probabilities(samples)) == -(-count // 512)
    assert detector.speech_regions(samples) == []
    assert detector.speech_chunks(samples, VadOptions()) == []


def test_silence_between_speech_is_left_out(media: Path, detector: SpeechDetector) -> None:
    speech = decode_audio(media / "audio" / "oai_hello_world.mp3").samples
    pause = np.zeros(10 * 16_000, np.float32)
    regions = detector.speech_regions(np.concatenate([pause, speech, pause, speech, pause]))
    assert len(regions) == 2
    for region, start in zip(regions, (len(pause), 2 * len(pause) + len(speech)), strict=True):
        assert abs(region.start - start) < 0.6 * 16_000
        assert start + 1.2 * 16_000 < region.end < start + len(speech) + 0.9 * 16_000


def test_blocks_leave_no_seam(media: Path, detector: SpeechDetector, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = decode_audio(media / "audio" / "oai_houseplant_care.mp3").samples
    whole = detector.probabilities(samples)
    monkeypatch.setattr(vad, "BLOCK_FRAMES", 37)
    assert np.abs(detector.probabilities(samples) - whole).max() < 1e-4


def test_threads_do_not_disturb_each_other(media: Path, detector: SpeechDetector) -> None:
    files = [decode_audio(media / "audio" / name).samples for name in SPEECH]
    alone = [detector.probabilities(samples) for samples in files]
    with ThreadPoolExecutor(len(files)) as pool:
        together = list(pool.map(detector.probabilities, files))
    assert all(np.array_equal(a, b) for a, b in zip(alone, together, strict=True))


def test_torch_keeps_its_threads() -> None:
    output = subprocess.run(
        [sys.executable, "-P", "-c", THREADS], capture_output=True, text=True, check=True
    ).stdout
    assert output.split() == ["3", "3"]


def test_missing_weights_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vad, "find_spec", lambda name: None)
    vad._load_network.cache_clear()
    with pytest.raises(vad.SpeechDetectorError, match="silero-vad"):
        SpeechDetector()


@pytest.mark.parametrize(
    "values", [{"threshold": 0.0}, {"threshold": 1.0}, {"padding_ms": -1}, {"min_silence_ms": -1}]
)
def test_options_out_of_range(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must"):
        VadOptions(**values)


def check_regions(regions: list[SpeechRegion], length: int) -> None:
    edges = [edge for region in regions for edge in (region.start, region.end)]
    assert all(region.start < region.end for region in regions)
    assert edges == sorted(edges)
    assert not edges or (edges[0] >= 0 and edges[-1] <= length)


@given(probability_arrays, option_values, st.integers(0, FRAME - 1))
@settings(deadline=None)
def test_regions_hold_their_invariants(values: np.ndarray, options: VadOptions, missing: int) -> None:
    length = max(len(values) * FRAME - missing, 0) if len(values) else 0
    regions = find_regions(values, length, options)
    check_regions(regions, length)
    # Long loud speech is never lost: every run of frames above the threshold and the minimum is covered.
    start = None
    for frame, loud in enumerate([*(v >= options.threshold for v in values.tolist()), False]):
        if loud and start is None:
            start = frame
        elif not loud and start is not None:
            low, high = start * FRAME, min(frame * FRAME, length)
            if high - low > options.min_speech_ms * 16:
                assert any(r.start <= low and high <= r.end for r in regions)
            start = None


@given(probability_arrays, option_values)
@settings(deadline=None)
def test_regions_are_those_of_the_package(package: Any, values: np.ndarray, options: VadOptions) -> None:
    silero_vad, _ = package
    length = len(values) * FRAME
    expected = silero_vad.get_speech_timestamps_from_probs(
        values.tolist(),
        threshold=options.threshold,
        min_silence_duration_ms=options.min_silence_ms,
        speech_pad_ms=options.padding_ms,
        min_speech_duration_ms=options.min_speech_ms,
        audio_length_samples=length,
    )
    assert find_regions(values, length, options) == [SpeechRegion(r["start"], r["end"]) for r in expected]


@st.composite
def region_lists(draw: st.DrawFn) -> list[SpeechRegion]:
    lengths = draw(st.lists(st.tuples(st.integers(0, 100_000), st.integers(1, 1_200_000)), max_size=12))
    regions, position = [], 0
    for pause, speech in lengths:
        regions.append(SpeechRegion(position + pause, position + pause + speech))
        position += pause + speech
    return regions


@given(region_lists(), st.sampled_from([0.5, 1.0, 5.0, 30.0]), st.integers(0, 2**32 - 1), st.booleans())
@settings(deadline=None)
def test_packed_pieces_hold_their_invariants(
    regions: list[SpeechRegion], seconds: float, seed: int, informed: bool
) -> None:
    length = regions[-1].end if regions else 0
    values = np.random.default_rng(seed).random(-(-length // FRAME)).astype(np.float32)
    pieces = pack_regions(regions, values if informed else None, seconds)
    check_regions(pieces, length)
    assert all(piece.end - piece.start <= seconds * 16_000 for piece in pieces)
    # All speech is covered: what lies between pieces lies between regions.
    gaps = zip([0, *(p.end for p in pieces)], [*(p.start for p in pieces), length], strict=True)
    for low, high in gaps:
        assert not any(max(low, r.start) < min(high, r.end) for r in regions)


def test_neighbours_are_packed() -> None:
    seconds = [(1, 9), (10, 20), (22, 31), (31, 40), (45, 61)]
    regions = [SpeechRegion(a * 16_000, b * 16_000) for a, b in seconds]
    packed = [(p.start / 16_000, p.end / 16_000) for p in pack_regions(regions)]
    assert packed == [(1, 31), (31, 61)]


@pytest.mark.parametrize("second", [15.1, 20.0, 25.0, 29.9])
def test_a_long_region_is_cut_at_its_quietest_place(second: float) -> None:
    values = np.full(2_000, 0.9, np.float32)
    quiet = int(second * 16_000) // FRAME
    values[quiet - 2 : quiet + 3] = 0.4
    first, *rest = pack_regions([SpeechRegion(0, 40 * 16_000)], values)
    assert first.end == quiet * FRAME + FRAME // 2
    assert rest == [SpeechRegion(first.end, 40 * 16_000)]


def test_without_a_quiet_place_the_cut_is_at_the_limit() -> None:
    values = np.full(2_000, 0.9, np.float32)
    expected = [SpeechRegion(0, 480_000), SpeechRegion(480_000, 640_000)]
    assert pack_regions([SpeechRegion(0, 640_000)], values) == expected
    assert pack_regions([SpeechRegion(0, 640_000)]) == expected


def test_chunks_of_a_real_recording(media: Path, detector: SpeechDetector) -> None:
    samples = decode_audio(media / "audio" / "fw_multilingual_en_de.mp3").samples
    options = VadOptions(min_silence_ms=160)
    chunks = detector.speech_chunks(samples, options)
    assert 2 <= len(chunks) <= 4
    check_regions(chunks, len(samples))
    values = detector.probabilities(samples)
    for chunk in chunks[:-1]:
        assert (
            values[chunk.end // FRAME - 12 : chunk.end // FRAME + 12].min() < 0.2
        )  # the cut lies in a pause
