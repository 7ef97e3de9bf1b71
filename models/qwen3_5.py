"""Qwen3.5 text models: three gated delta nets to one attention layer whose output is gated."""

from __future__ import annotations

from collections.abc import Mapping

from .base import ModelError
from .decoder_config import (
    FULL,
    CheckpointConfig,
    DecoderConfig,
    LayerConfig,
    MixerConfig,
    activation,
    attention,
    decoder,
    flag,
    integer,
    layer_types,
    mlp,
    read_rope,
    rms,
    rope_parameters,
)
from .gated_delta_net import GatedDeltaNetConfig

LINEAR = "linear_attention"
ROTARY_SHARE = 0.25  # of a head's components; what configurations leave out


def qwen3_5_config(config: CheckpointConfig) -> DecoderConfig:
    """A text configuration, or one that holds it as text_config beside a vision tower's."""
    text = config.get("text_config")
    names: tuple[tuple[str, str], ...] = ()
    if isinstance(text, Mapping):
        config, names = text, (("model.", "model.language_model."),)
    bias = flag(config, "attention_bias")
    table = {"partial_rotary_factor": ROTARY_SHARE, **rope_parameters(config)}
    gated = attention(
        config, read_rope(config, table), qk_norm="before", gated=True, qkv_bias=bias, out_bias=bias
    )
    mixers: Mapping[str, MixerConfig] = {FULL: gated, LINEAR: delta_net(config)}
    layers = [LayerConfig(mixers[kind], mlp(config)) for kind in kinds(config)]
    return decoder(config, layers, rms(config, offset=1.0), names=names)


def delta_net(config: CheckpointConfig) -> GatedDeltaNetConfig:
    net = GatedDeltaNetConfig(
        key_heads=integer(config, "linear_num_key_heads"),
        value_heads=integer(config, "linear_num_value_heads"),
        key_dim=integer(config, "linear_key_head_dim"),
        value_dim=integer(config, "linear_value_head_dim"),
        conv_width=integer(config, "linear_conv_kernel_dim", 4),
        activation=activation(config),
    )
    if net.value_heads % net.key_heads or net.conv_width < 2:
        raise ModelError("the model's linear attention has sizes that cannot be used")
    return net


def kinds(config: CheckpointConfig) -> list[str]:
    """The kind of each layer; without layer_types every fourth (full_attention_interval) is attention."""
    listed = layer_types(config, (FULL, LINEAR))
    if listed is not None:
        return listed
    interval = integer(config, "full_attention_interval", 4)
    return [LINEAR if (i + 1) % interval else FULL for i in range(integer(config, "num_hidden_layers"))]
