"""The gated delta net mixer (Yang et al. 2025) as Qwen3.5 has it: a state of fixed size instead of keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.gated_delta import causal_conv_, gated_delta_rule_
from ..kernels.layers import Linear, parameter
from ..kernels.ops import ACTIVATIONS, rms_norm
from .base import KVGroupSpec

if TYPE_CHECKING:
    from .decoder import Step
    from .decoder_config import DecoderConfig


@dataclass(frozen=True)
class GatedDeltaNetConfig:
    """Sizes of one layer; conv_width: tokens that the convolution sees, this one included."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    activation: str
    group = "state"
    rope = None
    query_scale = None

    @property
    def conv_channels(self) -> int:
        """Queries, keys and values side by side."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of the convolution's last inputs, and of the delta rule's state."""
        return (
            (self.conv_channels, self.conv_width - 1),
            (self.value_heads, self.key_dim, self.value_dim),
        )


class GatedDeltaNet(nn.Module):
    """index counts the layers of the state group."""

    prefix = "linear_attn"

    def __init__(
        self, decoder: DecoderConfig, config: GatedDeltaNetConfig, index: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.config = config
        self.index = index
        self.eps = decoder.norm.eps
        values = config.value_heads * config.value_dim
        # One product for queries, keys and values, the output gate, the rates and the decays.
        sizes = (config.conv_channels, values, config.value_heads, config.value_heads)
        self.inputs = Linear(
            decoder.hidden_size,
            sum(sizes),
            bias=False,
            dtype=dtype,
            parts=("qkv", "z", "b", "a"),
            sizes=sizes,
        )
        self.conv = parameter(config.conv_channels, config.conv_width, dtype=dtype)
        self.decay_bias = parameter(config.value_heads, dtype=dtype)
        self.log_decay = parameter(config.value_heads, dtype=dtype)
        self.norm = parameter(config.value_dim, dtype=dtype)
        self.out = Linear(values, decoder.hidden_size, bias=False, dtype=dtype)

    @staticmethod
    def cache_group(config: GatedDeltaNetConfig, num_layers: int, dtype: torch.dtype) -> KVGroupSpec:
        conv, rule = (torch.Size(shape).numel() for shape in config.state_shapes)
        return KVGroupSpec(config.group, "state", num_layers, state_size=conv + rule)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        config, tokens = self.config, len(x)
        qkv, gate, rate, decay = self.inputs(x).split(self.inputs.sizes, dim=-1)
        g = -self.log_decay.float().exp() * F.softplus(decay.float() + self.decay_bias.float())
        beta = rate.sigmoid()
        mixed = torch.cat(
            [
                self._sequence(qkv[first:last], g[first:last], beta[first:last], state)
                for first, last, state in self._sequences(step)
            ]
        )
        normed = rms_norm(mixed.to(x.dtype), self.norm, self.eps)
        gated = normed.float() * F.silu(gate.view(tokens, config.value_heads, -1).float())
        return self.out(gated.to(x.dtype).reshape(tokens, -1))

    def _sequences(self, step: Step) -> list[tuple[int, int, Tensor]]:
        states = step.context.states[self.config.group]
        starts = states.query_start_loc
        return [(starts[i], starts[i + 1], states.state(i, self.index)) for i in range(len(states.blocks))]

    def _sequence(self, qkv: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
        """One sequence's tokens of this step; its flat state is changed in place."""
        config, tokens = self.config, len(qkv)
        conv_shape, rule_shape = config.state_shapes
        cut = torch.Size(conv_shape).numel()
        mixed = causal_conv_(qkv, self.conv, state[:cut].view(conv_shape))
        mixed = ACTIVATIONS[config.activation](mixed)
        keys = config.key_heads * config.key_dim
        query, key, value = mixed.split([keys, keys, config.value_heads * config.value_dim], dim=-1)
        return gated_delta_rule_(
            query.reshape(tokens, config.key_heads, -1),
            key.reshape(tokens, config.key_heads, -1),
            value.reshape(tokens, config.value_heads, -1),
            g,
            beta,
            state[cut:].view(rule_shape),
        )

    def named_weights(self, prefix: str) -> Mapping[str, Tensor]:
        return {
            **self.inputs.named_weights(prefix + ".in_proj_{}"),
            f"{prefix}.conv1d.weight": self.conv.data[:, None],
            f"{prefix}.dt_bias": self.decay_bias.data,
            f"{prefix}.A_log": self.log_decay.data,
            f"{prefix}.norm.weight": self.norm.data,
            **self.out.named_weights(f"{prefix}.out_proj"),
        }
