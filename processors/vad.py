"""Where in a recording somebody speaks: Silero VAD (snakers4/silero-vad) over a whole file.

The weights come from the installed `silero-vad` package; its own code is not imported, since that would set
torch to one thread for the whole process. The network looks at frames of 512 samples. Only its LSTM depends
on what came before, so everything up to there runs for many frames at once and the LSTM then runs over the
sequence. Every probability therefore is that of the package's frame-by-frame model, with no seams between
pieces, and no call keeps state: one detector serves all threads.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from threadpoolctl import ThreadpoolController
from torch import Tensor, nn

from .audio import CHUNK_SECONDS, SAMPLE_RATE

SAMPLES_PER_MS = SAMPLE_RATE // 1000
FRAME_SAMPLES = 512  # 32 ms, one probability each
CONTEXT_SAMPLES = 64  # samples of the previous frame that precede each frame
STFT_SIZE, STFT_HOP = 256, 128  # samples
STFT_BINS = STFT_SIZE // 2 + 1
HIDDEN_SIZE = 128
WEIGHT_NAMES = {
    "stft_conv.weight": "_model.stft.forward_basis_buffer",
    **{
        f"conv{i + 1}.{kind}": f"_model.encoder.{i}.reparam_conv.{kind}"
        for i in range(4)
        for kind in ("weight", "bias")
    },
    **{
        f"lstm.{kind}_l0": f"_model.decoder.rnn.{kind}"
        for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    },
    "final_conv.weight": "_model.decoder.decoder.2.weight",
    "final_conv.bias": "_model.decoder.decoder.2.bias",
}  # our name → name in the package's file
BLOCK_FRAMES = 1024  # frames (33 s) run at once, about 20 MB of activations
THRESHOLD_HYSTERESIS = 0.15  # speech lasts until the probability is this much below the threshold
MIN_PIECE_SECONDS = 1.0  # least that a cut inside speech leaves on its right
PAUSE_FRAMES = 5  # a cut inside speech goes into the quietest stretch of this length, 0.16 s


class SpeechDetectorError(Exception):
    """The detector's weights are not where the silero-vad package keeps them; one line for users."""


@dataclass(frozen=True)
class VadOptions:
    """What counts as speech.

    threshold: probability in (0, 1) at which speech starts. Milliseconds: min_silence_ms, shorter pauses
    belong to the speech around them; padding_ms, added on both sides of every region, at most half of the
    pause; min_speech_ms, anything not longer is dropped.
    """

    threshold: float = 0.5
    min_silence_ms: int = 2000
    padding_ms: int = 400
    min_speech_ms: int = 250

    def __post_init__(self) -> None:
        if not 0 < self.threshold < 1:
            raise ValueError("threshold must lie between 0 and 1")
        if min(self.min_silence_ms, self.padding_ms, self.min_speech_ms) < 0:
            raise ValueError("silence, padding and speech lengths must not be negative")


@dataclass(frozen=True, order=True)
class SpeechRegion:
    """Samples [start, end) at 16 kHz, start < end."""

    start: int
    end: int


