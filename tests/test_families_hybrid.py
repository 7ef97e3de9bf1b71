"""DeepSeek-V3 and Qwen3.5 on tiny random checkpoints: latent caches and recurrent states equal the reference."""

from __future__ import annotations

from pathlib import Path

import pytest

from .family_parity import check_parity, load, make_checkpoint, unsupported

DEEPSEEK = {
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "head_dim": 8,
    "num_key_value_heads": 4,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
    "beta_fast": 32,
    "beta_slow": 1,
}
QWEN3_5 = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    },
}


@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"q_lora_rank": None},
        {"rope_parameters": YARN},
        {"rope_interleave": False, "norm_topk_prob": False},
    ],
    ids=["plain", "uncompressed queries", "yarn", "half-split rope"],
)
def test_deepseek_v3(tmp_path: Path, switches: dict) -> None:
    model = make_checkpoint(tmp_path, "DeepseekV3Config", "DeepseekV3ForCausalLM", **(DEEPSEEK | switches))
    check_parity(model, load(tmp_path))


def test_deepseek_v3_caches_one_vector_a_token(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "DeepseekV3Config", "DeepseekV3ForCausalLM", **DEEPSEEK)
    (group,) = load(tmp_path).kv_cache_spec.groups
    assert group.latent
    assert (group.num_kv_heads, group.head_dim) == (1, 40)


def test_qwen3_5(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "Qwen3_5TextConfig", "Qwen3_5ForCausalLM", **QWEN3_5)
    ours = load(tmp_path)
    assert [g.kind for g in ours.kv_cache_spec.groups] == ["state", "full"]
    check_parity(model, ours)


def test_group_sizes_that_do_not_fit_are_refused() -> None:
    base = {"model_type": "deepseek_v3", "hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
    sizes = {"vocab_size": 9, "intermediate_size": 8, "max_position_embeddings": 64, "rope_theta": 10000.0}
    assert "groups" in unsupported({**base, **sizes, **DEEPSEEK, "topk_group": 5})
    assert "linear_num_key_heads" in unsupported(
        {**base, **sizes, "model_type": "qwen3_5_text", "head_dim": 16}
    )
