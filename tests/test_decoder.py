"""Configurations, loading and cache groups of decoders; parity is in test_families_*."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sensorium.kernels.moe import MoE, MoEConfig, route
from sensorium.kernels.ops import rope_frequencies
from sensorium.models.base import Model, ModelError
from sensorium.models.decoder import DecoderModel, query_scale
from sensorium.models.decoder_config import MixerConfig, QueryScale
from sensorium.models.families import DECODERS, decoder_config
from torch import Tensor

from .family_parity import SIZES, tokens, unsupported
from .paged_harness import PagedHarness

LINEAR = {
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
}
EXTRA: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "deepseek_v3": {
        **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    },
    "qwen3_5": LINEAR,
    "qwen3_5_text": LINEAR,
    "cohere2_moe": {"prefix_dense_intermediate_size": 40, "num_experts": 4, "first_k_dense_replace": 1},
}
LLAMA = SIZES | {"model_type": "llama", "num_hidden_layers": 2}


def random_weights(model: DecoderModel, seed: int = 0) -> dict[str, Tensor]:
    """A full set of random weights under the checkpoint's names."""
    generator = torch.Generator().manual_seed(seed)
    expected = model.expected_weights()
    return {name: torch.randn(w.shape, generator=generator) * 0.2 for name, w in expected.items()}


def llama(**changes: Any) -> DecoderModel:
    return DecoderModel(decoder_config(LLAMA | changes))


@pytest.mark.parametrize("family", DECODERS)
def test_families_build_and_keep_the_contract(family: str) -> None:
    model = DecoderModel(decoder_config(SIZES | EXTRA.get(family, {}) | {"model_type": family}))
    assert isinstance(model, Model)
    assert model.kv_cache_spec.max_model_len == 512
    assert sum(group.num_layers for group in model.kv_cache_spec.groups) == 3
    with pytest.raises(ModelError):
        model.embed_multimodal([])


def test_layers_count_within_their_group() -> None:
    types = [
        "sliding_attention",
        "full_attention",
        "sliding_attention",
        "full_attention",
        "sliding_attention",
    ]
    sizes = SIZES | {"num_hidden_layers": 5, "sliding_window": 32, "layer_types": types}
    model = DecoderModel(decoder_config(sizes | {"model_type": "gemma3_text"}))
    assert [(layer.mixer.config.group, layer.mixer.index) for layer in model.layers] == [
        *[("sliding", 0), ("full", 0), ("sliding", 1), ("full", 1), ("sliding", 2)]
    ]


def test_a_window_no_sequence_reaches_is_none() -> None:
    config = decoder_config(LLAMA | {"model_type": "mistral", "sliding_window": 512})
    assert {layer.mixer.window for layer in config.layers} == {None}


# -- loading ------------------------------------------------------------------------------------------


def test_a_stored_tied_head_must_repeat_the_embeddings() -> None:
    model = llama(tie_word_embeddings=True)
    weights = random_weights(model)
    assert "lm_head.weight" not in weights
    model.load_weights(weights.items())
    same = {"lm_head.weight": weights["model.embed_tokens.weight"]} | weights
    model.load_weights(same.items())
    with pytest.raises(ModelError, match="differs from the embeddings"):
        model.load_weights((weights | {"lm_head.weight": torch.zeros(96, 48)}).items())


def test_tables_of_old_checkpoints_are_no_parameters() -> None:
    model = llama()
    weights = random_weights(model) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    model.load_weights(weights.items())


@pytest.mark.parametrize(
    "name", ["lm_head.weight", "model.layers.1.self_attn.k_proj.weight", "model.norm.weight"]
)
def test_missing_and_left_over_tensors_are_named(name: str) -> None:
    model = llama()
    weights = random_weights(model)
    lacking = {key: value for key, value in weights.items() if key != name}
    with pytest.raises(ModelError, match=name):
        model.load_weights(lacking.items())
    with pytest.raises(ModelError, match=r"model\.layers\.9"):
        model.load_weights((weights | {"model.layers.9.mlp.up_proj.weight": torch.zeros(2)}).items())
    with pytest.raises(ModelError, match=f"{name} has shape"):
        model.load_weights((weights | {name: torch.zeros(3, 5)}).items())


def test_half_precision_follows_float32() -> None:
    model = llama()
    weights = random_weights(model)
    model.load_weights(weights.items())
    half = DecoderModel(model.config, torch.bfloat16)
    half.load_weights(weights.items())
    ids = tokens(40)
    exact = PagedHarness(model).run([("a", ids)])[0]
    rough = PagedHarness(half).run([("a", ids)])[0]
    assert rough.dtype is torch.float32
    assert half.kv_cache_spec.groups[0].dtype is torch.bfloat16
    assert (rough - exact).abs().max() < 0.1 * exact.abs().max()