class SileroNetwork(nn.Module):
    """The 16 kHz network of Silero VAD 5 and 6: magnitude spectrum, four convolutions, LSTM, sigmoid."""

    def __init__(self) -> None:
        super().__init__()
        self.stft_conv = nn.Conv1d(1, 2 * STFT_BINS, STFT_SIZE, stride=STFT_HOP, bias=False)
        self.conv1 = nn.Conv1d(STFT_BINS, 128, 3, padding=1)
        self.conv2 = nn.Conv1d(128, 64, 3, stride=2, padding=1)
        self.conv3 = nn.Conv1d(64, 64, 3, stride=2, padding=1)
        self.conv4 = nn.Conv1d(64, HIDDEN_SIZE, 3, padding=1)
        self.lstm = nn.LSTM(HIDDEN_SIZE, HIDDEN_SIZE)
        self.final_conv = nn.Conv1d(HIDDEN_SIZE, 1, 1)

    def forward(
        self, frames: Tensor, state: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """frames: float32 [n, 576], consecutive frames with their context; state: of the LSTM, None at first.

        Returns speech probabilities [n] and the state after the last frame.
        """
        x = F.pad(frames, (0, CONTEXT_SAMPLES), mode="reflect").unsqueeze(1)
        x = self.stft_conv(x)
        x = (x[:, :STFT_BINS].square() + x[:, STFT_BINS:].square()).sqrt()
        for conv in (self.conv1, self.conv2, self.conv3, self.conv4):
            x = F.relu(conv(x))
        hidden, state = self.lstm(x.squeeze(-1), state)
        return torch.sigmoid(self.final_conv(F.relu(hidden).unsqueeze(-1))).flatten(), state


class SpeechDetector:
    """Finds speech in 16 kHz mono audio. Thread-safe and cheap to make: the weights are loaded once.

    Each call runs on one thread, whatever torch is set to: the LSTM takes one small step after another, and
    meeting other threads after every step costs far more than they help. Measured: 0.6 s of one
    core for ten minutes of audio.
    """

    def __init__(self) -> None:
        """Raises SpeechDetectorError where the weights are absent."""
        self._network = _load_network()
        self._openmp = ThreadpoolController().select(user_api="openmp")

    def probabilities(self, audio: np.ndarray) -> np.ndarray:
        """audio: float32 [n], 16 kHz mono. Returns float32 [ceil(n / 512)], one probability per 32 ms."""
        count = -(-len(audio) // FRAME_SAMPLES)
        result = np.empty(count, np.float32)
        state = None
        # OpenMP's thread count belongs to the calling thread: other threads keep theirs.
        with torch.inference_mode(), self._openmp.limit(limits=1):
            for first in range(0, count, BLOCK_FRAMES):
                last = min(first + BLOCK_FRAMES, count)
                values, state = self._network(_frames(audio, first, last), state)
                result[first:last] = values.numpy()
        return result

    def speech_regions(self, audio: np.ndarray, options: VadOptions | None = None) -> list[SpeechRegion]:
        """Sorted regions inside the file that do not overlap; empty where nobody speaks."""
        return find_regions(self.probabilities(audio), len(audio), options or VadOptions())

    def speech_chunks(
        self, audio: np.ndarray, options: VadOptions, max_seconds: float = CHUNK_SECONDS
    ) -> list[SpeechRegion]:
        """The speech in pieces of up to `max_seconds`, cut at pauses: `pack_regions` of `speech_regions`."""
        probabilities = self.probabilities(audio)
        return pack_regions(find_regions(probabilities, len(audio), options), probabilities, max_seconds)


def find_regions(probabilities: np.ndarray, length: int, options: VadOptions) -> list[SpeechRegion]:
    """Speech regions from one probability per 512 samples of a file of `length` samples.

    As Silero's get_speech_timestamps: speech starts at the threshold, ends once the probability has been
    0.15 below it for the minimum silence, and is then padded.
    """
    leave = max(options.threshold - THRESHOLD_HYSTERESIS, 0.01)
    min_silence = options.min_silence_ms * SAMPLES_PER_MS
    spans: list[tuple[int, int]] = []
    start: int | None = None
    quiet: int | None = None
    for frame, probability in enumerate(probabilities.tolist()):
        position = frame * FRAME_SAMPLES
        if probability >= options.threshold:
            quiet = None
            if start is None:
                start = position
        elif probability < leave and start is not None:
            quiet = position if quiet is None else quiet
            if position - quiet >= min_silence:
                spans.append((start, quiet))
                start = quiet = None
    if start is not None:
        spans.append((start, length))
    spans = [(s, e) for s, e in spans if e - s > options.min_speech_ms * SAMPLES_PER_MS]
    return _pad(spans, length, options.padding_ms * SAMPLES_PER_MS)


def pack_regions(
    regions: Sequence[SpeechRegion],
    probabilities: np.ndarray | None = None,
    max_seconds: float = CHUNK_SECONDS,
) -> list[SpeechRegion]:
    """Regions joined with their neighbours, pauses included, into pieces of at most `max_seconds`.

    A longer region is cut inside its quietest 0.16 s between half and all of what is allowed, as told by
    the file's `probabilities`; without them the cut is at the limit. regions: sorted and without overlap,
    as are the results, which cover all of them.
    """
    limit = int(max_seconds * SAMPLE_RATE)
    voices = np.zeros(0) if probabilities is None else probabilities
    loudness = (
        np.convolve(voices, np.full(PAUSE_FRAMES, 1 / PAUSE_FRAMES), mode="same") if len(voices) else voices
    )
    packed: list[SpeechRegion] = []
    for region in regions:
        for piece in _split(region, loudness, limit):
            if packed and piece.end - packed[-1].start <= limit:
                packed[-1] = SpeechRegion(packed[-1].start, piece.end)
            else:
                packed.append(piece)
    return packed


def _split(region: SpeechRegion, loudness: np.ndarray, limit: int) -> list[SpeechRegion]:
    """Pieces of at most `limit` samples that together are the region; loudness: one value a frame."""
    pieces = []
    start = region.start
    while region.end - start > limit:
        earliest = start + limit // 2
        latest = max(min(start + limit, region.end - int(MIN_PIECE_SECONDS * SAMPLE_RATE)), earliest)
        first, last = earliest // FRAME_SAMPLES, latest // FRAME_SAMPLES
        candidates = loudness[first : last + 1]
        if len(candidates):
            # Of equally quiet places the latest one: longer pieces, fewer of them.
            last = first + len(candidates) - 1 - int(np.argmin(candidates[::-1]))
        cut = min(max(last * FRAME_SAMPLES + FRAME_SAMPLES // 2, earliest), latest)
        pieces.append(SpeechRegion(start, cut))
        start = cut
    return [*pieces, SpeechRegion(start, region.end)]


def _pad(spans: list[tuple[int, int]], length: int, padding: int) -> list[SpeechRegion]:
    """Widens spans by `padding` within the file; where two would meet they share the pause in halves."""
    regions = []
    left = 0
    for index, (start, end) in enumerate(spans):
        pause = spans[index + 1][0] - end if index + 1 < len(spans) else 2 * (length - end)
        right = end + min(padding, pause // 2)
        regions.append(SpeechRegion(max(start - padding, left), right))
        left = right
    return regions


def _frames(audio: np.ndarray, first: int, last: int) -> Tensor:
    """Frames [first, last) with the 64 samples before each: float32 [last - first, 576].

    Before the file and after it lie zeros.
    """
    start, stop = first * FRAME_SAMPLES - CONTEXT_SAMPLES, last * FRAME_SAMPLES
    inside = torch.as_tensor(audio[max(start, 0) : stop], dtype=torch.float32)
    signal = F.pad(inside, (max(-start, 0), stop - max(start, 0) - inside.shape[0]))
    return signal.unfold(0, CONTEXT_SAMPLES + FRAME_SAMPLES, FRAME_SAMPLES)


@lru_cache(maxsize=1)
def _load_network() -> SileroNetwork:
    """The network with the weights inside the installed package; its TorchScript code is never run."""
    spec = find_spec("silero_vad")
    path = Path(spec.origin).parent / "data" / "silero_vad.jit" if spec and spec.origin else None
    if path is None or not path.is_file():
        raise SpeechDetectorError(
            "The speech detector is missing: install the package silero-vad 6.2 or later."
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch.jit.load: the package ships no newer format
        packaged = torch.jit.load(path, map_location="cpu").state_dict()
    network = SileroNetwork().eval().requires_grad_(False)
    network.load_state_dict({name: packaged[theirs] for name, theirs in WEIGHT_NAMES.items()})
    return network
