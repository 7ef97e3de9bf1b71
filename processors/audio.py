"""16 kHz mono audio → log-mel spectrogram as Whisper was trained on it (Radford et al. 2022, section 2.2)."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

SAMPLE_RATE = 16_000  # samples per second
N_FFT = 400  # samples in an analysis window, 25 ms
HOP_LENGTH = 160  # samples from one frame to the next, 10 ms
CHUNK_SECONDS = 30  # seconds that the encoder takes at once
N_SAMPLES = CHUNK_SECONDS * SAMPLE_RATE  # 480,000 samples in a chunk
N_FRAMES = N_SAMPLES // HOP_LENGTH  # 3,000 mel frames in a chunk
FRAMES_PER_SECOND = SAMPLE_RATE // HOP_LENGTH  # 100 mel frames per second
SAMPLES_PER_TOKEN = 2 * HOP_LENGTH  # the encoder's second convolution has stride 2
TOKENS_PER_SECOND = SAMPLE_RATE // SAMPLES_PER_TOKEN  # 50 encoder positions per second

PIECE_FRAMES = 3_000  # frames transformed at once: 4.8 MB of complex spectrum
LOG_MIN = 1e-10  # power below which the logarithm is cut
LOG_RANGE = 8.0  # powers of ten kept below the loudest point of the file


@lru_cache(maxsize=8)
def mel_filters(n_mels: int, device: torch.device) -> Tensor:
    """Triangular filters on Slaney's mel scale, area-normalised, 0 … 8 kHz: float32 [n_mels, 201].

    The scale is linear up to 1 kHz and 15 mel, and grows by a factor of 6.4 in every 27 mel above (Slaney,
    Auditory Toolbox). Computed in float64: a bank rounded to float32 on the way moves the log-mel of real
    recordings by more than 1e-4 where a steep low-pass meets a filter's foot.
    """
    frequencies = np.arange(N_FFT // 2 + 1) * (SAMPLE_RATE / N_FFT)
    growth = np.log(6.4) / 27
    top = 15 + np.log(SAMPLE_RATE / 2 / 1000) / growth
    mels = np.linspace(0, top, n_mels + 2)
    edges = np.where(mels < 15, mels * (200 / 3), 1000 * np.exp(growth * (mels - 15)))
    widths = np.diff(edges)[:, None]
    rising = (frequencies - edges[:-2, None]) / widths[:-1]
    falling = (edges[2:, None] - frequencies) / widths[1:]
    filters = np.maximum(0, np.minimum(rising, falling)).astype(np.float32)
    filters *= 2 / (edges[2:] - edges[:-2])[:, None]
    return torch.from_numpy(filters).to(device)


def log_mel_spectrogram(
    audio: np.ndarray | Tensor, n_mels: int = 80, device: torch.device | str = "cpu"
) -> Tensor:
    """Log-mel spectrogram of a whole file with 30 s of digital silence appended.

    audio: float32 [n], 16 kHz mono in [-1, 1]; n may be 0. n_mels: 80, or 128 (large-v3, turbo).
    Returns float32 [n_mels, n // 160 + 3000] on `device`; everything more than 8 powers of ten below the
    loudest point of the file is raised to that floor. The transform runs in pieces, so apart from the
    result it needs a few megabytes however long the file is; the values do not depend on the cut.
    Raises ValueError for another shape of `audio` or number of filters.
    """
    if n_mels not in (80, 128):
        raise ValueError(f"n_mels must be 80 or 128, not {n_mels}")
    samples = torch.as_tensor(audio, dtype=torch.float32)
    if samples.ndim != 1:
        raise ValueError(f"audio must have one dimension, not {samples.ndim}")
    device = torch.device(device)
    filters = mel_filters(n_mels, device)
    hann = torch.hann_window(N_FFT, device=device)

    length = samples.shape[0]
    frames = length // HOP_LENGTH + N_FRAMES
    # Frames beyond this one see only appended zeros: their power is cut to LOG_MIN, no transform needed.
    audible = min(frames, -(-(length + N_FFT // 2) // HOP_LENGTH))
    mel = torch.full((n_mels, frames), LOG_MIN, dtype=torch.float32, device=device)
    for first in range(0, audible, PIECE_FRAMES):
        last = min(first + PIECE_FRAMES, audible)
        signal = _frame_samples(samples, first, last).to(device)
        stft = torch.stft(signal, N_FFT, HOP_LENGTH, window=hann, center=False, return_complex=True)
        mel[:, first:last] = filters @ stft.abs().square()
    mel.clamp_(min=LOG_MIN).log10_()
    torch.maximum(mel, mel.max() - LOG_RANGE, out=mel)
    return mel.add_(4.0).div_(4.0)


def window(mel: Tensor, seek: int, size: int) -> Tensor:
    """Frames [seek, seek + size) of a [n_mels, frames] spectrogram as an encoder input [n_mels, 3000].

    What is missing on the right is 0.0 in normalised log-mel space, as in the reference, not silence.
    """
    part = mel[:, seek : seek + size]
    return F.pad(part, (0, N_FRAMES - part.shape[-1]))


def _frame_samples(samples: Tensor, first: int, last: int) -> Tensor:
    """The samples under frames [first, last): frame t is centred on sample 160 t.

    Left of the file lies its mirror image, right of it zeros.
    """
    half = N_FFT // 2
    start, stop = first * HOP_LENGTH - half, (last - 1) * HOP_LENGTH + half
    inside = samples[max(start, 0) : stop]
    inside = F.pad(inside, (0, stop - max(start, 0) - inside.shape[0]))
    if start < 0:
        inside = F.pad(inside[None], (-start, 0), mode="reflect")[0]
    return inside
