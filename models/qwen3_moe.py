"""Qwen3-MoE: Qwen3 whose feed-forwards are mixtures of experts, all or every few layers."""

from __future__ import annotations

from .base import ModelError
from .decoder_config import (
    CheckpointConfig,
    DecoderConfig,
    FeedForwardConfig,
    LayerConfig,
    MoEConfig,
    activation,
    attention,
    decoder,
    flag,
    integer,
    mlp,
    rms,
    sliding_window,
)


def qwen3_moe_config(config: CheckpointConfig) -> DecoderConfig:
    bias = flag(config, "attention_bias")
    window = sliding_window(config) if flag(config, "use_sliding_window") else None
    mixer = attention(config, qk_norm="before", qkv_bias=bias, out_bias=bias, window=window)
    dense_layers = config.get("mlp_only_layers") or []
    if not isinstance(dense_layers, list):
        raise ModelError("the model's configuration has no usable mlp_only_layers")
    step = integer(config, "decoder_sparse_step", 1)

    def feed_forward(layer: int) -> FeedForwardConfig:
        sparse = layer not in dense_layers and (layer + 1) % step == 0
        return qwen_experts(config) if sparse else mlp(config)

    layers = [LayerConfig(mixer, feed_forward(i)) for i in range(integer(config, "num_hidden_layers"))]
    return decoder(config, layers, rms(config))


def qwen_experts(config: CheckpointConfig) -> MoEConfig:
    """num_experts is what published checkpoints have, num_local_experts what the reference writes now."""
    count = integer(config, "num_experts" if config.get("num_experts") is not None else "num_local_experts")
    top_k = integer(config, "num_experts_per_tok")
    if top_k > count:
        raise ModelError("the model's tokens choose more experts than it has")
    return MoEConfig(
        num_experts=count,
        top_k=top_k,
        expert_size=integer(config, "moe_intermediate_size"),
        activation=activation(config),
        normalize=flag(config, "norm_topk_prob"),
    )
