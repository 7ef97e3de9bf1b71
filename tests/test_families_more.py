"""Mistral, Ministral 3, HunYuan, Qwen3-MoE and Cohere2-MoE equal the reference on the same checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sensorium.models.base import ModelError

from .family_parity import check_parity, load, make_checkpoint

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "max_position_embeddings": 512,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
PLAIN_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}
ALPHA = {"rope_type": "dynamic", "rope_theta": 10_000.0, "alpha": 50.0, "factor": 1.0}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
COHERE = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "intermediate_size": 40,
    "prefix_dense_intermediate_size": 72,
    "num_hidden_layers": 6,
    "first_k_dense_replace": 1,
    "sliding_window": 20,
    "logit_scale": 0.5,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral windowed": ("Mistral", {"sliding_window": 18}),
    "mistral yarn": ("Mistral", {"sliding_window": None, "rope_parameters": PLAIN_YARN}),
    "ministral3": ("Ministral3", {"rope_parameters": YARN}),
    "hunyuan": ("HunYuanDenseV1", {"rope_parameters": ALPHA}),
    "hunyuan tied": ("HunYuanDenseV1", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3 moe": ("Qwen3Moe", EXPERTS | {"norm_topk_prob": True}),
    "qwen3 moe mixed": ("Qwen3Moe", EXPERTS | {"decoder_sparse_step": 2, "std": 0.3}),
    "cohere2 moe": ("Cohere2Moe", COHERE | {"num_shared_experts": 2}),
    "cohere2 moe sigmoid": (
        "Cohere2Moe",
        COHERE
        | {
            "expert_selection_fn": "sigmoid",
            "num_shared_experts": 1,
            "shared_expert_combination_strategy": "sum",
            "rms_norm_eps": 1e-6,
        },
    ),
    "cohere2 moe no prefix": ("Cohere2Moe", COHERE | {"first_k_dense_replace": 0}),
}


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, tmp_path: Path) -> None:
    family, sizes = CASES[case]
    tied = family == "Cohere2Moe" or sizes.get("tie_word_embeddings")
    theirs = make_checkpoint(
        tmp_path, f"{family}Config", f"{family}ForCausalLM", embedding_std=0.1 if tied else 0.2, **sizes
    )
    check_parity(theirs, load(tmp_path))


def test_stacked_experts_load_like_single_ones(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "Qwen3MoeConfig", "Qwen3MoeForCausalLM", **EXPERTS)
    single = load(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    for layer in range(3):
        base = f"model.layers.{layer}.mlp.experts"
        part = {
            name: torch.stack([weights.pop(f"{base}.{expert}.{name}.weight") for expert in range(6)])
            for name in ("gate_proj", "up_proj", "down_proj")
        }
        weights[f"{base}.gate_up_proj"] = torch.cat([part["gate_proj"], part["up_proj"]], dim=1)
        weights[f"{base}.down_proj"] = part["down_proj"]
    save_file(weights, file)
    stacked = load(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(single.parameters(), stacked.parameters(), strict=True))


def test_an_expert_that_lacks_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "Qwen3MoeConfig", "Qwen3MoeForCausalLM", **EXPERTS)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.experts.4.up_proj.weight"]
    save_file(weights, file)
    with pytest.raises(ModelError, match=r"lacks.*layers\.1\.mlp\.experts\.4\.up_proj"):
        load(tmp_path)
