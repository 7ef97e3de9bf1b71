"""Cohere 2 with experts: attention and feed-forward side by side, no positions in layers that see everything."""

from __future__ import annotations

from dataclasses import replace

from .base import ModelError
from .decoder_config import (
    FULL,
    SLIDING,
    AttentionConfig,
    CheckpointConfig,
    DecoderConfig,
    FeedForwardConfig,
    LayerConfig,
    MoEConfig,
    NormConfig,
    activation,
    attention,
    choice,
    decoder,
    flag,
    integer,
    layer_types,
    mlp,
    number,
    read_rope,
    rms,
    sliding_window,
)

DENSE, SPARSE = "dense", "sparse"


def cohere2_moe_config(config: CheckpointConfig) -> DecoderConfig:
    bias = flag(config, "attention_bias")
    rope = read_rope(config, interleaved=True)
    base = attention(config, rope, qkv_bias=bias, out_bias=bias)
    dense_turned = integer(config, "prefix_dense_sliding_window_pattern", 1) == 1
    attention_types, ffn_types = _layer_types(config)

    def mixer(kind: str, ffn: str) -> AttentionConfig:
        if kind == SLIDING:
            return replace(base, window=sliding_window(config))
        return base if ffn == DENSE and dense_turned else replace(base, rope=None)

    layers = [
        LayerConfig(mixer(kind, ffn), _feed_forward(config, ffn))
        for kind, ffn in zip(attention_types, ffn_types, strict=True)
    ]
    layer_norm = NormConfig("layer", number(config, "layer_norm_eps", 1e-5))
    return decoder(
        config,
        layers,
        layer_norm if config.get("rms_norm_eps") is None else rms(config),
        tied=True,
        block="parallel",
        logit_scale=number(config, "logit_scale", 0.0625),
    )


def _layer_types(config: CheckpointConfig) -> tuple[list[str], list[str]]:
    """The kind of attention and of feed-forward of each layer; a dense prefix has a pattern of its own."""
    num_layers = integer(config, "num_hidden_layers")
    dense = integer(config, "first_k_dense_replace") if config.get("first_k_dense_replace") else 0
    if dense > num_layers:
        raise ModelError("the model has fewer layers than first_k_dense_replace says")
    patterns = [integer(config, "prefix_dense_sliding_window_pattern", 1)] * dense
    patterns += [integer(config, "sliding_window_pattern", 4)] * (num_layers - dense)
    places = [*range(1, dense + 1), *range(1, num_layers - dense + 1)]
    kinds = [SLIDING if place % pattern else FULL for place, pattern in zip(places, patterns, strict=True)]
    ffns = [DENSE] * dense + [SPARSE] * (num_layers - dense)
    return (
        layer_types(config, (FULL, SLIDING)) or kinds,
        layer_types(config, (DENSE, SPARSE), "mlp_layer_types") or ffns,
    )


def _feed_forward(config: CheckpointConfig, kind: str) -> FeedForwardConfig:
    if kind == DENSE:
        return mlp(config, "prefix_dense_intermediate_size")
    count, top_k = integer(config, "num_experts", 8), integer(config, "num_experts_per_tok", 2)
    if top_k > count:
        raise ModelError("the model's tokens choose more experts than it has")
    size = integer(config, "intermediate_size")
    shared = integer(config, "num_shared_experts") if config.get("num_shared_experts") else 0
    sigmoid = choice(config, "expert_selection_fn", ("softmax", "sigmoid"), "softmax") == "sigmoid"
    combined = choice(config, "shared_expert_combination_strategy", ("average", "sum"), "average")
    return MoEConfig(
        num_experts=count,
        top_k=top_k,
        expert_size=size,
        activation=activation(config),
        scoring="sigmoid" if sigmoid else "chosen_softmax",
        normalize=sigmoid and flag(config, "norm_topk_prob", True),
        shared_size=shared * size,
        shared_average=combined == "average",
    )
