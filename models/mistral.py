"""Mistral: Llama whose layers all see a window only, if the checkpoint has one."""

from __future__ import annotations

from .decoder_config import (
    CheckpointConfig,
    DecoderConfig,
    LayerConfig,
    attention,
    decoder,
    integer,
    mlp,
    rms,
    sliding_window,
)


def mistral_config(config: CheckpointConfig) -> DecoderConfig:
    layer = LayerConfig(attention(config, window=sliding_window(config)), mlp(config))
    return decoder(config, [layer] * integer(config, "num_hidden_layers"), rms(config))
