"""Qwen3: RMS norms on the heads of query and key instead of Qwen2's biases."""

from __future__ import annotations

from .decoder_config import CheckpointConfig, DecoderConfig, LayerConfig, attention, decoder, flag, mlp, rms
from .qwen2 import windowed_layers


def qwen3_config(config: CheckpointConfig) -> DecoderConfig:
    bias = flag(config, "attention_bias")
    mixer = attention(config, qk_norm="before", qkv_bias=bias, out_bias=bias)
    layers = [LayerConfig(windowed, mlp(config)) for windowed in windowed_layers(config, mixer)]
    return decoder(config, layers, rms(config))
