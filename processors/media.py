"""The one bounded decoder: every upload, file and stream of bytes becomes samples here and nowhere else.

What the input is gets decided by its content; names and declared types are never looked at. FFmpeg (through
PyAV) reads the given bytes only: demuxers that follow references (playlists, concatenations, session
descriptions) are not available to it, and neither is any protocol.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import av
import numpy as np
from av.audio.stream import AudioStream
from av.container import InputContainer
from av.stream import Discard

from .audio import SAMPLE_RATE

# Demuxers of self-contained files that carry sound. Never add one that opens what it finds named inside.
CONTAINERS = (
    "aac,ac3,aiff,amr,ape,asf,au,avi,caf,dts,eac3,flac,flv,loas,matroska,mov,mp3,mpc,mpc8,mpeg,mpegts,"
    "nistsphere,ogg,rm,tta,voc,w64,wav,wv"
)
# Decoders that may run. Video is left out, so that looking into a film never decodes a picture.
AUDIO_CODECS = (
    "aac,aac_latm,ac3,adpcm_adx,adpcm_ima_qt,adpcm_ima_wav,adpcm_ms,adpcm_swf,adpcm_yamaha,"
    "alac,als,amrnb,amrwb,ape,cook,dca,eac3,flac,g722,g726,g726le,gsm,gsm_ms,libopus,"
    "mlp,mp1,mp1float,mp2,mp2float,mp3,mp3adu,mp3adufloat,mp3float,mp3on4,mp3on4float,mpc7,"
    "mpc8,nellymoser,opus,pcm_alaw,pcm_bluray,pcm_dvd,pcm_f16le,pcm_f24le,pcm_f32be,pcm_f32le,"
    "pcm_f64be,pcm_f64le,pcm_mulaw,pcm_s16be,pcm_s16be_planar,pcm_s16le,pcm_s16le_planar,"
    "pcm_s24be,pcm_s24le,pcm_s24le_planar,pcm_s32be,pcm_s32le,pcm_s32le_planar,pcm_s64be,"
    "pcm_s64le,pcm_s8,pcm_s8_planar,pcm_u16be,pcm_u16le,pcm_u24be,pcm_u24le,pcm_u32be,"
    "pcm_u32le,pcm_u8,speex,truehd,tta,vorbis,wavpack,wmalossless,wmapro,wmav1,wmav2,"
    "wmavoice"
)
GEN_PTS = 1  # AVFMT_FLAG_GENPTS
MIN_RATE, MAX_RATE = 1_000, 768_000  # samples per second that a real recording can have
MAX_CHANNELS_WITH_LAYOUT = 8  # above this FFmpeg has no downmix
MAX_FAULTS = 20_000  # undecodable packets in a row after which the rest counts as damaged
LENGTH_TOLERANCE = 0.25  # seconds that may be missing from the length in a header
ESTIMATED_LENGTH = frozenset({"aac", "ac3", "dts", "eac3", "loas", "mp3", "mpeg"})  # no length in the header
MAX_PROBE_PACKETS = 5_000  # packets looked at to find out whether a claimed length is true
IO_BUFFER = 1 << 16  # bytes handed to FFmpeg at once
BLOCK_SAMPLES = 1 << 20  # decoded samples are collected in blocks of 2 MiB


class MediaError(Exception):
    """Input that cannot be used; the text is one line for users."""


class EmptyMedia(MediaError):
    """No bytes, or a valid file without a single sample."""


class UndecodableMedia(MediaError):
    """Not a known media format, or damaged beyond use."""


class NoAudioStream(MediaError):
    """A media file that carries no sound."""


class MediaTooLarge(MediaError):
    """More bytes than the limit."""


class MediaTooLong(MediaError):
    """More seconds than the limit."""


@dataclass(frozen=True)
class MediaLimits:
    """What one input may cost. max_seconds: of decoded audio. max_bytes: of the encoded input."""

    max_seconds: float = 7200.0
    max_bytes: int = 200 * 2**20


@dataclass(frozen=True, eq=False)
class DecodedAudio:
    """The sound of one file.

    samples: float32 [n], 16 kHz mono in [-1, 1), whole multiples of 1/32768; sample 0 is time 0.
    truncated: part of the input was damaged and is missing. container, codec: FFmpeg's names.
    """

    samples: np.ndarray
    truncated: bool
    container: str
    codec: str

    @property
    def duration(self) -> float:
        """Seconds, from the samples that there are and not from what a header says."""
        return len(self.samples) / SAMPLE_RATE


def decode_audio(
    source: bytes | bytearray | memoryview | Path | BinaryIO, limits: MediaLimits | None = None
) -> DecodedAudio:
    """Decodes the first audio stream of `source` to 16 kHz mono.

    Resampling and downmix are FFmpeg's (`-ac 1 -ar 16000`, to 16 bits), so the samples are those that
    openai-whisper's load_audio gets: stereo is the mean of both channels, 5.1 and the like are FFmpeg's
    normalised mix without the bass channel. More than 8 channels are averaged. Timestamps in the container
    are ignored: gaps are closed, and time counts from the first sample. A file object must be seekable; it
    is read from its start and left open.

    Thread-safe; FFmpeg runs without the interpreter lock. Memory is bounded by the limits: 4 bytes a sample
    beside the input, and a few blocks.

    Raises EmptyMedia, UndecodableMedia, NoAudioStream, MediaTooLarge, MediaTooLong, or OSError where the
    file cannot be read.
    """
    limits = limits or MediaLimits()
    if isinstance(source, Path):
        with source.open("rb") as opened:
            return decode_audio(opened, limits)
    file = io.BytesIO(source) if isinstance(source, bytes | bytearray | memoryview) else source
    size = file.seek(0, io.SEEK_END)
    if size > limits.max_bytes:
        raise MediaTooLarge(f"The file has {size} bytes; the limit is {limits.max_bytes}.")
    if size == 0:
        raise EmptyMedia("The file is empty.")

    container, stream = _open(file)
    if (container.duration or 0) > limits.max_seconds * av.time_base:
        with closing(container):
            if _has_packet_after(container, stream, limits.max_seconds):
                raise _too_long(limits)
        container, stream = _open(file)  # a seek back to the start is not exact in every format
    with closing(container):
        return _decode(container, stream, limits)


def _open(file: BinaryIO) -> tuple[InputContainer, AudioStream]:
    """The container and its first audio stream, every other stream left out."""
    file.seek(0)
    try:
        container = av.open(
            _Nameless(file),
            "r",
            container_options={
                "format_whitelist": CONTAINERS,
                "codec_whitelist": AUDIO_CODECS,
                "protocol_whitelist": "",
            },
            metadata_errors="replace",
            buffer_size=IO_BUFFER,
        )
    except av.FFmpegError as error:
        raise UndecodableMedia(
            "The file is not in a known audio or video format, or it is damaged."
        ) from error
    # PyAV asks FFmpeg to invent missing timestamps, for which it would queue packets without bound.
    container.flags &= ~GEN_PTS
    stream = next(iter(container.streams.audio), None)
    if stream is None:
        with closing(container):
            if len(container.streams) > 0:
                raise NoAudioStream("The file has no audio stream.")
            raise UndecodableMedia("The file is damaged: nothing in it can be decoded.")
    if stream.codec_context is None or stream.codec_context.name not in AUDIO_CODECS.split(","):
        container.close()
        raise UndecodableMedia("The audio in the file is in an unknown or unsupported encoding.")
    for other in container.streams:
        if other.index != stream.index:
            other.discard = Discard.all
    return container, stream


def _has_packet_after(container: InputContainer, stream: AudioStream, seconds: float) -> bool:
    """Whether sound really exists at `seconds`. Headers may lie, a packet found there does not.

    This answers at once for hours of audio that would take long to decode up to the limit.
    """
    start = container.start_time or 0
    try:
        container.seek(start + int(seconds * av.time_base))
        for packet in islice(container.demux(stream), MAX_PROBE_PACKETS):
            if packet.size and packet.pts is not None and packet.time_base is not None:
                end = float((packet.pts + (packet.duration or 0)) * packet.time_base)
                if end - start / av.time_base > seconds:
                    return True
    except av.FFmpegError:
        return False  # nothing can be read there; decoding from the start decides
    return False


def _decode(container: InputContainer, stream: AudioStream, limits: MediaLimits) -> DecodedAudio:
    store = _SampleStore(int(limits.max_seconds * SAMPLE_RATE))
    resampler = _Resampler()
    faults = 0
    damaged = False
    for packet in _packets(container, stream):
        try:
            if packet is None:
                damaged = True
                continue
            for frame in stream.decode(packet):
                store.extend(resampler.push(frame))
                faults = 0
        except (av.FFmpegError, _BadFrame):
            damaged, faults = True, faults + 1
        if store.full:
            raise _too_long(limits)
        if faults >= MAX_FAULTS:
            break
    store.extend(resampler.flush())
    if store.full:
        raise _too_long(limits)
    claimed = float(stream.duration * stream.time_base) if stream.duration and stream.time_base else 0.0
    if store.count == 0:
        if damaged or claimed > 0:
            raise UndecodableMedia("The file is damaged: nothing in it can be decoded.")
        raise EmptyMedia("The file has no audio samples.")
    name = container.format.name
    short = name not in ESTIMATED_LENGTH and store.count / SAMPLE_RATE < claimed - LENGTH_TOLERANCE
    return DecodedAudio(store.take(), damaged or short, name, stream.codec_context.name)


def _packets(container: InputContainer, stream: AudioStream) -> Iterator[av.Packet | None]:
    """The stream's packets, the last of them empty to flush the decoder; None where reading ended early."""
    try:
        yield from container.demux(stream)
    except av.FFmpegError:
        yield None
        yield av.Packet()


