"""Names, sizes and values of small GGUF files of every architecture, as llama.cpp's converter writes them."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from sensorium.models.base import ModelError
from sensorium.models.gguf import open_gguf
from sensorium.models.gguf_config import ROPE_FACTORS

from .gguf_maker import LLAMA, dense_tensors, random, write


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """What the converter does to the rows of the llama architecture's queries and keys."""
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def test_llama_rows_come_back_in_order(tmp_path: Path) -> None:
    tensors = dense_tensors() | {"output.weight": random(16, 32)}
    stored = dict(tensors)
    for layer in range(2):
        for leaf, heads in (("attn_q", 4), ("attn_k", 2)):
            name = f"blk.{layer}.{leaf}.weight"
            stored[name] = permuted(tensors[name], heads)
    config, weights = open_gguf(write(tmp_path / "m.gguf", "llama", LLAMA, stored))
    found = dict(weights)
    assert config["tie_word_embeddings"] is False
    assert found["lm_head.weight"].numpy() == pytest.approx(tensors["output.weight"])
    for leaf, module in (("attn_q", "q_proj"), ("attn_k", "k_proj"), ("attn_v", "v_proj")):
        expected = torch.from_numpy(tensors[f"blk.1.{leaf}.weight"])
        assert torch.equal(found[f"model.layers.1.self_attn.{module}.weight"], expected)
    assert len(found) == len(tensors)


