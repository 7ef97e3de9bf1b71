"""Qwen2 and Qwen2.5: biases on query, key and value; the last layers may see a window only."""

from __future__ import annotations

from dataclasses import replace

from .decoder_config import (
    FULL,
    SLIDING,
    AttentionConfig,
    CheckpointConfig,
    DecoderConfig,
    LayerConfig,
    attention,
    decoder,
    flag,
    integer,
    layer_types,
    mlp,
    rms,
    sliding_window,
)


def qwen2_config(config: CheckpointConfig) -> DecoderConfig:
    mixers = windowed_layers(config, attention(config, qkv_bias=True))
    return decoder(config, [LayerConfig(mixer, mlp(config)) for mixer in mixers], rms(config))


def windowed_layers(config: CheckpointConfig, mixer: AttentionConfig) -> list[AttentionConfig]:
    """The mixer of every layer: with the window from layer max_window_layers on, if windows are used."""
    window = sliding_window(config) if flag(config, "use_sliding_window") else None
    num_layers = integer(config, "num_hidden_layers")
    types = layer_types(config, (FULL, SLIDING))
    if types is None:
        first = integer(config, "max_window_layers", num_layers) if window else num_layers
        types = [SLIDING if index >= first else FULL for index in range(num_layers)]
    return [replace(mixer, window=window if kind == SLIDING else None) for kind in types]
