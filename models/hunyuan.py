"""HunYuan dense v1: heads of query and key are normed after they are turned; RoPE stretched by an NTK alpha."""

from __future__ import annotations

from .decoder_config import (
    CheckpointConfig,
    DecoderConfig,
    LayerConfig,
    attention,
    decoder,
    flag,
    integer,
    mlp,
    rms,
)

NAMES = (("self_attn.q_norm", "self_attn.query_layernorm"), ("self_attn.k_norm", "self_attn.key_layernorm"))


def hunyuan_config(config: CheckpointConfig) -> DecoderConfig:
    bias = flag(config, "attention_bias")
    layer = LayerConfig(attention(config, qk_norm="after", qkv_bias=bias, out_bias=bias), mlp(config))
    return decoder(config, [layer] * integer(config, "num_hidden_layers"), rms(config), names=NAMES)
