"""Elementwise operations of decoders: RMS norm, rotary position embeddings, activations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

RopeKind = Literal["default", "linear", "ntk_alpha", "yarn", "llama3"]

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x / rms(x) * (weight + offset) over the last axis (Zhang & Sennrich 2019), computed in float32."""
    scale = weight.float() + offset if offset else weight.float()
    return F.rms_norm(x.float(), x.shape[-1:], scale, eps).to(x.dtype)


@dataclass(frozen=True)
class Rope:
    """A rotary position embedding (Su et al. 2021) and how its frequencies are stretched.

    dim: how many leading components of a head turn; the rest pass unchanged. interleaved: components 2i and
    2i + 1 turn together, else i and i + dim / 2.
    linear: all frequencies / factor. ntk_alpha: theta * alpha^(dim / (dim - 2)), alpha given as factor.
    yarn (Peng et al. 2023): frequencies with fewer than beta_slow turns in original_positions are divided by
    factor, those with more than beta_fast are kept, between them a ramp; cosine and sine are multiplied by
    magnitude; truncate rounds the ramp's ends outwards.
    llama3: the same idea with wavelengths original_positions / low_freq and / high_freq as the ends.
    """

    theta: float
    dim: int
    interleaved: bool = False
    kind: RopeKind = "default"
    factor: float = 1.0
    original_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    magnitude: float = 1.0
    low_freq: float = 1.0
    high_freq: float = 4.0


def rope_frequencies(rope: Rope) -> Tensor:
    """float32 [dim / 2], radians a position."""
    theta = rope.theta
    if rope.kind == "ntk_alpha":
        theta *= rope.factor ** (rope.dim / (rope.dim - 2))
    frequencies = 1.0 / theta ** (torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "yarn":
        return _yarn(frequencies, rope)
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    return frequencies


def _yarn(frequencies: Tensor, rope: Rope) -> Tensor:
    def component(turns: float) -> float:
        """The (fractional) index of the frequency that makes so many turns in the original positions."""
        ratio = rope.original_positions / (turns * 2 * math.pi)
        return rope.dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = component(rope.beta_fast), component(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    width = high - low or 0.001
    stretched = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return frequencies / rope.factor * stretched + frequencies * (1 - stretched)


def _llama3(frequencies: Tensor, rope: Rope) -> Tensor:
    wavelengths = 2 * math.pi / frequencies
    kept = (rope.original_positions / wavelengths - rope.low_freq) / (rope.high_freq - rope.low_freq)
    kept = kept.clamp(0, 1)
    return frequencies / rope.factor * (1 - kept) + frequencies * kept


def rope_rotation(positions: Tensor, frequencies: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
    """Cosine and sine for positions [tokens]; float32, each [tokens, 1, dim / 2] to spread over heads."""
    angles = positions[:, None, None].float() * frequencies
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if rope.magnitude == 1.0 else (cos * rope.magnitude, sin * rope.magnitude)


def apply_rope_(x: Tensor, rotation: tuple[Tensor, Tensor], interleaved: bool = False) -> None:
    """Turns the leading components of [tokens, heads, head_dim] in place, by the angles of `rope_rotation`."""
    cos, sin = rotation
    half = cos.shape[-1]
    if interleaved:
        first, second = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    else:
        first, second = x[..., :half], x[..., half : 2 * half]
    turned = torch.addcmul(first * cos, second, sin, value=-1)
    second.copy_(torch.addcmul(second * cos, first, sin))
    first.copy_(turned)