def test_stored_types_come_out_as_they_are(tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType
    kinds = {
        "blk.0.attn_v.weight": kind.F16,
        "blk.1.attn_v.weight": kind.BF16,
        "blk.0.ffn_up.weight": kind.Q8_0,
    }
    tensors = dense_tensors()
    found = dict(open_gguf(write(tmp_path / "m.gguf", "llama", LLAMA, tensors, kinds))[1])
    half = torch.from_numpy(tensors["blk.0.attn_v.weight"]).half()
    assert torch.equal(found["model.layers.0.self_attn.v_proj.weight"], half)
    brain = torch.from_numpy(tensors["blk.1.attn_v.weight"]).bfloat16()
    assert torch.equal(found["model.layers.1.self_attn.v_proj.weight"], brain)
    rounded = gguf.dequantize(gguf.quantize(tensors["blk.0.ffn_up.weight"], kind.Q8_0), kind.Q8_0)
    assert torch.equal(found["model.layers.0.mlp.up_proj.weight"], torch.from_numpy(rounded))


MOE = {"expert_count": 3, "expert_used_count": 2, "expert_feed_forward_length": 16}


def test_stacked_experts_come_out_one_by_one(tmp_path: Path) -> None:
    none: dict[str, Any] = {"ffn_gate": (), "ffn_up": (), "ffn_down": ()}
    stacked = {"ffn_gate_exps": (3, 16, 32), "ffn_up_exps": (3, 16, 32), "ffn_down_exps": (3, 32, 16)}
    tensors = dense_tensors(**none, **stacked, ffn_gate_inp=(3, 32), attn_q_norm=(8,), attn_k_norm=(8,))
    config, weights = open_gguf(write(tmp_path / "m.gguf", "qwen3moe", LLAMA | MOE, tensors))
    found = dict(weights)
    assert (config["model_type"], config["num_experts"], config["moe_intermediate_size"]) == (
        "qwen3_moe",
        3,
        16,
    )
    assert torch.equal(
        found["model.layers.0.mlp.gate.weight"], torch.from_numpy(tensors["blk.0.ffn_gate_inp.weight"])
    )
    for expert in range(3):
        expected = torch.from_numpy(tensors["blk.1.ffn_down_exps.weight"][expert])
        assert torch.equal(found[f"model.layers.1.mlp.experts.{expert}.down_proj.weight"], expected)
    assert torch.equal(
        found["model.layers.0.self_attn.q_norm.weight"], torch.from_numpy(tensors["blk.0.attn_q_norm.weight"])
    )


def test_latent_attention_is_joined_again(tmp_path: Path) -> None:
    """4 heads: keys of 6 without and 2 with rotary embedding, values of 5, rank 7; a dense first layer."""
    joined = random(4 * (6 + 5), 7, seed=5)
    per_head = joined.reshape(4, 11, 7)
    tensors = {
        "token_embd.weight": random(16, 32),
        "output_norm.weight": random(32),
        "blk.0.attn_q_a.weight": random(9, 32),
        "blk.0.attn_q_b.weight": random(32, 9),
        "blk.0.attn_kv_a_mqa.weight": random(9, 32),
        "blk.0.attn_k_b.weight": per_head[:, :6].swapaxes(1, 2).copy(),
        "blk.0.attn_v_b.weight": per_head[:, 6:].copy(),
        "blk.0.exp_probs_b.bias": random(3),
    }
    mla = {"attention.kv_lora_rank": 7, "attention.q_lora_rank": 9, "attention.key_length": 9}
    mla |= {"attention.key_length_mla": 8, "attention.value_length": 7, "attention.value_length_mla": 5}
    mla |= {"rope.dimension_count": 2, "expert_gating_func": 2, "expert_shared_count": 1, "block_count": 1}
    config, weights = open_gguf(write(tmp_path / "m.gguf", "deepseek2", LLAMA | MOE | mla, tensors))
    found = dict(weights)
    assert torch.equal(found["model.layers.0.self_attn.kv_b_proj.weight"], torch.from_numpy(joined))
    assert "model.layers.0.mlp.gate.e_score_correction_bias" in found
    sizes = {"qk_nope_head_dim": 6, "qk_rope_head_dim": 2, "v_head_dim": 5, "q_lora_rank": 9}
    assert config | sizes | {"model_type": "deepseek_v3", "n_routed_experts": 3} == config


def test_gemma_norms_lose_the_one_that_was_added(tmp_path: Path) -> None:
    norms = {"post_attention_norm": (32,), "post_ffw_norm": (32,), "attn_q_norm": (8,), "attn_k_norm": (8,)}
    tensors = dense_tensors(**norms)
    keys = LLAMA | {"attention.key_length": 8, "attention.sliding_window": 16}
    found = dict(open_gguf(write(tmp_path / "m.gguf", "gemma3", keys, tensors))[1])
    names = {
        "output_norm.weight": "model.norm.weight",
        "blk.0.ffn_norm.weight": "model.layers.0.pre_feedforward_layernorm.weight",
        "blk.0.post_attention_norm.weight": "model.layers.0.post_attention_layernorm.weight",
        "blk.0.post_ffw_norm.weight": "model.layers.0.post_feedforward_layernorm.weight",
        "blk.0.attn_q_norm.weight": "model.layers.0.self_attn.q_norm.weight",
    }
    for stored, name in names.items():
        assert torch.equal(found[name], torch.from_numpy(tensors[stored]) - 1)
    assert torch.equal(found["model.embed_tokens.weight"], torch.from_numpy(tensors["token_embd.weight"]))


def test_hunyuan_and_qwen2_names(tmp_path: Path) -> None:
    tensors = dense_tensors(attn_q_norm=(8,), attn_k_norm=(8,))
    config, weights = open_gguf(write(tmp_path / "h.gguf", "hunyuan-dense", LLAMA, tensors))
    assert config["model_type"] == "hunyuan_v1_dense"
    assert "model.layers.1.self_attn.query_layernorm.weight" in dict(weights)
    tensors = dense_tensors() | {f"blk.{layer}.attn_q.bias": random(32) for layer in range(2)}
    config, weights = open_gguf(write(tmp_path / "q.gguf", "qwen2", LLAMA, tensors))
    found = dict(weights)
    assert (config["model_type"], config["attention_bias"]) == ("qwen2", True)
    assert torch.equal(found["model.layers.0.self_attn.q_proj.bias"], torch.from_numpy(random(32)))


def test_rope_scaling(tmp_path: Path) -> None:
    keys = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 16,
    }
    config, _ = open_gguf(write(tmp_path / "y.gguf", "qwen3", LLAMA | keys, dense_tensors()))
    assert config["rope_scaling"] == {
        **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        **{"beta_fast": 32.0, "beta_slow": 1.0},
    }
    keys = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    config, _ = open_gguf(write(tmp_path / "l.gguf", "llama", LLAMA | keys, dense_tensors()))
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    with pytest.raises(ModelError, match="longrope"):
        open_gguf(
            write(
                tmp_path / "x.gguf",
                "llama",
                LLAMA | keys | {"rope.scaling.type": "longrope"},
                dense_tensors(),
            )
        )


