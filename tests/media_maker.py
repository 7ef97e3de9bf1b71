"""Audio files of any kind, made on the spot."""

from __future__ import annotations

import io
import struct

import av
import numpy as np


def encode(
    samples: np.ndarray,
    container: str,
    codec: str,
    rate: int,
    *,
    layout: str = "mono",
    repeat: int = 1,
    bit_rate: int | None = None,
    options: dict[str, str] | None = None,
) -> bytes:
    """samples: int16 [n] or [channels, n], `repeat` times over. Returns the encoded file."""
    file = io.BytesIO()
    with av.open(file, "w", format=container, options=options or {}) as output:
        stream = output.add_stream(codec, rate=rate)
        stream.layout = layout
        if bit_rate is not None:
            stream.bit_rate = bit_rate
        context = stream.codec_context
        resampler = av.AudioResampler(
            context.format.name, layout, rate, frame_size=context.frame_size or 1024
        )
        packed = np.ascontiguousarray(np.atleast_2d(samples).T).reshape(1, -1)
        frame = av.AudioFrame.from_ndarray(packed, format="s16", layout=layout)
        frame.sample_rate = rate
        position = 0
        for _ in range(repeat):
            frame.pts = position
            position += frame.samples
            for piece in resampler.resample(frame):
                output.mux(stream.encode(piece))
        for piece in resampler.resample(None):
            output.mux(stream.encode(piece))
        output.mux(stream.encode(None))
    return file.getvalue()


def wav(
    data: bytes,
    *,
    form: int = 1,
    channels: int = 1,
    rate: int = 16_000,
    bits: int = 16,
    size: int | None = None,
    prefix: bytes = b"",
) -> bytes:
    """A RIFF file with these values in its header, true or not. size: of the data as the header says."""
    block = channels * bits // 8
    fmt = struct.pack("<HHIIHH", form, channels, rate, min(rate * block, 2**32 - 1), block & 0xFFFF, bits)
    body = b"WAVE" + prefix + b"fmt " + struct.pack("<I", len(fmt)) + fmt
    body += b"data" + struct.pack("<I", len(data) if size is None else size) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def tone(seconds: float, rate: int = 16_000, frequency: float = 440.0, level: float = 0.5) -> np.ndarray:
    """A sine wave, int16 [n]."""
    times = np.arange(round(seconds * rate)) / rate
    return np.round(np.sin(2 * np.pi * frequency * times) * level * 32767).astype(np.int16)
