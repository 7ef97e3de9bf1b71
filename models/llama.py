"""Llama and its likes (SmolLM2): the plain decoder."""

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


def llama_config(config: CheckpointConfig) -> DecoderConfig:
    bias = flag(config, "attention_bias")
    mixer = attention(config, qkv_bias=bias, out_bias=bias)
    layer = LayerConfig(mixer, mlp(config, bias=flag(config, "mlp_bias")))
    return decoder(config, [layer] * integer(config, "num_hidden_layers"), rms(config))
