"""Layers shared by encoders and models. Parameters are uninitialised until weights are copied into them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def parameter(*shape: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)


class Linear(nn.Module):
    """y = x Wᵀ + b, with W [outputs, inputs].

    `parts` names consecutive slices of the outputs, so that projections which checkpoints store apart
    (query, key, value) are computed by one product.
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
    ) -> None:
        super().__init__()
        self.weight = parameter(outputs, inputs, dtype=dtype)
        self.bias: nn.Parameter | None = parameter(outputs, dtype=dtype) if bias else None
        self.parts = tuple(parts)
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
        size = self.weight.shape[0] // len(self.parts)
        result = {}
        for index, part in enumerate(self.parts):
            rows = slice(index * size, (index + 1) * size)
            result[f"{prefix.format(part)}.weight"] = self.weight.data[rows]
            if self.bias is not None and part in self.biased_parts:
                result[f"{prefix.format(part)}.bias"] = self.bias.data[rows]
        return result


class LayerNorm(nn.Module):
    """Layer normalisation over the last axis (Ba et al. 2016), computed in float32."""

    def __init__(self, size: int, eps: float = 1e-5, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = parameter(size, dtype=dtype)
        self.bias = parameter(size, dtype=dtype)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is torch.float32:
            return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
        weight, bias = self.weight.float(), self.bias.float()
        return F.layer_norm(x.float(), x.shape[-1:], weight, bias, self.eps).to(x.dtype)

    def named_weights(self, prefix: str) -> Mapping[str, Tensor]:
        return {f"{prefix}.weight": self.weight.data, f"{prefix}.bias": self.bias.data}


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
