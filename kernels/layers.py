"""Layers shared by encoders and models. Parameters are uninitialised until weights are copied into them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .ops import ACTIVATIONS, Rope, rms_norm, rope_frequencies, rope_rotation


def parameter(*shape: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)


class Linear(nn.Module):
    """y = x Wᵀ + b, with W [outputs, inputs].

    `parts` names consecutive slices of the outputs, so that projections which checkpoints store apart
    (query, key, value) are computed by one product. They are equally long unless `sizes` tells each length.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool = True,
        *,
        dtype: torch.dtype,
        parts: Sequence[str] = (),
        biased_parts: Sequence[str] | None = None,
        sizes: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.weight = parameter(outputs, inputs, dtype=dtype)
        self.bias: nn.Parameter | None = parameter(outputs, dtype=dtype) if bias else None
        self.parts = tuple(parts)
        self.sizes = tuple(sizes) if sizes else (outputs // max(len(self.parts), 1),) * len(self.parts)
        self.biased_parts = self.parts if biased_parts is None else tuple(biased_parts)
        if self.bias is not None and len(self.biased_parts) < len(self.parts):
            self.bias.data.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def named_weights(self, prefix: str) -> Mapping[str, Tensor]:
        """Checkpoint names → the (views of) parameters to fill. With parts, prefix has a "{}" for the part."""
        if not self.parts:
            named = {f"{prefix}.weight": self.weight.data}
            return named | ({f"{prefix}.bias": self.bias.data} if self.bias is not None else {})
        result = {}
        start = 0
        for part, size in zip(self.parts, self.sizes, strict=True):
            rows = slice(start, start + size)
            start += size
            result[f"{prefix.format(part)}.weight"] = self.weight.data[rows]
            if self.bias is not None and part in self.biased_parts:
                result[f"{prefix.format(part)}.bias"] = self.bias.data[rows]
        return result


class LayerNorm(nn.Module):
    """Layer normalisation over the last axis (Ba et al. 2016), computed in float32."""

    def __init__(self, size: int, eps: float = 1e-5, *, bias: bool = True, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = parameter(size, dtype=dtype)
        self.bias = parameter(size, dtype=dtype) if bias else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is torch.float32:
            return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
        weight, bias = self.weight.float(), None if self.bias is None else self.bias.float()
        return F.layer_norm(x.float(), x.shape[-1:], weight, bias, self.eps).to(x.dtype)

    def named_weights(self, prefix: str) -> Mapping[str, Tensor]:
        named = {f"{prefix}.weight": self.weight.data}
        return named | ({f"{prefix}.bias": self.bias.data} if self.bias is not None else {})


class RMSNorm(nn.Module):
    """x / rms(x) * (weight + offset) over the last axis; offset is 1 where checkpoints store weight - 1."""

    def __init__(self, size: int, eps: float, offset: float = 0.0, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = parameter(size, dtype=dtype)
        self.eps = eps
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.offset)

    def named_weights(self, prefix: str) -> Mapping[str, Tensor]:
        return {f"{prefix}.weight": self.weight.data}


class MLP(nn.Module):
    """Two linear layers with an exact (erf) GELU between."""

    def __init__(self, size: int, hidden: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.fc1 = Linear(size, hidden, dtype=dtype)
        self.fc2 = Linear(hidden, size, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))

    def named_weights(self, prefix: str) -> Mapping[str, Tensor]:
        return {**self.fc1.named_weights(f"{prefix}.fc1"), **self.fc2.named_weights(f"{prefix}.fc2")}


class RotaryEmbedding(nn.Module):
    """The frequencies of a rotary position embedding, on the model's device."""

    frequencies: Tensor

    def __init__(self, rope: Rope) -> None:
        super().__init__()
        self.rope = rope
        self.register_buffer("frequencies", rope_frequencies(rope), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """See `ops.rope_rotation`."""
        return rope_rotation(positions, self.frequencies, self.rope)


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)) (Shazeer 2020), gate and up in one product."""

    def __init__(
        self, size: int, hidden: int, activation: str, bias: bool = False, *, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.gate_up = Linear(size, 2 * hidden, bias, dtype=dtype, parts=("gate_proj", "up_proj"))
        self.down = Linear(hidden, size, bias, dtype=dtype)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.activation(gate) * up)

    def named_weights(self, prefix: str) -> Mapping[str, Tensor]:
        return {
            **self.gate_up.named_weights(prefix + ".{}"),
            **self.down.named_weights(f"{prefix}.down_proj"),
        }
