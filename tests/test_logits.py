"""Logits processors against the plain formulas and against the reference implementations."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sensorium.models.logits import (
    AllowedTokens,
    BadWords,
    LogitBias,
    MinTokens,
    PresenceFrequencyPenalty,
    PromptLogprobs,
    RepetitionPenalty,
)

VOCAB = 12
ids = st.integers(0, VOCAB - 1)
batches = st.lists(st.lists(ids, max_size=9), min_size=1, max_size=4)


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.fixture(scope="module")
def reference() -> Any:
    """transformers' processors; the import takes seconds, so it happens once."""
    from transformers.generation import logits_process

    return logits_process


@given(batches, st.floats(-2, 2), st.floats(-2, 2))
def test_presence_and_frequency_follow_the_formula(
    outputs: list[list[int]], presence: float, frequency: float
) -> None:
    logits = random_logits(len(outputs))
    wanted = logits.clone()
    for row, sampled in enumerate(outputs):
        for token in set(sampled):
            wanted[row, token] -= sampled.count(token) * frequency + presence
    PresenceFrequencyPenalty(presence, frequency)(logits, outputs)
    assert torch.allclose(logits, wanted, atol=1e-6)


def test_presence_and_frequency_by_hand() -> None:
    logits = torch.zeros(2, 4)
    PresenceFrequencyPenalty(0.5, 0.25)(logits, [[1, 1, 3], []])
    assert logits.tolist() == [[0, -1.0, 0, -0.75], [0, 0, 0, 0]]


def test_repetition_penalty_equals_the_reference(reference: Any) -> None:
    processor = reference.RepetitionPenaltyLogitsProcessor(penalty=1.3)
    prompt = [3, 7, 7, 1]
    outputs = [[2, 2, 5], [], [11, 3]]
    logits = random_logits(3)
    wanted = torch.cat(
        [
            processor(torch.tensor([prompt + sampled]), logits[row : row + 1].clone())
            for row, sampled in enumerate(outputs)
        ]
    )
    RepetitionPenalty.of(1.3, prompt)(logits, outputs)
    assert torch.equal(logits, wanted)


def test_bad_words_equal_the_reference(reference: Any) -> None:
    words = [[4], [1, 2], [1, 3, 5], [6, 6]]
    processor = reference.NoBadWordsLogitsProcessor(words)
    outputs = [[0, 1], [1, 3], [6], [6, 6], [2, 9, 9, 1, 3], [3, 1, 4]]
    logits = random_logits(len(outputs))
    wanted = torch.cat(
        [
            processor(torch.tensor([sampled]), logits[row : row + 1].clone())
            for row, sampled in enumerate(outputs)
        ]
    )
    BadWords(tuple(map(tuple, words)))(logits, outputs)
    assert torch.equal(logits, wanted)


def test_min_tokens_equals_the_reference(reference: Any) -> None:
    stops = (2, 9)
    processor = reference.MinNewTokensLengthLogitsProcessor(
        prompt_length_to_skip=0, min_new_tokens=3, eos_token_id=list(stops)
    )
    outputs = [[], [1, 1], [1, 1, 1], [4, 4, 4, 4]]
    logits = random_logits(len(outputs))
    wanted = torch.cat(
        [
            processor(torch.zeros(1, len(sampled), dtype=torch.int64), logits[row : row + 1].clone())
            for row, sampled in enumerate(outputs)
        ]
    )
    MinTokens(stops, 3)(logits, outputs)
    assert torch.equal(logits, wanted)


def test_bias_is_added() -> None:
    logits = random_logits(2)
    wanted = logits.clone()
    wanted[:, 3] += 2.5
    wanted[:, 5] += -100.0
    LogitBias(((3, 2.5), (5, -100.0)))(logits, [[], [1]])
    assert torch.equal(logits, wanted)


def test_only_allowed_tokens_remain() -> None:
    logits = random_logits(2)
    wanted = torch.full_like(logits, -math.inf)
    wanted[:, [1, 8]] = logits[:, [1, 8]]
    AllowedTokens((8, 1))(logits, [[], []])
    assert torch.equal(logits, wanted)


@settings(max_examples=50)
@given(batches, st.lists(ids, max_size=5))
def test_a_batch_equals_its_rows(outputs: list[list[int]], prompt: list[int]) -> None:
    processors = [
        LogitBias(((0, 1.0),)),
        MinTokens((1, 2), 4),
        BadWords(((3,), (4, 5), (5, 5))),
        PresenceFrequencyPenalty(0.7, -0.2),
        RepetitionPenalty.of(1.2, prompt),
        AllowedTokens((0, 1, 2, 3, 4, 5)),
    ]
    together = random_logits(len(outputs), seed=1)
    alone = together.clone()
    for processor in processors:
        processor(together, outputs)
        for row, sampled in enumerate(outputs):
            processor(alone[row : row + 1], [sampled])
    assert torch.equal(together, alone)


def test_processors_are_values() -> None:
    pairs = [
        (LogitBias(((1, 2.0),)), LogitBias(((1, 2.0),))),
        (MinTokens((1,), 2), MinTokens((1,), 2)),
        (RepetitionPenalty.of(1.1, [5, 3, 5]), RepetitionPenalty.of(1.1, [3, 5])),
    ]
    for one, other in pairs:
        one(random_logits(1), [[1]])  # caches made by a call are no part of the value
        assert one == other
        assert hash(one) == hash(other)
    assert AllowedTokens((1,)) != MinTokens((1,), 0)


def test_prompt_logprobs_equal_the_softmax() -> None:
    prompt = (3, 7, 0, 11)
    logits = random_logits(3)
    probe = PromptLogprobs(prompt, top=2)
    assert list(probe.positions) == [0, 1, 2]
    whole = probe.reduce([0, 1, 2], logits)
    pieces = torch.cat([probe.reduce([0], logits[:1]), probe.reduce([1, 2], logits[1:])])
    assert torch.equal(whole, pieces)
    logprobs = logits.log_softmax(dim=-1)
    for position, row in enumerate(whole):
        token = prompt[position + 1]
        order = logprobs[position].argsort(descending=True).tolist()
        assert row[0] == pytest.approx(float(logprobs[position, token]), abs=1e-5)
        assert row[1] == order.index(token) + 1
        assert row[2:4].tolist() == order[:2]
        assert torch.allclose(row[4:], logprobs[position, order[:2]], atol=1e-5)
    assert PromptLogprobs(prompt).reduce([0], logits[:1]).shape == (1, 2)