def test_llama3_scaling_is_read_from_its_factors(tmp_path: Path) -> None:
    """The factors as the converter computes them, for heads of 64."""
    sizes = {"embedding_length": 64, "attention.head_count": 1, "attention.head_count_kv": 1}
    keys = LLAMA | sizes | {"rope.freq_base": 500_000.0}
    tensors = dense_tensors(hidden=64, heads=1, kv_heads=1, head_dim=64)
    factors = []
    for frequency in 1.0 / (500_000.0 ** (np.arange(0, 64, 2) / 64)):
        wavelength = 2 * np.pi / frequency
        smooth = (8192 / wavelength - 1) / 3
        between = 1 / ((1 - smooth) / 32 + smooth)
        factors.append(1 if wavelength < 2048 else 32 if wavelength > 8192 else between)
    tensors[ROPE_FACTORS] = np.array(factors, np.float32)
    config, weights = open_gguf(write(tmp_path / "m.gguf", "llama", keys, tensors))
    assert config["rope_scaling"] == {
        **{"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 8192,
    }
    assert len(dict(weights)) == len(tensors) - 1
    tensors[ROPE_FACTORS] = tensors[ROPE_FACTORS][::-1].copy()
    with pytest.raises(ModelError, match="rope scaling"):
        open_gguf(write(tmp_path / "x.gguf", "llama", keys, tensors))


def wrong(
    tmp_path: Path, change: Callable[[dict[str, Any], dict[str, np.ndarray]], None], name: str = "llama"
) -> None:
    keys: dict[str, Any] = dict(LLAMA)
    tensors = dense_tensors()
    change(keys, tensors)
    _, weights = open_gguf(write(tmp_path / "m.gguf", name, keys, tensors))
    dict(weights)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda keys, _: keys.update({"block_count": 3}), "3 layers and has 2"),
        (lambda keys, _: keys.update({"attention.head_count": 1 << 20}), "attn_q.weight"),
        (lambda keys, _: keys.update({"embedding_length": 1 << 30}), "token_embd"),
        (lambda keys, _: keys.update({"feed_forward_length": 1 << 30}), "ffn_up"),
        (lambda keys, _: keys.update({"expert_count": 8}), "experts"),
        (lambda keys, _: keys.pop("context_length"), "context_length"),
        (lambda keys, _: keys.update({"attention.layer_norm_rms_epsilon": float("nan")}), "epsilon"),
        (lambda _, tensors: tensors.pop("token_embd.weight"), "token_embd"),
        (lambda _, tensors: tensors.update({"blk.0.surprise.weight": random(2)}), "surprise"),
        (lambda _, tensors: tensors.update({"blk.1.attn_q.weight": random(3, 32)}), "attn_q"),
    ],
)
def test_contradictions_are_named(tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(ModelError, match=rf"^m\.gguf.*{message}"):
        wrong(tmp_path, change)


def test_sizes_are_checked_before_anything_is_made_of_them(tmp_path: Path) -> None:
    def many_layers(keys: dict[str, Any], _: object) -> None:
        keys |= {"block_count": 1 << 30, "attention.sliding_window": 4}

    def long_keys(keys: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        keys |= {"attention.key_length": 1 << 30, "rope.dimension_count": 1 << 30}
        tensors[ROPE_FACTORS] = random(4)

    tracemalloc.start()
    for change, name in ((many_layers, "gemma3"), (long_keys, "llama")):
        with pytest.raises(ModelError, match=r"layers|attn_q"):
            wrong(tmp_path, change, name)
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


def test_an_unsupported_architecture_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'mamba' is not supported; supported: deepseek2, gemma3"):
        wrong(tmp_path, lambda keys, tensors: None, "mamba")
