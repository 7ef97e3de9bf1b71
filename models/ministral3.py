"""Ministral 3: Mistral with YaRN, and queries that grow with their position as in Llama 4."""

from __future__ import annotations

from dataclasses import replace

from .decoder_config import (
    AttentionConfig,
    CheckpointConfig,
    DecoderConfig,
    QueryScale,
    integer,
    number,
    rope_parameters,
)
from .mistral import mistral_config


def ministral3_config(config: CheckpointConfig) -> DecoderConfig:
    base = mistral_config(config)
    table = rope_parameters(config)
    if table.get("llama_4_scaling_beta") is None:
        return base
    period = integer(table, "original_max_position_embeddings")
    scale = QueryScale(number(table, "llama_4_scaling_beta"), period)
    layers = []
    for layer in base.layers:
        assert isinstance(layer.mixer, AttentionConfig)
        layers.append(replace(layer, mixer=replace(layer.mixer, query_scale=scale)))
    return replace(base, layers=tuple(layers))
