"""Whisper's audio encoder: two convolutions and a pre-norm transformer (Radford et al. 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.layers import MLP, LayerNorm, Linear, parameter


@dataclass(frozen=True)
class WhisperEncoderConfig:
    """Sizes. num_positions: encoder outputs of a 30 s window, half its mel frames."""

    num_mel_bins: int
    hidden_size: int
    num_layers: int
    num_heads: int
    ffn_size: int
    num_positions: int


class WhisperEncoderLayer(nn.Module):
    def __init__(self, config: WhisperEncoderConfig, dtype: torch.dtype) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads = config.num_heads
        self.attention_norm = LayerNorm(size, dtype=dtype)
        # The key projection has no bias in any Whisper checkpoint.
        self.qkv = Linear(size, 3 * size, dtype=dtype, parts=("q", "k", "v"), biased_parts=("q", "v"))
        self.out = Linear(size, size, dtype=dtype)
        self.mlp_norm = LayerNorm(size, dtype=dtype)
        self.mlp = MLP(size, config.ffn_size, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, size = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, tokens, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, size)
        x = x + self.out(attended)
        return x + self.mlp(self.mlp_norm(x))

    def named_weights(self, prefix: str) -> Mapping[str, Tensor]:
        return {
            **self.attention_norm.named_weights(f"{prefix}.self_attn_layer_norm"),
            **self.qkv.named_weights(prefix + ".self_attn.{}_proj"),
            **self.out.named_weights(f"{prefix}.self_attn.out_proj"),
            **self.mlp_norm.named_weights(f"{prefix}.final_layer_norm"),
            **self.mlp.named_weights(prefix),
        }


class WhisperEncoder(nn.Module):
    """Log-mel windows → one embedding each 20 ms."""

    def __init__(self, config: WhisperEncoderConfig, dtype: torch.dtype) -> None:
        super().__init__()
        size = config.hidden_size
        self.config = config
        self.conv1_weight = parameter(size, config.num_mel_bins, 3, dtype=dtype)
        self.conv1_bias = parameter(size, dtype=dtype)
        self.conv2_weight = parameter(size, size, 3, dtype=dtype)
        self.conv2_bias = parameter(size, dtype=dtype)
        self.positions = parameter(config.num_positions, size, dtype=dtype)
        self.layers = nn.ModuleList(WhisperEncoderLayer(config, dtype) for _ in range(config.num_layers))
        self.norm = LayerNorm(size, dtype=dtype)

    def forward(self, mel: Tensor) -> Tensor:
        """[batch, n_mels, 2 * num_positions] → [batch, num_positions, hidden_size]."""
        x = F.gelu(F.conv1d(mel.to(self.conv1_weight.dtype), self.conv1_weight, self.conv1_bias, padding=1))
        x = F.gelu(F.conv1d(x, self.conv2_weight, self.conv2_bias, stride=2, padding=1))
        x = x.transpose(1, 2) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def named_weights(self, prefix: str) -> Mapping[str, Tensor]:
        weights: dict[str, Tensor] = {
            f"{prefix}.conv1.weight": self.conv1_weight.data,
            f"{prefix}.conv1.bias": self.conv1_bias.data,
            f"{prefix}.conv2.weight": self.conv2_weight.data,
            f"{prefix}.conv2.bias": self.conv2_bias.data,
            # A table, not a formula: recomputed sinusoids are 2.9e-4 away from the published ones.
            f"{prefix}.embed_positions.weight": self.positions.data,
            **self.norm.named_weights(f"{prefix}.layer_norm"),
        }
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, WhisperEncoderLayer)
            weights |= layer.named_weights(f"{prefix}.layers.{index}")
        return weights