class _BadFrame(Exception):
    """A decoded frame whose description cannot be true."""


class _Nameless:
    """What FFmpeg may do with the input: read and seek. No name: no extension to guess from."""

    def __init__(self, file: BinaryIO) -> None:
        self.read, self.seek, self.tell = file.read, file.seek, file.tell


class _Resampler:
    """Frames of any and changing kind → int16 [n] at 16 kHz mono."""

    def __init__(self) -> None:
        self._kind: tuple[str, str, int] | None = None
        self._resampler = av.AudioResampler()

    def push(self, frame: av.AudioFrame) -> Iterator[np.ndarray]:
        channels = frame.layout.nb_channels
        if not (MIN_RATE <= frame.sample_rate <= MAX_RATE and channels > 0):
            raise _BadFrame
        if channels > MAX_CHANNELS_WITH_LAYOUT:
            frame = _average(frame)
        kind = (frame.format.name, frame.layout.name, frame.sample_rate)
        if kind != self._kind:
            yield from self.flush()
            self._resampler = av.AudioResampler("s16", "mono", SAMPLE_RATE)
        converted = self._resampler.resample(frame)
        self._kind = kind  # only now: a kind that cannot be converted leaves nothing to flush
        for out in converted:
            yield out.to_ndarray()[0]

    def flush(self) -> Iterator[np.ndarray]:
        if self._kind is not None:
            self._kind = None
            for out in self._resampler.resample(None):
                yield out.to_ndarray()[0]


