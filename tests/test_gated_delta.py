"""The gated delta rule: chunks, single steps and the reference agree."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sensorium.kernels.gated_delta import causal_conv_, gated_delta_rule_
from torch import Tensor


def inputs(tokens: int, seed: int, key_heads: int = 2, group: int = 2, key_dim: int = 8, value_dim: int = 6):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    heads = key_heads * group
    return (
        random(tokens, key_heads, key_dim),
        random(tokens, key_heads, key_dim),
        random(tokens, heads, value_dim),
        -random(tokens, heads).abs() * 0.3,
        random(tokens, heads).sigmoid(),
        random(heads, key_dim, value_dim),
    )


@settings(deadline=None, max_examples=25)
@given(tokens=st.integers(1, 150), cut=st.integers(0, 150), seed=st.integers(0, 1000))
def test_any_cut_gives_what_single_steps_give(tokens: int, cut: int, seed: int) -> None:
    *x, state = inputs(tokens, seed)
    single_state, cut_state = state.clone(), state.clone()
    single = torch.cat([gated_delta_rule_(*(t[i : i + 1] for t in x), single_state) for i in range(tokens)])
    cut = min(cut, tokens)
    parts = [tuple(t[:cut] for t in x), tuple(t[cut:] for t in x)]
    both = torch.cat([gated_delta_rule_(*part, cut_state) for part in parts if len(part[0])])
    torch.testing.assert_close(both, single, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(cut_state, single_state, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("tokens", [1, 5, 64, 131])
def test_the_reference_agrees(tokens: int) -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

    q, k, v, g, beta, state = inputs(tokens, 3)
    want, last = torch_recurrent_gated_delta_rule(
        *(x[None] for x in (q, k, v)),
        g=g[None],
        beta=beta[None],
        initial_state=state[None].clone(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    got = gated_delta_rule_(q, k, v, g, beta, state)
    torch.testing.assert_close(got, want[0], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(state, last[0], atol=2e-5, rtol=1e-4)


@settings(deadline=None, max_examples=25)
@given(tokens=st.integers(1, 20), cut=st.integers(0, 20), width=st.integers(2, 5))
def test_the_convolution_carries_its_state(tokens: int, cut: int, width: int) -> None:
    torch.manual_seed(tokens)
    x, weight = torch.randn(tokens, 3), torch.randn(3, width)
    padded = torch.cat([torch.zeros(width - 1, 3), x])
    want = torch.stack([(padded[i : i + width] * weight.T).sum(0) for i in range(tokens)])
    state = torch.zeros(3, width - 1)
    cut = min(cut, tokens)
    got = torch.cat([causal_conv_(part, weight, state) for part in (x[:cut], x[cut:]) if len(part)])
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state, padded[tokens:].T)
