"""The configuration of a GGUF model: its metadata under the keys of the transformers library."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .base import ModelError

Shapes = Mapping[str, tuple[int, ...]]

EMBEDDINGS = "token_embd.weight"
OUTPUT = "output.weight"
ROPE_FACTORS = "rope_freqs.weight"
MAX_INTEGER = 1 << 31
LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,3})\.([a-z0-9_]+)\.(weight|bias)")
EXPERTS = re.compile(r"ffn_(gate|up|down)_exps")


class Metadata:
    """Checked access to the key-value pairs; `name` has the architecture's prefix left out."""

    def __init__(self, label: str, pairs: Mapping[str, Any]) -> None:
        self.label = label
        self.pairs = pairs
        self.architecture = self._text("general.architecture")

    def error(self, what: str) -> ModelError:
        return ModelError(f"{self.label}: {what}")

    def _text(self, key: str) -> str:
        value = self.pairs.get(key)
        if not isinstance(value, str):
            raise self.error(f"{key} is missing or no text")
        return value

    def has(self, name: str) -> bool:
        return f"{self.architecture}.{name}" in self.pairs

    def integer(self, name: str, default: int | None = None) -> int:
        """A count or size of at least 0; a list of equal ones, a value a layer, counts as one."""
        value = self.pairs.get(f"{self.architecture}.{name}", default)
        if hasattr(value, "tolist"):
            values = set(value.tolist())
            value = values.pop() if len(values) == 1 else None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < MAX_INTEGER:
            raise self.error(f"{self.architecture}.{name} is missing or no number that is supported")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.pairs.get(f"{self.architecture}.{name}", default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self.error(f"{self.architecture}.{name} is missing or no number")
        return float(value)

    def text(self, name: str, default: str) -> str:
        value = self.pairs.get(f"{self.architecture}.{name}", default)
        return value if isinstance(value, str) else default

    def token_id(self, name: str) -> int | None:
        value = self.pairs.get(f"tokenizer.ggml.{name}_token_id")
        return value if isinstance(value, int) and 0 <= value < MAX_INTEGER else None


def _sizes(meta: Metadata, shapes: Shapes) -> dict[str, Any]:
    """What every family has."""
    if EMBEDDINGS not in shapes or len(shapes[EMBEDDINGS]) != 2:
        raise meta.error(f"the tensor {EMBEDDINGS} is missing or no matrix")
    if not 0 < meta.integer("block_count") <= len(shapes):
        raise meta.error(f"it claims to have {meta.integer('block_count')} layers")
    heads = meta.integer("attention.head_count")
    hidden = meta.integer("embedding_length")
    if not heads or not hidden:
        raise meta.error("it has no attention heads or no width")
    result = {
        "vocab_size": shapes[EMBEDDINGS][0],
        "hidden_size": hidden,
        "intermediate_size": meta.integer("feed_forward_length", 0),
        "num_hidden_layers": meta.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.integer("attention.head_count_kv", heads),
        "head_dim": meta.integer("attention.key_length", hidden // heads),
        "max_position_embeddings": meta.integer("context_length"),
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": meta.number("rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(meta),
        "tie_word_embeddings": OUTPUT not in shapes,
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in shapes,
    }
    return result | {f"{name}_token_id": meta.token_id(name) for name in ("bos", "eos")}


def _rope_scaling(meta: Metadata) -> dict[str, Any] | None:
    kind = meta.text("rope.scaling.type", "none")
    factor = meta.number("rope.scaling.factor", 0.0)
    if kind == "none" or factor in (0.0, 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise meta.error(f"rope scaling {kind!r} is not supported")
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": meta.integer("rope.scaling.original_context_length"),
        "beta_fast": meta.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": meta.number("rope.scaling.yarn_beta_slow", 1.0),
    }
    if meta.has("rope.scaling.yarn_log_multiplier"):
        # 0.1 times what the hub's files have twice: for the tables, and for the attention's scale.
        scale = meta.number("rope.scaling.yarn_log_multiplier") * 10
        scaling |= {"mscale": scale, "mscale_all_dim": scale}
    return scaling


def _llama(meta: Metadata, shapes: Shapes) -> dict[str, Any]:
    if meta.integer("expert_count", 0):
        raise meta.error("mixtures of experts of the llama architecture are not supported")
    sizes = _sizes(meta, shapes)
    head_dim = meta.integer("rope.dimension_count", sizes["head_dim"])
    if head_dim != sizes["head_dim"]:
        raise meta.error("rotary embeddings of a part of each head are not supported")
    return sizes | {"model_type": "llama", "mlp_bias": "blk.0.ffn_up.bias" in shapes}


def _qwen2(meta: Metadata, shapes: Shapes) -> dict[str, Any]:
    return _sizes(meta, shapes) | {"model_type": "qwen2", "use_sliding_window": False}


def _qwen3(meta: Metadata, shapes: Shapes) -> dict[str, Any]:
    return _sizes(meta, shapes) | {"model_type": "qwen3", "use_sliding_window": False}


def _qwen3moe(meta: Metadata, shapes: Shapes) -> dict[str, Any]:
    return _sizes(meta, shapes) | {
        "model_type": "qwen3_moe",
        "use_sliding_window": False,
        "num_experts": meta.integer("expert_count"),
        "num_experts_per_tok": meta.integer("expert_used_count"),
        "moe_intermediate_size": meta.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,  # llama.cpp knows no other
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _hunyuan(meta: Metadata, shapes: Shapes) -> dict[str, Any]:
    """The converter has folded the family's NTK alpha into the base of the rotary embedding."""
    return _sizes(meta, shapes) | {"model_type": "hunyuan_v1_dense"}


def _gemma3(meta: Metadata, shapes: Shapes) -> dict[str, Any]:
    sizes = _sizes(meta, shapes)
    num_layers, heads = sizes["num_hidden_layers"], sizes["num_attention_heads"]
    pattern = meta.integer("attention.sliding_window_pattern", 6) or 1
    # 27B alone scales its queries by the width a head, not by the head's own size; files do not tell.
    scalar = sizes["hidden_size"] // heads if num_layers == 62 else sizes["head_dim"]
    return sizes | {
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": meta.integer("attention.sliding_window"),
        "layer_types": [
            "sliding_attention" if (index + 1) % pattern else "full_attention" for index in range(num_layers)
        ],
        "rope_local_base_freq": meta.number("rope.freq_base_swa", 10_000.0),
    }


def _deepseek(meta: Metadata, shapes: Shapes) -> dict[str, Any]:
    if meta.integer("expert_gating_func", 1) != 2:
        raise meta.error("DeepSeek-V2's softmax routing is not supported, only V3's")
    sizes = _sizes(meta, shapes)
    rope_dim = meta.integer("rope.dimension_count")
    key_length = meta.integer("attention.key_length_mla", sizes["head_dim"])
    if key_length <= rope_dim:
        raise meta.error("its keys are not longer than their rotary part")
    experts = meta.integer("expert_count")
    groups = 8 if experts == 256 else 1  # files from before there was a key for it
    return sizes | {
        "model_type": "deepseek_v3",
        "num_hidden_layers": sizes["num_hidden_layers"] - meta.integer("nextn_predict_layers", 0),
        "num_key_value_heads": sizes["num_attention_heads"],
        "head_dim": rope_dim,
        "q_lora_rank": meta.integer("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": meta.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": key_length - rope_dim,
        "qk_head_dim": key_length,
        "v_head_dim": meta.integer("attention.value_length_mla", meta.integer("attention.value_length")),
        "n_routed_experts": experts,
        "n_shared_experts": meta.integer("expert_shared_count"),
        "num_experts_per_tok": meta.integer("expert_used_count"),
        "moe_intermediate_size": meta.integer("expert_feed_forward_length"),
        "first_k_dense_replace": meta.integer("leading_dense_block_count", 0),
        "routed_scaling_factor": meta.number("expert_weights_scale", 1.0),
        "norm_topk_prob": meta.pairs.get(f"{meta.architecture}.expert_weights_norm") is not False,
        "n_group": meta.integer("expert_group_count", groups),
        "topk_group": meta.integer("expert_group_used_count", max(1, groups // 2)),
        "scoring_func": "sigmoid",
        "rope_interleave": True,
    }


CONFIGS: Mapping[str, Callable[[Metadata, Shapes], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3moe,
    "gemma3": _gemma3,
    "hunyuan-dense": _hunyuan,
    "deepseek2": _deepseek,
}


def config(meta: Metadata, shapes: Shapes, rope_factors: Tensor | None) -> dict[str, Any]:
    """A configuration under the keys of the transformers library, `model_type` included.

    rope_factors: the tensor ROPE_FACTORS, where the file has it. Raises ModelError.
    """
    architecture = CONFIGS.get(meta.architecture)
    if architecture is None:
        known = ", ".join(sorted(CONFIGS))
        raise meta.error(f"the architecture {meta.architecture[:40]!r} is not supported; supported: {known}")
    result = architecture(meta, shapes)
    result["gguf_architecture"] = meta.architecture
    _check_sizes(meta, result, shapes)
    if rope_factors is not None:
        result["rope_scaling"] = _llama3_scaling(meta, result, rope_factors)
    return result


def _llama3_scaling(meta: Metadata, config: Mapping[str, Any], factors: Tensor) -> dict[str, Any] | None:
    """Llama 3's scaling, of which files have only the divisors of the frequencies, from these divisors."""
    frequencies = config["rope_theta"] ** -(torch.arange(0, config["head_dim"], 2) / config["head_dim"])
    factors = factors.float()
    if factors.shape != frequencies.shape or not bool(factors.isfinite().all()):
        raise meta.error(f"the tensor {ROPE_FACTORS} has the wrong size or values")
    if bool((factors == 1).all()):
        return None
    scaling = {
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    wavelengths = 2 * math.pi / frequencies
    smooth = ((8192 / wavelengths - 1) / 3).clamp(0, 1)
    expected = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    if not torch.allclose(factors, expected, rtol=1e-3):
        raise meta.error(f"the rope scaling in {ROPE_FACTORS} is not Llama 3's, no other is supported")
    return scaling


def _check_sizes(meta: Metadata, config: Mapping[str, Any], shapes: Shapes) -> None:
    """Sizes that disagree with the tensors are found before a model of such a size is built."""
    blocks = {int(match[1]) for match in map(LAYER.fullmatch, shapes) if match}
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    if not config["num_hidden_layers"] or blocks != set(range(meta.integer("block_count"))):
        raise meta.error(f"it claims to have {meta.integer('block_count')} layers and has {len(blocks)}")
    expected = {
        EMBEDDINGS: (config["vocab_size"], hidden),
        "output_norm.weight": (hidden,),
        "blk.0.attn_q.weight": (config["num_attention_heads"] * head_dim, hidden),
        "blk.0.attn_k.weight": (config["num_key_value_heads"] * head_dim, hidden),
        "blk.0.ffn_up.weight": (config["intermediate_size"], hidden),
    }
    if config["model_type"] == "deepseek_v3":
        key_rows = config["num_attention_heads"] * config["qk_head_dim"]
        expected["blk.0.attn_q.weight"] = (key_rows, hidden)
        expected["blk.0.attn_q_b.weight"] = (key_rows, config["q_lora_rank"])
    for name, shape in expected.items():
        if name in shapes and shapes[name] != shape:
            raise meta.error(f"the tensor {name} has the shape {list(shapes[name])}, expected {list(shape)}")
    experts = config.get("num_experts", config.get("n_routed_experts"))
    for name, shape in shapes.items():
        if EXPERTS.search(name) and shape[0] != experts:
            raise meta.error(f"the tensor {name} has {shape[0]} experts, expected {experts}")
