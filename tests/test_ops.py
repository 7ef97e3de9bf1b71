"""Norms and rotary embeddings against their formulas, and against the reference's frequencies."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sensorium.kernels.layers import LayerNorm, Linear, RMSNorm
from sensorium.kernels.ops import Rope, apply_rope_, rms_norm, rope_frequencies, rope_rotation
from sensorium.models.decoder_config import read_rope

from .family_parity import SIZES, reference


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_follows_its_formula(offset: float) -> None:
    x, weight = torch.randn(5, 12), torch.randn(12)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (weight.double() + offset)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6, offset), expected.float(), atol=1e-6, rtol=1e-5)
    half = rms_norm(x.bfloat16(), weight.bfloat16(), 1e-6, offset)
    assert half.dtype is torch.bfloat16
    torch.testing.assert_close(half.float(), expected.float(), atol=0.1, rtol=0.02)


def test_norms_name_their_weights() -> None:
    assert set(RMSNorm(4, 1e-6, dtype=torch.float32).named_weights("n")) == {"n.weight"}
    assert set(LayerNorm(4, bias=False, dtype=torch.float32).named_weights("n")) == {"n.weight"}
    assert set(LayerNorm(4, dtype=torch.float32).named_weights("n")) == {"n.weight", "n.bias"}


def test_parts_of_unequal_size_are_views_in_order() -> None:
    layer = Linear(3, 8, dtype=torch.float32, parts=("q", "k", "v"), sizes=(4, 2, 2), biased_parts=("q", "v"))
    weights = layer.named_weights("a.{}")
    assert {name: len(w) for name, w in weights.items()} == {
        **{"a.q.weight": 4, "a.q.bias": 4, "a.k.weight": 2, "a.v.weight": 2, "a.v.bias": 2}
    }
    for value, part in enumerate("qkv"):
        weights[f"a.{part}.weight"].fill_(value)
    assert layer.weight[:, 0].tolist() == [0, 0, 0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pairs_turn_by_position_times_frequency(interleaved: bool, dtype: torch.dtype) -> None:
    rope = Rope(theta=100.0, dim=8, interleaved=interleaved)
    x = torch.randn(3, 2, 12).to(dtype)
    before = x.clone().double()
    positions = torch.tensor([0, 5, 301])
    apply_rope_(x, rope_rotation(positions, rope_frequencies(rope), rope), interleaved)
    expected = before.clone()
    for token, position in enumerate(positions.tolist()):
        for pair in range(4):
            a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + 4)
            angle = position * 100.0 ** (-2 * pair / 8)
            first, second = before[token, :, a], before[token, :, b]
            expected[token, :, a] = first * math.cos(angle) - second * math.sin(angle)
            expected[token, :, b] = second * math.cos(angle) + first * math.sin(angle)
    tolerance = 1e-4 if dtype is torch.float32 else 0.05
    torch.testing.assert_close(x.double(), expected, atol=tolerance, rtol=0.01)
    assert torch.equal(x[..., 8:].double(), before[..., 8:]), "components beyond dim have to stay"


@given(st.integers(0, 4000), st.integers(0, 4000), st.integers(0, 500), st.booleans())
@settings(max_examples=30, deadline=None)
def test_scores_depend_on_distance_only(a: int, b: int, shift: int, interleaved: bool) -> None:
    rope = Rope(theta=10_000.0, dim=16, interleaved=interleaved)
    generator = torch.Generator().manual_seed(a)
    pair = torch.randn(2, 1, 16, generator=generator)

    def score(first: int, second: int) -> float:
        x = pair.clone()
        apply_rope_(
            x, rope_rotation(torch.tensor([first, second]), rope_frequencies(rope), rope), interleaved
        )
        return float((x[0] * x[1]).sum())

    assert score(a, b) == pytest.approx(score(a + shift, b + shift), abs=2e-2)


ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5e5},
    "partial": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
    "llama3": {
        **{"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0},
        **{"high_freq_factor": 4.0, "original_max_position_embeddings": 128},
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 64},
    "yarn of few turns": {
        **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128},
        **{"beta_fast": 4.0, "beta_slow": 2.0, "truncate": False},
    },
    "yarn of two weights": {
        **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 128},
        **{"mscale": 0.7, "mscale_all_dim": 1.0},
    },
    "yarn of a given magnitude": {
        **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128},
        **{"attention_factor": 1.3},
    },
}


@pytest.mark.parametrize("kind", ROPES)
def test_frequencies_equal_the_reference(kind: str) -> None:
    table = ROPES[kind]
    sizes = SIZES | {"head_dim": 32, "rope_parameters": table}
    # A family of the reference whose rotary embedding honours partial_rotary_factor.
    config = reference().NemotronConfig(**sizes)
    theirs = reference().models.nemotron.modeling_nemotron.NemotronRotaryEmbedding(config)
    rope = read_rope(sizes)
    torch.testing.assert_close(rope_frequencies(rope), theirs.inv_freq, atol=1e-9, rtol=1e-5)
    assert rope.magnitude == pytest.approx(theirs.attention_scaling)


def test_older_keys_read_alike() -> None:
    for table in ROPES.values():
        new = read_rope(SIZES | {"head_dim": 32, "rope_parameters": table})
        scaling = {key: value for key, value in table.items() if key not in ("rope_theta", "rope_type")}
        old = {"rope_theta": table["rope_theta"], "rope_scaling": {**scaling, "type": table["rope_type"]}}
        assert read_rope(SIZES | {"head_dim": 32} | old) == new
