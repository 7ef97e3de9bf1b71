"""Block-quantised weights of GGUF files, turned into float32.

A block holds the numbers of a few consecutive weights of a row, with scales of its own. The layouts are those
of ggml (ggml-common.h, ggml-quants.c); the arithmetic, operation by operation, is that of the `gguf` package,
so that the results are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK_WEIGHTS = 1 << 18  # weights unpacked at a time: what is between input and output stays in the cache


@dataclass(frozen=True)
class BlockFormat:
    """One way to store weights.

    size: weights in a block. num_bytes: bytes of a block. dtype: of formats that need no unpacking.
    unpack: uint8 [blocks, num_bytes] → float32 [blocks, size].
    """

    name: str
    size: int
    num_bytes: int
    dtype: torch.dtype | None = None
    unpack: Callable[[Tensor], Tensor] | None = None


def _half(data: Tensor) -> Tensor:
    """uint8 [blocks, 2] → float32 [blocks, 1]."""
    return data.contiguous().view(torch.float16).float()


def _nibbles(data: Tensor, run: int) -> Tensor:
    """uint8 [blocks, n] → uint8 [blocks, 2n]: of each run of bytes the low halves, then the high halves."""
    runs = data.reshape(len(data), -1, run)
    return torch.stack((runs & 0x0F, runs >> 4), 2).reshape(len(data), -1)


def _bits(data: Tensor, run: int, width: int) -> Tensor:
    """uint8 [blocks, n] → [blocks, 8n/width]: of each run the lowest `width` bits, then the next, …"""
    runs = data.reshape(len(data), -1, run)
    mask = (1 << width) - 1
    return torch.stack([(runs >> shift) & mask for shift in range(0, 8, width)], 2).reshape(len(data), -1)


def _bit_per_weight(data: Tensor) -> Tensor:
    """uint8 [blocks, n] → [blocks, 8n], each byte's lowest bit first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
    return ((data.unsqueeze(-1) >> shifts) & 1).reshape(len(data), -1)


def _q8_0(data: Tensor) -> Tensor:
    return data[:, 2:].view(torch.int8).float() * _half(data[:, :2])


def _q4_0(data: Tensor) -> Tensor:
    return _half(data[:, :2]) * (_nibbles(data[:, 2:], 16).float() - 8)


def _q4_1(data: Tensor) -> Tensor:
    return (_half(data[:, :2]) * _nibbles(data[:, 4:], 16).float()).add_(_half(data[:, 2:4]))


def _q5_0(data: Tensor) -> Tensor:
    values = _nibbles(data[:, 6:], 16) | (_bit_per_weight(data[:, 2:6]) << 4)
    return _half(data[:, :2]) * (values.float() - 16)


def _q5_1(data: Tensor) -> Tensor:
    values = _nibbles(data[:, 8:], 16) | (_bit_per_weight(data[:, 4:8]) << 4)
    return (_half(data[:, :2]) * values.float()).add_(_half(data[:, 2:4]))


def _scales_and_minima(data: Tensor) -> tuple[Tensor, Tensor]:
    """The head of Q4_K and Q5_K, uint8 [blocks, 16]: two factors, and 8 + 8 numbers of 6 bits in 12 bytes.

    Returns the scale and the minimum of each 32 weights, float32 [blocks, 8, 1].
    """
    low, high, rest = data[:, 4:16].reshape(len(data), 3, 4).unbind(1)
    scales = torch.cat((low & 0x3F, (rest & 0x0F) | ((low >> 2) & 0x30)), 1)
    minima = torch.cat((high & 0x3F, (rest >> 4) | ((high >> 2) & 0x30)), 1)
    factors = _half(data[:, :2]) * scales.float(), _half(data[:, 2:4]) * minima.float()
    return factors[0].unsqueeze(-1), factors[1].unsqueeze(-1)


def _q4_k(data: Tensor) -> Tensor:
    scales, minima = _scales_and_minima(data[:, :16])
    values = _nibbles(data[:, 16:], 32).reshape(len(data), 8, 32).float()
    return values.mul_(scales).sub_(minima).reshape(len(data), 256)


def _q5_k(data: Tensor) -> Tensor:
    scales, minima = _scales_and_minima(data[:, :16])
    values = _nibbles(data[:, 48:], 32) | (_bits(data[:, 16:48], 32, 1) << 4)
    return values.reshape(len(data), 8, 32).float().mul_(scales).sub_(minima).reshape(len(data), 256)


def _q6_k(data: Tensor) -> Tensor:
    values = _nibbles(data[:, :128], 64) | (_bits(data[:, 128:192], 32, 2) << 4)
    scales = _half(data[:, 208:]) * data[:, 192:208].view(torch.int8).float()
    return (values.reshape(len(data), 16, 16).float() - 32).mul_(scales.unsqueeze(-1)).reshape(len(data), 256)


# By the number of the type in the file.
GGUF_FORMATS = {
    0: BlockFormat("F32", 1, 4, torch.float32),
    1: BlockFormat("F16", 1, 2, torch.float16),
    30: BlockFormat("BF16", 1, 2, torch.bfloat16),
    2: BlockFormat("Q4_0", 32, 18, None, _q4_0),
    3: BlockFormat("Q4_1", 32, 20, None, _q4_1),
    6: BlockFormat("Q5_0", 32, 22, None, _q5_0),
    7: BlockFormat("Q5_1", 32, 24, None, _q5_1),
    8: BlockFormat("Q8_0", 32, 34, None, _q8_0),
    12: BlockFormat("Q4_K", 256, 144, None, _q4_k),
    13: BlockFormat("Q5_K", 256, 176, None, _q5_k),
    14: BlockFormat("Q6_K", 256, 210, None, _q6_k),
}


def dequantize(data: Tensor, block_format: BlockFormat) -> Tensor:
    """uint8 [rows, bytes of a row], contiguous → [rows, weights of a row].

    float32 for block formats; F32, F16 and BF16 are a view of the data in their own type, which must then be
    aligned to it. The bytes of a row must be whole blocks.
    """
    rows = data.shape[0]
    if block_format.unpack is None:
        assert block_format.dtype is not None
        return data.view(block_format.dtype)
    blocks = data.reshape(-1, block_format.num_bytes)
    result = torch.empty(len(blocks), block_format.size, device=data.device)
    step = CHUNK_WEIGHTS // block_format.size
    for start in range(0, len(blocks), step):
        result[start : start + step] = block_format.unpack(blocks[start : start + step])
    return result.reshape(rows, -1)