# -- configurations -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "bert"}, "type 'bert' are not supported"),
        ({"hidden_size": None}, "no usable hidden_size"),
        ({"num_attention_heads": 0}, "no usable num_attention_heads"),
        ({"vocab_size": "many"}, "no usable vocab_size"),
        ({"num_key_value_heads": 3}, "key heads do not divide"),
        ({"hidden_act": "relu6"}, "hidden_act 'relu6' is not supported"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "type 'longrope' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": -1}}, "no usable factor"),
        ({"rope_parameters": 7}, "no usable rope_parameters"),
        ({"head_dim": 15}, "rotary embedding has sizes"),
        ({"model_type": "qwen3", "layer_types": ["full_attention"]}, "do not name every layer"),
        ({"model_type": "qwen3", "layer_types": ["full_attention", "chunked"]}, "'chunked' is not supported"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "both directions"),
    ],
)
def test_unusable_configurations_are_one_line(changes: dict[str, Any], message: str) -> None:
    text = unsupported(LLAMA | changes)
    assert message in text
    assert "\n" not in text


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.sampled_from(["full_attention", "sparse", 3, None]), max_size=4),
    st.dictionaries(
        st.sampled_from(["rope_type", "factor", "full_attention", "alpha", "rope_theta"]),
        st.one_of(st.sampled_from(["yarn", "llama3", "dynamic"]), st.integers(-1, 10**400), st.none()),
    ),
)
KEYS = [
    *SIZES,
    *("rope_parameters", "rope_scaling", "rope_theta", "layer_types", "mlp_layer_types", "sliding_window"),
    *("hidden_act", "rms_norm_eps", "num_experts", "num_experts_per_tok", "mlp_only_layers", "head_dim"),
    *("first_k_dense_replace", "sliding_window_pattern", "query_pre_attn_scalar", "use_sliding_window"),
    *("partial_rotary_factor", "attention_bias", "max_window_layers", "tie_word_embeddings", "logit_scale"),
]


@given(st.sampled_from(sorted(DECODERS)), st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3))
@settings(max_examples=300, deadline=None)
def test_damaged_configurations_are_refused_or_work(family: str, changes: dict[str, Any]) -> None:
    config = SIZES | EXTRA.get(family, {}) | {"model_type": family} | changes
    untouched = copy.deepcopy(config)
    with suppress(ModelError):
        result = decoder_config(config)
        assert len(result.layers) == config["num_hidden_layers"]
        assert all(isinstance(layer.mixer, MixerConfig) for layer in result.layers)
        for layer in result.layers:
            assert layer.mixer.rope is None or rope_frequencies(layer.mixer.rope).isfinite().all()
    assert repr(config) == repr(untouched)


# -- parts --------------------------------------------------------------------------------------------


def test_queries_grow_a_step_each_period() -> None:
    scale = query_scale(QueryScale(0.1, 100), torch.tensor([0, 99, 100, 199, 250]))
    expected = 1 + 0.1 * torch.log(torch.tensor([1.0, 1.0, 2.0, 2.0, 3.0]))
    torch.testing.assert_close(scale, expected)


def test_routing_weights() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0]])
    sizes = {"num_experts": 4, "top_k": 2, "expert_size": 8, "activation": "silu"}
    experts, weights = route(logits, MoEConfig(**sizes))
    assert experts.tolist() == [[1, 2]]
    torch.testing.assert_close(weights, logits.softmax(-1)[:, [1, 2]])
    weights = route(logits, MoEConfig(**sizes, normalize=True))[1]
    torch.testing.assert_close(weights, logits[:, [1, 2]].softmax(-1))
    assert torch.equal(weights, route(logits, MoEConfig(**sizes, scoring="chosen_softmax"))[1])
    weights = route(logits, MoEConfig(**sizes, scoring="sigmoid"))[1]
    torch.testing.assert_close(weights, logits[:, [1, 2]].sigmoid())


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    block = MoE(16, MoEConfig(5, 2, 24, "silu", shared_size=8), dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    for weight in block.parameters():
        weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    x = torch.randn(40, 16, generator=generator)
    alone = torch.cat([block(row[None]) for row in x])
    torch.testing.assert_close(block(x), alone, atol=1e-5, rtol=1e-5)
