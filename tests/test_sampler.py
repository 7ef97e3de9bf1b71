"""Sampling: rules by row, seeds, log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sensorium.engine.sampler import (
    apply_processors,
    candidates,
    draw,
    sample,
    token_logprobs,
    top_logprobs,
)
from sensorium.models.base import SamplingParams

from .engine_helpers import Owner, make_request, work

VOCAB = 50


@dataclass(frozen=True)
class Ban:
    """Forbids one token, and with `after` only once something was sampled."""

    token: int
    after: bool = False

    def __call__(self, logits: torch.Tensor, outputs: Sequence[Sequence[int]]) -> None:
        assert len(logits) == len(outputs)
        for row, output in enumerate(outputs):
            if output or not self.after:
                logits[row, self.token] = float("-inf")


def sequence(number: int = 0, output: tuple[int, ...] = (), **params):
    params.setdefault("max_tokens", 5)
    request = make_request(number, "m", work(number, (1, 2), **params), Owner())
    made = request.first_sequence()
    made.token_ids += output
    return made


def test_each_row_is_filtered_by_its_own_rules() -> None:
    sequences = [
        sequence(0, logits_processors=(Ban(3),)),
        sequence(1),
        sequence(2, logits_processors=(Ban(3), Ban(4))),
        sequence(3, output=(9,), logits_processors=(Ban(3), Ban(4, after=True))),
        sequence(4, logits_processors=(Ban(3), Ban(4, after=True))),
    ]
    logits = torch.zeros(5, VOCAB)
    apply_processors(logits, sequences)
    banned = [torch.isinf(row).nonzero().flatten().tolist() for row in logits]
    assert banned == [[3], [], [3, 4], [3, 4], [3]]


def test_greedy_rows_take_the_best_token() -> None:
    logits = torch.randn(4, VOCAB)
    assert sample(logits, [sequence(i) for i in range(4)]) == logits.argmax(-1).tolist()


def test_a_seed_gives_the_same_tokens_alone_and_in_any_batch() -> None:
    torch.manual_seed(0)
    steps = [torch.randn(VOCAB) for _ in range(12)]
    alone = sequence(0, temperature=0.8, seed=11)
    want = [sample(step[None], [alone])[0] for step in steps]
    crowd = [sequence(i, temperature=0.8, seed=i) for i in range(1, 4)]
    twin = sequence(9, temperature=0.8, seed=11)
    got = []
    for step in steps:
        rows = torch.stack([step, torch.randn(VOCAB), torch.randn(VOCAB), step])
        got.append(sample(rows, [*crowd, twin])[-1])
    assert got == want
    assert len(set(want)) > 3


def test_a_seed_gives_the_tokens_of_torch_distributions() -> None:
    steps = [torch.randn(1, VOCAB) for _ in range(10)]
    torch.manual_seed(5)
    want = [int(torch.distributions.Categorical(logits=s / 0.6).sample()) for s in steps]
    ours = sequence(0, temperature=0.6, seed=5)
    assert [sample(s.clone(), [ours])[0] for s in steps] == want


def test_sequences_of_one_request_draw_apart() -> None:
    request = make_request(0, "m", work(0, (1,), max_tokens=5, temperature=1.0, seed=3), Owner())
    generators = [request.make_generator(i) for i in range(2)]
    draws = [[int(torch.randint(1000, (1,), generator=g)) for _ in range(5)] for g in generators]
    assert draws[0] != draws[1]


def test_logprobs_are_those_of_the_filtered_logits() -> None:
    logits = torch.randn(3, VOCAB)
    logits[:, ::2] = float("-inf")
    got = token_logprobs(logits, [1, 3, 5])
    want = logits.log_softmax(-1)[torch.arange(3), torch.tensor([1, 3, 5])]
    assert got == pytest.approx(want.tolist(), abs=1e-6)


def naive_candidates(scaled: torch.Tensor, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The definition, with a full sort."""
    values, ids = scaled.double().sort(descending=True)
    if top_k:
        values, ids = values[:top_k], ids[:top_k]
    probabilities = values.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    keep = before < top_p if top_p < 1 else torch.ones_like(before, dtype=torch.bool)
    keep[0] = True
    probabilities, ids = probabilities[keep], ids[keep]
    keep = probabilities >= min_p * probabilities[0]
    return set(ids[keep].tolist())


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 10_000),
    vocab=st.sampled_from([5, 60, 3000]),
    spread=st.floats(0.01, 8),
    top_k=st.sampled_from([0, 1, 3, 40, 10_000]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.3, 0.0001]),
    min_p=st.sampled_from([0.0, 0.001, 0.1, 1.0]),
)
def test_truncation_is_by_the_definition(
    seed: int, vocab: int, spread: float, top_k: int, top_p: float, min_p: float
) -> None:
    scaled = torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread
    params = SamplingParams(max_tokens=1, temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
    values, ids = candidates(scaled, params)
    want = naive_candidates(scaled, top_k, top_p, min_p)
    # Tokens right at a limit may fall on either side of it in float32.
    assert len(want.symmetric_difference(ids.tolist())) <= 1
    assert values.tolist() == sorted(values.tolist(), reverse=True)
    torch.testing.assert_close(values, scaled[ids])


def test_truncated_draws_follow_the_distribution() -> None:
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0, -5.0])
    params = SamplingParams(max_tokens=1, temperature=0.7, top_k=3)
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(5)
    for _ in range(4000):
        counts[draw(logits, params, generator)] += 1
    want = torch.zeros(5)
    want[:3] = (logits[:3] / 0.7).softmax(-1)
    assert (counts / 4000 - want).abs().max() < 0.03


def test_reported_logprobs_are_the_likeliest_in_order() -> None:
    row = torch.randn(VOCAB)
    normal = row.log_softmax(-1)
    reported = top_logprobs(row, 7, float(normal[7]), 4)
    assert reported.token_id == 7
    assert [token for token, _ in reported.top] == row.topk(4).indices.tolist()
    assert [p for _, p in reported.top] == pytest.approx(normal.topk(4).values.tolist(), abs=1e-5)
    assert top_logprobs(row, 7, -1.0, 0).top == ()
