"""Word alignment and the rules on word times, against openai-whisper's functions."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sensorium.models.whisper_segments import DraftSegment, DraftWord
from sensorium.models.whisper_timing import (
    Resume,
    WordTiming,
    add_word_times,
    attention_matrix,
    is_anomalous,
    median_filter,
    merge_punctuation,
    skip_hallucinations,
    token_times,
    warm_up,
)
from whisper import timing as reference
from whisper import tokenizer as reference_tokenizer

from .reference_runner import serial_dtw

EOT = 50257


def test_warm_up_compiles() -> None:
    warm_up()


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40), positions=st.integers(1, 120), seed=st.integers(0, 10_000), ramp=st.booleans()
)
def test_token_times_follow_the_references_path(rows: int, positions: int, seed: int, ramp: bool) -> None:
    """On noise, and on noise about a diagonal as speech has it. Ties cannot come up in either."""
    matrix = torch.randn(rows, positions, generator=torch.Generator().manual_seed(seed))
    if ramp:
        centre = torch.linspace(0, positions, rows)[:, None]
        matrix -= (torch.arange(positions) - centre).abs() / 5
    text, time = serial_dtw(-matrix.double().numpy())
    jumps = np.pad(np.diff(text), (1, 0), constant_values=1).astype(bool)
    assert token_times(matrix).tolist() == (time[jumps] / 50).tolist()


@settings(max_examples=40, deadline=None)
@given(width=st.sampled_from([3, 5, 7]), frames=st.integers(1, 30), seed=st.integers(0, 1000))
def test_median_filter(width: int, frames: int, seed: int) -> None:
    values = torch.randn(3, frames, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(median_filter(values, width), reference.median_filter(values, width))


def test_attention_matrix_is_the_references() -> None:
    scores = torch.randn(4, 9, 1500, generator=torch.Generator().manual_seed(0)) * 3
    weights = scores[:, :, :700].softmax(dim=-1)
    std, mean = torch.std_mean(weights, dim=-2, keepdim=True, unbiased=False)
    expected = reference.median_filter((weights - mean) / std, 7).mean(dim=0)[3:-1]
    torch.testing.assert_close(attention_matrix(scores, prefix=3, size=1401), expected)


def test_a_head_that_looks_nowhere_does_not_break_the_path() -> None:
    scores = torch.zeros(1, 6, 1500)
    matrix = attention_matrix(scores, prefix=1, size=3000)
    assert torch.isfinite(matrix).all()
    assert len(token_times(matrix)) == 4


# Words and marks as models write them; "" is what merging leaves behind.
WORDS = st.sampled_from(
    [
        *(" a", " word", "word", "中", " ", "", "\n"),
        *(".", ",", "?", "!", "?!", "。", ' "', '"', " '", "-", " -", " (", ")", " ¿", " (["),
    ]
)


@dataclasses.dataclass(frozen=True)
class Spoken:
    """A word as the alignment gives it: steps of 0.02 s before it begins and until it ends."""

    word: str
    pause: int
    length: int
    probability: float
    tokens: int


SPOKEN = st.lists(
    st.builds(
        Spoken,
        word=WORDS,
        pause=st.sampled_from([0, 0, 0, 5, 60, 200]),
        length=st.sampled_from([0, 1, 5, 10, 20, 30, 80, 150]),
        probability=st.sampled_from([0.05, 0.149, 0.5, 0.99]),
        tokens=st.integers(1, 3),
    ),
    max_size=14,
)


def timings(words: list[Spoken], kind: Any) -> list[Any]:
    made, step, token = [], 0, 0
    for word in words:
        start = step + word.pause
        step = start + word.length
        tokens = list(range(token, token + word.tokens))
        token += word.tokens
        made.append(kind(word.word, tokens, start / 50, step / 50, word.probability))
    return made


@settings(max_examples=300, deadline=None)
@given(words=SPOKEN)
def test_punctuation_merges_as_in_the_reference(words: list[Spoken]) -> None:
    ours, theirs = timings(words, WordTiming), timings(words, reference.WordTiming)
    merge_punctuation(ours)
    reference.merge_punctuations(theirs, "\"'“¿([{-", "\"'.。,，!！?？:：”)]}、")
    assert [vars(timing) for timing in ours] == [vars(timing) for timing in theirs]


@settings(max_examples=400, deadline=None)
@given(
    words=SPOKEN,
    cuts=st.lists(st.integers(0, 42), max_size=3).map(sorted),
    edges=st.lists(st.integers(0, 1500), min_size=8, max_size=8).map(sorted),
    seek=st.sampled_from([0, 1, 29, 2998, 123456]),
    quiet=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
)
def test_word_times_reach_segments_as_in_the_reference(
    words: list[Spoken], cuts: list[int], edges: list[int], seek: int, quiet: float
) -> None:
    """The reference with its alignment replaced by the same made-up one."""
    count = sum(word.tokens for word in words)
    ids = list(range(count))
    bounds = [0, *(min(cut, count) for cut in cuts), count]
    offset = seek / 100
    parts = [
        (offset + edges[2 * i] / 50, offset + edges[2 * i + 1] / 50, [50364, *ids[a:b], 50400])
        for i, (a, b) in enumerate(itertools.pairwise(bounds))
    ]
    ours = [DraftSegment(seek, start, end, "", tokens, 0, 0, 0, 0) for start, end, tokens in parts]
    last_speech = max(0.0, offset - quiet)
    add_word_times(ours, timings(words, WordTiming), EOT, last_speech)

    theirs = [{"seek": seek, "start": start, "end": end, "tokens": tokens} for start, end, tokens in parts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "find_alignment", lambda *a, **k: timings(words, reference.WordTiming))
        reference.add_word_timestamps(
            segments=theirs,
            model=None,
            tokenizer=reference_tokenizer.get_tokenizer(True, language="en"),
            mel=None,
            num_frames=3000,
            last_speech_timestamp=last_speech,
        )
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.start, mine.end) == (other["start"], other["end"])
        assert [vars(word) for word in mine.words] == other["words"]


# --- hallucinations; the whole rule is held against the reference in test_whisper_seek.py ---


def worded(start: float, *lengths: float, probability: float = 0.9) -> DraftSegment:
    words, at = [], start
    for length in lengths:
        words.append(DraftWord(" word", at, at + length, probability))
        at += length
    return DraftSegment(0, start, at, " word" * len(lengths), [1] * len(lengths), 0, 0, 0, 0, words)


def test_anomalies() -> None:
    assert not is_anomalous(None)
    assert not is_anomalous(worded(0.0))
    assert not is_anomalous(worded(0.0, 0.3, 0.3, 0.3))
    assert is_anomalous(worded(0.0, 0.3, 0.3, 0.3, probability=0.1))
    assert is_anomalous(worded(0.0, 0.3, 5.1, 0.3, 0.3, 0.3, 0.3))
    # Only the first eight words count.
    assert not is_anomalous(worded(0.0, *[0.3] * 8, 6.0))


def skip(segments: list[DraftSegment], **changes: Any) -> Any:
    wishes: dict[str, Any] = {
        "seek": 1000,
        "size": 3000,
        "next_seek": 4000,
        "single_ending": True,
        "threshold": 2.0,
        "last_speech": 10.0,
        "content_frames": 10_000,
    }
    return skip_hallucinations(segments, **{**wishes, **changes})


def test_silence_before_a_doubtful_first_segment_is_skipped() -> None:
    resume = skip([worded(15.0, 0.02, 0.02)])
    assert resume.discard_window
    assert resume.seek == 1500


def test_a_doubtful_segment_between_silences_is_cut() -> None:
    resume = skip([worded(10.0, *[0.4] * 10), worded(20.0, 0.02, 0.02), worded(30.0, *[0.4] * 9)])
    assert (resume.seek, resume.kept, resume.discard_window) == (2000, 1, False)


def test_believable_speech_is_kept() -> None:
    segments = [worded(10.0, *[0.4] * 10), worded(20.0, *[0.4] * 10)]
    assert skip(segments) == Resume(4000, 2)
    assert skip(segments, single_ending=False).seek == 2400
