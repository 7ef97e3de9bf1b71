"""What GGUF files call tensors, and what llama.cpp's converter (convert_hf_to_gguf.py) does to them, undone."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .base import ModelError
from .gguf_config import EMBEDDINGS, LAYER, OUTPUT, ROPE_FACTORS, Shapes

MODULES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
MIXTURE = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.kv_b_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}


HUNYUAN_NORMS = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}

# By architecture: the modules of a layer, without "weight" and "bias".
MODULES_OF: Mapping[str, Mapping[str, str]] = {
    "llama": MODULES,
    "qwen2": MODULES,
    "qwen3": MODULES,
    "qwen3moe": MODULES | MIXTURE,
    "gemma3": MODULES | SANDWICH,
    "hunyuan-dense": MODULES | HUNYUAN_NORMS,
    "deepseek2": MODULES | MIXTURE | LATENT,
}


@dataclass(frozen=True)
class Target:
    """One tensor of the hub's layout and what it is made of.

    sources: GGUF tensors. index: the entry of the outermost dimension to take. transform: what undoes the
    converter's change, None for nothing.
    """

    name: str
    sources: tuple[str, ...]
    index: int | None = None
    transform: Callable[..., Tensor] | None = None


def _unpermute(heads: int, weight: Tensor) -> Tensor:
    """Rows of each head, ordered for rotary embeddings of neighbours: a0 b0 a1 b1 … → a0 a1 … b0 b1 …"""
    return weight.reshape(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def _minus_one(weight: Tensor) -> Tensor:
    """Gemma's norms multiply by 1 + weight; the file has the sum."""
    return weight.float() - 1


def _join_latent(key: Tensor, value: Tensor) -> Tensor:
    """[heads, rank, nope] transposed, and [heads, v, rank] below it → [heads * (nope + v), rank]."""
    return torch.cat((key.transpose(1, 2), value), 1).flatten(0, 1)


def plan(label: str, shapes: Shapes, config: Mapping[str, Any]) -> list[Target]:
    """What to make of every tensor. Raises ModelError for one that the architecture does not have."""
    modules = MODULES_OF[config["gguf_architecture"]]
    norm = _minus_one if config["gguf_architecture"] == "gemma3" else None
    top = {
        EMBEDDINGS: Target("model.embed_tokens.weight", (EMBEDDINGS,)),
        OUTPUT: Target("lm_head.weight", (OUTPUT,)),
        "output_norm.weight": Target("model.norm.weight", ("output_norm.weight",), None, norm),
    }
    targets = []
    for name, shape in shapes.items():
        if name == ROPE_FACTORS:
            continue  # part of the configuration
        if name in top:
            targets.append(top[name])
            continue
        match = LAYER.fullmatch(name)
        if match and int(match[1]) >= config["num_hidden_layers"]:
            continue  # layers that predict further tokens ahead
        found = _layer_targets(match, shapes, config, modules) if match else None
        if found is None:
            raise ModelError(f"{label}: this architecture has no tensor {name[:80]!r} of shape {list(shape)}")
        targets += found
    return targets


def _layer_targets(
    match: re.Match[str], shapes: Shapes, config: Mapping[str, Any], modules: Mapping[str, str]
) -> list[Target] | None:
    """None for a tensor that the architecture does not have, or not in this shape."""
    source, layer, leaf, kind = match[0], match[1], match[2], match[3]
    shape, prefix = shapes[source], f"model.layers.{layer}."
    if leaf == "exp_probs_b" and "ffn_gate_inp" in modules:
        return [Target(prefix + "mlp.gate.e_score_correction_bias", (source,))]
    if leaf in ("attn_k_b", "attn_v_b") and "attn_k_b" in modules:
        pair = f"blk.{layer}.attn_k_b.weight", f"blk.{layer}.attn_v_b.weight"
        key, value = (shapes.get(name, ()) for name in pair)
        if len(key) != 3 or len(value) != 3 or (key[0], key[1]) != (value[0], value[2]):
            return None
        target = Target(prefix + "self_attn.kv_b_proj.weight", pair, None, _join_latent)
        return [target] if leaf == "attn_k_b" else []
    module = modules.get(leaf)
    if module is None:
        return None
    if "{}" in module:
        if len(shape) != 3 or kind != "weight":
            return None
        return [Target(f"{prefix}{module.format(i)}.weight", (source,), i) for i in range(shape[0])]
    transform: Callable[..., Tensor] | None = None
    if config["gguf_architecture"] == "llama" and leaf in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if leaf == "attn_q" else "num_key_value_heads"]
        if shape[0] != heads * config["head_dim"]:
            return None
        transform = partial(_unpermute, heads)
    elif config["gguf_architecture"] == "gemma3" and leaf.endswith("norm"):
        transform = _minus_one
    return [Target(f"{prefix}{module}.{kind}", (source,), None, transform)]
