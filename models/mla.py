"""Multi-head latent attention (DeepSeek-AI 2024): one short vector a token is all that is cached.

Keys and values of every head are linear images of the cached vector. The image of the keys is moved to the
query's side and that of the values behind the attention, so that the cached vectors are attended to as they
lie, by all heads together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..kernels.attention import attention, store_kv
from ..kernels.layers import Linear, RMSNorm
from ..kernels.ops import Rope, apply_rope_
from .base import KVGroupSpec

if TYPE_CHECKING:
    from .decoder import Step
    from .decoder_config import DecoderConfig

LATENT_EPS = 1e-6  # of the norms of the compressed query and key; fixed in every published model


@dataclass(frozen=True)
class MLAConfig:
    """Sizes of one layer. query_rank None: queries are not compressed. scale: of the scores.

    A head's query and key have key_dim components without and rope.dim with a position.
    """

    num_heads: int
    query_rank: int | None
    latent_rank: int
    key_dim: int
    value_dim: int
    rope: Rope
    scale: float
    bias: bool = False
    group = "latent"
    query_scale = None

    @property
    def query_dim(self) -> int:
        return self.key_dim + self.rope.dim

    @property
    def cached_dim(self) -> int:
        return self.latent_rank + self.rope.dim


class MLAttention(nn.Module):
    """index counts the layers of the cache group."""

    prefix = "self_attn"

    def __init__(self, decoder: DecoderConfig, config: MLAConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.index = index
        size, heads = decoder.hidden_size, config.num_heads
        if config.query_rank is not None:
            self.q_down = Linear(size, config.query_rank, config.bias, dtype=dtype)
            self.q_norm = RMSNorm(config.query_rank, LATENT_EPS, dtype=dtype)
        self.q_up = Linear(config.query_rank or size, heads * config.query_dim, bias=False, dtype=dtype)
        self.kv_down = Linear(size, config.cached_dim, config.bias, dtype=dtype)
        self.kv_norm = RMSNorm(config.latent_rank, LATENT_EPS, dtype=dtype)
        outputs = heads * (config.key_dim + config.value_dim)
        self.kv_up = Linear(config.latent_rank, outputs, bias=False, dtype=dtype)
        self.out = Linear(heads * config.value_dim, size, config.bias, dtype=dtype)

    @staticmethod
    def cache_group(config: MLAConfig, num_layers: int, dtype: torch.dtype) -> KVGroupSpec:
        return KVGroupSpec(config.group, "full", num_layers, 1, config.cached_dim, dtype, latent=True)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        config, tokens = self.config, len(x)
        query = self.q_up(self.q_norm(self.q_down(x)) if config.query_rank is not None else x)
        plain, turned = query.view(tokens, config.num_heads, -1).split(
            [config.key_dim, config.rope.dim], dim=-1
        )
        cached = self.kv_down(x).view(tokens, 1, 1, -1)
        cached[..., : config.latent_rank] = self.kv_norm(cached[..., : config.latent_rank])
        rotation = step.rotations[config.rope]
        apply_rope_(turned, rotation, config.rope.interleaved)
        apply_rope_(cached[:, 0, :, config.latent_rank :], rotation, config.rope.interleaved)
        attn = step.context.attn[config.group]
        store_kv(cached, self.index, attn)
        # [heads, key_dim | value_dim, latent_rank]
        up = self.kv_up.weight.view(config.num_heads, -1, config.latent_rank)
        keys_up, values_up = up.split([config.key_dim, config.value_dim], dim=1)
        latent = torch.einsum("thd,hdr->thr", plain, keys_up)
        query = torch.cat([latent, turned], dim=-1)
        attended = attention(query, self.index, attn, config.scale, value_dim=config.latent_rank)
        values = torch.einsum("thr,hdr->thd", attended, values_up)
        return self.out(values.reshape(tokens, -1))

    def named_weights(self, prefix: str) -> Mapping[str, Tensor]:
        named = {
            **self.kv_down.named_weights(f"{prefix}.kv_a_proj_with_mqa"),
            **self.kv_norm.named_weights(f"{prefix}.kv_a_layernorm"),
            **self.kv_up.named_weights(f"{prefix}.kv_b_proj"),
            **self.out.named_weights(f"{prefix}.o_proj"),
        }
        if self.config.query_rank is None:
            return {**named, **self.q_up.named_weights(f"{prefix}.q_proj")}
        return {
            **named,
            **self.q_down.named_weights(f"{prefix}.q_a_proj"),
            **self.q_norm.named_weights(f"{prefix}.q_a_layernorm"),
            **self.q_up.named_weights(f"{prefix}.q_b_proj"),
        }
