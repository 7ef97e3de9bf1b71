"""Gemma 3 text models (Gemma Team 2025): five windowed layers to a full one, each kind with its own RoPE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..kernels.ops import Rope
from .base import ModelError
from .decoder_config import (
    FULL,
    SLIDING,
    CheckpointConfig,
    DecoderConfig,
    LayerConfig,
    MLPConfig,
    activation,
    attention,
    decoder,
    flag,
    integer,
    layer_types,
    number,
    positive,
    read_rope,
    rms,
    rope_parameters,
    sliding_window,
)

FULL_THETA = 1_000_000.0
SLIDING_THETA = 10_000.0


def gemma3_config(config: CheckpointConfig) -> DecoderConfig:
    if flag(config, "use_bidirectional_attention"):
        raise ModelError("Gemma 3 encoders (attention in both directions) are not supported")
    full_rope, sliding_rope = gemma3_ropes(config)
    bias = flag(config, "attention_bias")
    full = attention(
        config,
        full_rope,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="before",
        scale=positive(config, "query_pre_attn_scalar", 256) ** -0.5,
    )
    mixers = {FULL: full, SLIDING: replace(full, rope=sliding_rope, window=sliding_window(config))}
    feed_forward = MLPConfig(integer(config, "intermediate_size"), activation(config, "hidden_activation"))
    softcap = config.get("final_logit_softcapping")
    return decoder(
        config,
        [LayerConfig(mixers[kind], feed_forward) for kind in gemma3_layer_types(config)],
        rms(config, offset=1.0),
        tied=True,
        block="sandwich",
        embed_scale=integer(config, "hidden_size") ** 0.5,
        final_softcap=None if softcap is None else positive(config, "final_logit_softcapping"),
    )


def gemma3_layer_types(config: CheckpointConfig) -> list[str]:
    types = layer_types(config, (FULL, SLIDING))
    if types is None:
        pattern = integer(config, "sliding_window_pattern", 6)
        layers = range(1, integer(config, "num_hidden_layers") + 1)
        types = [SLIDING if layer % pattern else FULL for layer in layers]
    return types


def gemma3_ropes(config: CheckpointConfig) -> tuple[Rope, Rope]:
    """Of full and of windowed layers. Older checkpoints scale the full layers' only."""
    local = {**config, "rope_theta": number(config, "rope_local_base_freq", SLIDING_THETA)}
    table = rope_parameters(config)
    full, sliding = table.get(FULL) or {}, table.get(SLIDING) or {}
    if not isinstance(full, Mapping) or not isinstance(sliding, Mapping):
        raise ModelError("the model's configuration has no usable rope_parameters")
    nested = FULL in table or SLIDING in table
    return read_rope(config, full if nested else table, FULL_THETA), read_rope(local, sliding)