def _average(frame: av.AudioFrame) -> av.AudioFrame:
    """The mean of all channels as a float frame."""
    array = frame.to_ndarray()
    if frame.format.is_packed:
        array = array.reshape(-1, frame.layout.nb_channels).T
    mono = array.mean(axis=0, dtype=np.float64, keepdims=True)
    if array.dtype.kind == "u":
        mono -= 128.0
    if array.dtype.kind in "ui":
        mono /= 2.0 ** (8 * array.dtype.itemsize - 1)
    averaged = av.AudioFrame.from_ndarray(mono.astype(np.float32), format="fltp", layout="mono")
    averaged.sample_rate = frame.sample_rate
    return averaged


class _SampleStore:
    """Collects up to `limit` samples at 2 bytes each in blocks, and hands them out as one float array."""

    def __init__(self, limit: int) -> None:
        self.count = 0
        self._limit = limit
        self._blocks: list[np.ndarray] = []

    @property
    def full(self) -> bool:
        """More has come in than the limit."""
        return self.count > self._limit

    def extend(self, parts: Iterator[np.ndarray]) -> None:
        for part in parts:
            while len(part) and not self.full:
                used = self.count % BLOCK_SAMPLES
                if used == 0:
                    self._blocks.append(np.empty(BLOCK_SAMPLES, np.int16))
                piece = part[: BLOCK_SAMPLES - used]
                self._blocks[-1][used : used + len(piece)] = piece
                self.count += len(piece)
                part = part[len(piece) :]

    def take(self) -> np.ndarray:
        """float32 [count] in [-1, 1); each block is freed as soon as it is copied."""
        samples = np.empty(self.count, np.float32)
        for start in range(0, self.count, BLOCK_SAMPLES):
            piece = samples[start : start + BLOCK_SAMPLES]
            np.multiply(self._blocks[0][: len(piece)], np.float32(1 / 32768), out=piece)
            del self._blocks[0]
        return samples


def _too_long(limits: MediaLimits) -> MediaTooLong:
    return MediaTooLong(f"The audio is longer than the limit of {limits.max_seconds:g} seconds.")
