"""The decoding rules against openai-whisper's logit filters, and the probes against their definition."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sensorium.models.whisper_rules import (
    LanguageProbe,
    NoSpeechProbe,
    SuppressBlank,
    SuppressTokens,
    TimestampRules,
    TokenProbabilityProbe,
    decoding_rules,
)
from sensorium.models.whisper_tokenizer import WhisperTokenizer
from torch import Tensor
from whisper import decoding
from whisper import tokenizer as reference

PREFIX = [50361, 11, 13, 50258, 50259, 50359]


@pytest.fixture(scope="module")
def tokenizer(whisper_base_dir: Path) -> WhisperTokenizer:
    return WhisperTokenizer(whisper_base_dir / "tokenizer.json", 51865)


def reference_filter(logits: Tensor, outputs: list[list[int]], suppressed: tuple[int, ...]) -> Tensor:
    """openai-whisper's filters, row by row: they need rows of one length."""
    theirs = reference.get_tokenizer(True, num_languages=99, language="en", task="transcribe")
    filters = [
        decoding.SuppressBlank(theirs, len(PREFIX)),
        decoding.SuppressTokens(suppressed),
        decoding.ApplyTimestampRules(theirs, len(PREFIX), 50),
    ]
    rows = []
    for row, sampled in zip(logits, outputs, strict=True):
        filtered, tokens = row[None].clone(), torch.tensor([PREFIX + sampled])
        for logit_filter in filters:
            logit_filter.apply(filtered, tokens)
        rows.append(filtered)
    return torch.cat(rows)


# Histories as sampled ones look, and as no rule would allow: the rules must agree on all of them.
TIMESTAMPS = st.integers(50364, 51864)
WORDS = st.integers(0, 50256)
HISTORIES = st.one_of(
    st.just([]),
    st.lists(st.one_of(WORDS, TIMESTAMPS), max_size=6),
    st.tuples(st.lists(WORDS, max_size=3), TIMESTAMPS).map(lambda t: [50364, *t[0], t[1]]),
    TIMESTAMPS.map(lambda t: [50364, 5, t, t]),
)


@settings(max_examples=120, deadline=None)
@given(
    outputs=st.lists(HISTORIES, min_size=1, max_size=5),
    seed=st.integers(0, 2**32 - 1),
    time_bias=st.sampled_from([-20.0, -8.0, -5.0, 0.0, 20.0]),
)
def test_rules_equal_the_reference(
    tokenizer: WhisperTokenizer, outputs: list[list[int]], seed: int, time_bias: float
) -> None:
    logits = torch.randn(len(outputs), 51865, generator=torch.Generator().manual_seed(seed)) * 3
    logits[:, tokenizer.timestamp_begin :] += time_bias
    expected = reference_filter(logits, outputs, tokenizer.suppressed_tokens)
    for rule in decoding_rules(tokenizer):
        rule(logits, outputs)
    assert torch.equal(logits, expected)


def test_suppressed_tokens_are_the_references(whisper_base_dir: Path, whisper_tiny_en_dir: Path) -> None:
    for directory, size in ((whisper_base_dir, 51865), (whisper_tiny_en_dir, 51864)):
        ours = WhisperTokenizer(directory / "tokenizer.json", size)
        theirs = reference.get_tokenizer(size == 51865, num_languages=99)
        special = {theirs.transcribe, theirs.translate, theirs.sot, theirs.sot_prev, theirs.sot_lm}
        assert set(ours.suppressed_tokens) == {*theirs.non_speech_tokens, *special, theirs.no_speech}
        blank, tokens, _ = decoding_rules(ours)
        assert blank == SuppressBlank((*theirs.encode(" "), theirs.eot))
        assert tokens == SuppressTokens(ours.suppressed_tokens)


def test_time_mass_forces_a_timestamp_and_shuts_out_the_end() -> None:
    """4 words, end, no_timestamps and 10 timestamps, each of which is less likely than the best word."""
    rules = TimestampRules(eot=4, no_timestamps=5, timestamp_begin=6)
    logits = torch.zeros(1, 16)
    logits[0, 0] = 1.0
    rules(logits, [[6, 0]])
    assert torch.isinf(logits[0, :7]).all()
    assert torch.isfinite(logits[0, 7:]).all()


def test_rules_are_values() -> None:
    """Requests with equal rules are filtered together."""
    assert TimestampRules(4, 5, 6) == TimestampRules(4, 5, 6)
    assert len({SuppressTokens((1, 2)), SuppressTokens((1, 2)), SuppressTokens((1,))}) == 2


def test_a_row_does_not_depend_on_its_neighbours(tokenizer: WhisperTokenizer) -> None:
    outputs = [[], [50364], [50364, 11, 50400], [50364, 11, 50400, 50400], [50364, 11]]
    logits = torch.randn(5, 51865, generator=torch.Generator().manual_seed(3))
    alone = [logits[i : i + 1].clone() for i in range(5)]
    for rule in decoding_rules(tokenizer):
        rule(logits, outputs)
        for i, row in enumerate(alone):
            rule(row, [outputs[i]])
    assert torch.equal(logits, torch.cat(alone))


def test_rules_are_cheap(tokenizer: WhisperTokenizer) -> None:
    """32 rows of a full vocabulary take less than one row's share of a decoder step each."""
    outputs = [[50364, *range(400, 400 + i)] for i in range(32)]
    logits = torch.randn(32, 51865)
    rules = decoding_rules(tokenizer)
    best = float("inf")
    for _ in range(5):
        begun = time.perf_counter()
        for rule in rules:
            rule(logits, outputs)
        best = min(best, time.perf_counter() - begun)
    assert best < 0.02


def test_probes() -> None:
    logits = torch.randn(3, 51865, generator=torch.Generator().manual_seed(1))
    no_speech = NoSpeechProbe(position=7, no_speech=50362)
    assert list(no_speech.positions) == [7]
    torch.testing.assert_close(no_speech.reduce([7], logits[:1]), logits[:1].softmax(-1)[:, 50362])

    languages = LanguageProbe(position=0, first=50259, count=99)
    assert torch.equal(languages.reduce([0], logits[:1]), logits[:1, 50259:50358])

    words = TokenProbabilityProbe(first_position=4, token_ids=(10, 20, 30), eot=50257)
    assert list(words.positions) == [4, 5, 6]
    expected = logits[:, :50257].softmax(-1)[torch.arange(3), torch.tensor([10, 20, 30])]
    torch.testing.assert_close(words.reduce([4, 5, 6], logits), expected)
    pieces = [words.reduce([4], logits[:1]), words.reduce([5, 6], logits[1:])]
    torch.testing.assert_close(torch.cat(pieces), expected)
