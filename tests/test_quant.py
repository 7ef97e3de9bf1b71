"""Unpacking of GGUF blocks, bit for bit against the `gguf` package."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf import quants as reference
from hypothesis import given, settings
from hypothesis import strategies as st
from sensorium.kernels import quant

FORMATS = [pytest.param(number, id=entry.name) for number, entry in quant.GGUF_FORMATS.items()]


def test_names_and_sizes_are_the_library_s() -> None:
    for number, entry in quant.GGUF_FORMATS.items():
        kind = GGMLQuantizationType(number)
        assert (entry.name, (entry.size, entry.num_bytes)) == (kind.name, GGML_QUANT_SIZES[kind])


def both(data: np.ndarray, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    ours = quant.dequantize(torch.from_numpy(data), quant.GGUF_FORMATS[number])
    with np.errstate(invalid="ignore", over="ignore"):
        theirs = torch.from_numpy(reference.dequantize(data, GGMLQuantizationType(number)).copy())
    return ours, theirs


@pytest.mark.parametrize("number", FORMATS)
@settings(max_examples=20)
@given(rows=st.integers(1, 3), blocks=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
def test_any_bytes_unpack_as_in_the_library(number: int, rows: int, blocks: int, seed: int) -> None:
    """Infinities and NaNs among the scales included."""
    num_bytes = quant.GGUF_FORMATS[number].num_bytes * blocks * 4
    data = np.random.default_rng(seed).integers(0, 256, (rows, num_bytes), np.uint8)
    ours, theirs = both(data, number)
    assert ours.shape == theirs.shape
    assert torch.equal(ours.float().nan_to_num(123.0), theirs.nan_to_num(123.0))


@pytest.mark.parametrize("number", FORMATS)
def test_every_value_of_every_byte_is_seen(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More blocks than a chunk holds, finite scales, no two rows alike."""
    monkeypatch.setattr(quant, "CHUNK_WEIGHTS", 1024)
    entry = quant.GGUF_FORMATS[number]
    blocks = np.random.default_rng(number).integers(0, 256, (512, entry.num_bytes), np.uint8)
    blocks[:, 1::2] &= 0xBF if entry.dtype is None else 0xFF  # no infinite scale at whatever place it is
    ours, theirs = both(blocks.reshape(32, -1), number)
    assert torch.equal(ours.float().nan_to_num(123.0), theirs.nan_to_num(123.0))
    if entry.dtype is None:
        assert ours.isfinite().all()
        assert len(ours.unique()) > 1000


def test_plain_formats_are_views_of_the_file() -> None:
    data = torch.zeros(2, 8, dtype=torch.uint8)
    for number, dtype in ((0, torch.float32), (1, torch.float16), (30, torch.bfloat16)):
        result = quant.dequantize(data, quant.GGUF_FORMATS[number])
        assert result.dtype is dtype
        assert result.data_ptr() == data.data_ptr()
