"""DeepSeek-V3 (DeepSeek-AI 2024): latent attention, and mixtures of many small experts behind dense layers."""

from __future__ import annotations

import math

from .base import ModelError
from .decoder_config import (
    CheckpointConfig,
    DecoderConfig,
    LayerConfig,
    MoEConfig,
    activation,
    decoder,
    flag,
    integer,
    mlp,
    number,
    read_rope,
    rms,
    rope_parameters,
)
from .mla import MLAConfig


def deepseek_v3_config(config: CheckpointConfig) -> DecoderConfig:
    mixer = latent_attention(config)
    dense = config.get("first_k_dense_replace", 3)
    if type(dense) is not int or dense < 0:
        raise ModelError("the model's configuration has no usable first_k_dense_replace")
    layers = [
        LayerConfig(mixer, mlp(config) if index < dense else experts(config))
        for index in range(integer(config, "num_hidden_layers"))
    ]
    return decoder(config, layers, rms(config))


def latent_attention(config: CheckpointConfig) -> MLAConfig:
    key_dim, rope_dim = integer(config, "qk_nope_head_dim"), integer(config, "qk_rope_head_dim")
    interleaved = flag(config, "rope_interleave", True)
    rope = read_rope({**config, "head_dim": rope_dim}, interleaved=interleaved)
    scale = (key_dim + rope_dim) ** -0.5
    table = rope_parameters(config)
    weight = number(table, "mscale_all_dim", 0.0)
    if rope.kind != "default" and weight and rope.factor > 1:
        scale *= (0.1 * weight * math.log(rope.factor) + 1.0) ** 2
    return MLAConfig(
        num_heads=integer(config, "num_attention_heads"),
        query_rank=None if config.get("q_lora_rank") is None else integer(config, "q_lora_rank"),
        latent_rank=integer(config, "kv_lora_rank"),
        key_dim=key_dim,
        value_dim=integer(config, "v_head_dim"),
        rope=rope,
        scale=scale,
        bias=flag(config, "attention_bias"),
    )


def experts(config: CheckpointConfig) -> MoEConfig:
    """n_routed_experts is what published checkpoints have, num_local_experts the reference's other name."""
    count = integer(config, "n_routed_experts" if config.get("n_routed_experts") else "num_local_experts")
    size = integer(config, "moe_intermediate_size")
    groups, top_groups = integer(config, "n_group", 1), integer(config, "topk_group", 1)
    top_k = integer(config, "num_experts_per_tok")
    if count % groups or top_groups > groups or top_k > count // groups * top_groups:
        raise ModelError("the model's groups of experts do not fit together")
    return MoEConfig(
        num_experts=count,
        top_k=top_k,
        expert_size=size,
        activation=activation(config),
        scoring="grouped_sigmoid",
        normalize=flag(config, "norm_topk_prob", True),
        scale=number(config, "routed_scaling_factor", 1.0),
        num_groups=groups,
        top_groups=top_groups,
        shared_size=size * integer(config, "n_shared_experts", 1),
    )
