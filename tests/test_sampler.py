"""Sampling: rules by row, seeds, log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from sensorium.engine.sampler import apply_processors, sample, token_logprobs

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
