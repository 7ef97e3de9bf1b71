"""Llama, Qwen2, Qwen3 and Gemma 3 equal the reference implementation on the same checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .family_parity import check_parity, load, make_checkpoint

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama 3": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}},
    ),
    "llama dynamic": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}},
    ),
    "qwen2": ("Qwen2", {}),
    "qwen2 windowed": ("Qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen3 biased": ("Qwen3", {"attention_bias": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, tmp_path: Path) -> None:
    family, sizes = CASES[case]
    theirs = make_checkpoint(tmp_path, f"{family}Config", f"{family}ForCausalLM", **sizes)
    check_parity(theirs, load(tmp_path))


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_hidden_layers": 7, "sliding_window": 20, "rope_parameters": GEMMA_ROPE},
        {"num_hidden_layers": 2, "sliding_window": 512, "final_logit_softcapping": 3.0},
        {
            "num_hidden_layers": 3,
            "sliding_window": 17,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ],
    ids=["five to one", "short sequences and softcap", "own order"],
)
def test_gemma3(sizes: dict[str, Any], tmp_path: Path) -> None:
    theirs = make_checkpoint(
        tmp_path,
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        embedding_std=0.05,
        query_pre_attn_scalar=24,
        **sizes,
    )
    check_parity(theirs, load(tmp_path))


def test_gemma3_groups(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "Gemma3TextConfig", "Gemma3ForCausalLM", num_hidden_layers=7, sliding_window=20)
    groups = {group.name: group for group in load(tmp_path).kv_cache_spec.groups}
    assert {name: (group.num_layers, group.window) for name, group in groups.items()} == {
        "sliding": (6, 20),
        "full": (1, None),
    }
