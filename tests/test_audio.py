"""The log-mel spectrogram: the reference's values, whatever the length of the file and of the pieces."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import librosa
import numpy as np
import pytest
import torch
import whisper
from sensorium.processors import audio
from sensorium.processors.media import EmptyMedia, UndecodableMedia, decode_audio

MEMORY_OF_AN_HOUR = """
import resource, numpy
from sensorium.processors.audio import log_mel_spectrogram
samples = numpy.zeros(3600 * 16000, numpy.float32)
samples[:] = 0.1
log_mel_spectrogram(samples[:16000])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
mel = log_mel_spectrogram(samples)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 - mel.numel() * 4)
"""


def recordings(media: Path) -> dict[str, np.ndarray]:
    """Samples of every decodable recording."""
    found = {}
    for path in sorted((media / "audio").iterdir()):
        try:
            found[path.name] = decode_audio(path).samples
        except (EmptyMedia, UndecodableMedia):
            assert path.suffix == ".tsv" or path.name.startswith("bad_"), path.name
    assert len(found) >= 28
    return found


def noise(count: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(count) * 0.1).astype(np.float32)


def test_constants_are_consistent() -> None:
    assert audio.N_SAMPLES == 480_000
    assert audio.N_FRAMES == 3_000
    assert audio.FRAMES_PER_SECOND == 100
    assert audio.TOKENS_PER_SECOND == 50
    assert whisper.audio.N_SAMPLES_PER_TOKEN == audio.SAMPLES_PER_TOKEN


@pytest.mark.parametrize("n_mels", [80, 128])
def test_filters_are_those_of_librosa_and_the_reference(n_mels: int) -> None:
    ours = audio.mel_filters(n_mels, torch.device("cpu"))
    assert ours.dtype == torch.float32
    assert np.array_equal(ours.numpy(), librosa.filters.mel(sr=16_000, n_fft=400, n_mels=n_mels))
    assert torch.equal(ours, whisper.audio.mel_filters("cpu", n_mels))


def test_every_recording_equals_the_reference(media: Path) -> None:
    for name, samples in recordings(media).items():
        for n_mels in (80, 128):
            ours = audio.log_mel_spectrogram(samples, n_mels)
            theirs = whisper.log_mel_spectrogram(samples, n_mels, padding=480_000)
            assert ours.dtype == torch.float32
            assert ours.shape == theirs.shape == (n_mels, len(samples) // 160 + 3000), name
            assert (ours - theirs).abs().max() <= 1e-6, name


@pytest.mark.parametrize(
    "count", [0, 1, 2, 159, 160, 161, 199, 200, 201, 399, 400, 4_000, 480_000, 480_001, 961_234]
)
def test_every_length_equals_the_reference(count: int) -> None:
    samples = noise(count)
    samples[count // 2 :] *= 1e-6
    theirs = whisper.log_mel_spectrogram(samples, padding=480_000)
    for ours in (audio.log_mel_spectrogram(samples), audio.log_mel_spectrogram(torch.from_numpy(samples))):
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= 1e-6


@pytest.mark.parametrize("frames", [7, 1000, 2999])
def test_the_cut_into_pieces_changes_nothing(frames: int, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = noise(700_123)
    whole = audio.log_mel_spectrogram(samples)
    monkeypatch.setattr(audio, "PIECE_FRAMES", frames)
    assert (audio.log_mel_spectrogram(samples) - whole).abs().max() <= 1e-6


def test_the_floor_is_that_of_the_whole_file() -> None:
    loud_late = np.concatenate([noise(16_000) * 1e-7, noise(1_600_000)])
    mel = audio.log_mel_spectrogram(loud_late)
    assert mel.max() - mel.min() == pytest.approx(2.0)
    assert torch.all(mel[:, :50] == mel.min())


def test_silence_is_a_constant() -> None:
    mel = audio.log_mel_spectrogram(np.zeros(32_000, np.float32))
    assert torch.all(mel == -1.5)


def test_window_pads_with_zero_in_mel_space() -> None:
    mel = audio.log_mel_spectrogram(noise(16_000))
    part = audio.window(mel, 40, 60)
    assert part.shape == (80, 3000)
    assert torch.equal(part[:, :60], mel[:, 40:100])
    assert torch.all(part[:, 60:] == 0.0)
    assert torch.equal(audio.window(mel, 0, 3000), mel[:, :3000])
    assert torch.equal(audio.window(mel, mel.shape[1] - 5, 3000)[:, :5], mel[:, -5:])


def test_threads_get_what_one_alone_gets() -> None:
    pieces = [noise(16_000 * (i + 1), i) for i in range(8)]
    alone = [audio.log_mel_spectrogram(piece) for piece in pieces]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(audio.log_mel_spectrogram, pieces))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(alone, together, strict=True))


def test_an_hour_needs_little_more_than_its_result() -> None:
    output = subprocess.run(
        [sys.executable, "-P", "-c", MEMORY_OF_AN_HOUR], capture_output=True, text=True, check=True
    ).stdout
    assert int(output) < 100 * 2**20  # the complex spectrum alone would be 580 MB


@pytest.mark.parametrize(("shape", "n_mels"), [((2, 16_000), 80), ((), 80), ((16_000,), 64)])
def test_wrong_arguments(shape: tuple[int, ...], n_mels: int) -> None:
    with pytest.raises(ValueError, match=r"one dimension|n_mels"):
        audio.log_mel_spectrogram(np.zeros(shape, np.float32), n_mels)
