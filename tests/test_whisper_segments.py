"""Window splitting, clips, and what users see of the segments: properties."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sensorium.models.speech import OptionError
from sensorium.models.whisper_segments import (
    DraftSegment,
    DraftWord,
    SegmentWriter,
    clear_empty,
    clips_from_seconds,
    compression_ratio,
    intersect_clips,
    last_end,
    split_window,
)
from sensorium.models.whisper_tokenizer import WhisperTokenizer
from whisper import utils

BEGIN = 50364
HELLO, WORLD = 2425, 1002


@pytest.fixture(scope="module")
def tokenizer(whisper_base_dir: Path) -> WhisperTokenizer:
    return WhisperTokenizer(whisper_base_dir / "tokenizer.json", 51865)


def draft(start: float, end: float, tokens: list[int], words: list[DraftWord] | None = None) -> DraftSegment:
    return DraftSegment(0, start, end, "text", tokens, 0.0, -0.3, 1.2, 0.01, words or [])


# --- split_window ---


def test_pairs_cut_and_the_open_tail_is_decoded_again() -> None:
    tokens = [BEGIN, HELLO, BEGIN + 100, BEGIN + 100, WORLD, BEGIN + 250, BEGIN + 260, HELLO]
    split = split_window(tokens, BEGIN, 3000)
    assert [span[:2] for span in split.spans] == [(0.0, 2.0), (2.0, 5.0)]
    assert [span[2] for span in split.spans] == [tuple(tokens[:3]), tuple(tokens[3:6])]
    assert split.advance == 500
    assert not split.single_ending


def test_a_single_timestamp_at_the_end_closes_the_window() -> None:
    tokens = [BEGIN, HELLO, BEGIN + 100, BEGIN + 100, WORLD, BEGIN + 250]
    split = split_window(tokens, BEGIN, 2000)
    assert [span[:2] for span in split.spans] == [(0.0, 2.0), (2.0, 5.0)]
    assert split.advance == 2000
    assert split.single_ending


@pytest.mark.parametrize(
    ("tokens", "end"),
    [
        ([BEGIN, HELLO, BEGIN + 150], 3.0),  # a closing time
        ([BEGIN, HELLO], 12.34),  # only <|0.00|>: the window's own length
        ([BEGIN + 10, HELLO], 0.2),
        ([HELLO], 12.34),
        ([], 12.34),
    ],
)
def test_without_a_pair_the_window_is_one_segment(tokens: list[int], end: float) -> None:
    split = split_window(tokens, BEGIN, 1234)
    assert len(split.spans) == 1
    assert split.spans[0] == (0.0, pytest.approx(end), tuple(tokens))
    assert split.advance == 1234


@given(
    tokens=st.lists(st.one_of(st.integers(0, 50256), st.integers(BEGIN, 51864)), max_size=40),
    size=st.integers(1, 3000),
)
def test_spans_are_a_prefix_of_the_tokens(tokens: list[int], size: int) -> None:
    split = split_window(tokens, BEGIN, size)
    joined = [token for span in split.spans for token in span[2]]
    assert joined == tokens[: len(joined)]
    dropped = tokens[len(joined) :]
    assert split.spans
    if split.single_ending or len(split.spans) == 1 == len(joined) - len(tokens) + 1:
        assert not dropped
    if dropped:
        # Only what follows the last pair is left out, and the next window begins where it was closed.
        assert joined[-1] >= BEGIN
        assert dropped[0] >= BEGIN
        assert split.advance == 2 * (joined[-1] - BEGIN)
    else:
        assert split.advance in (size, 2 * (joined[-1] - BEGIN) if joined else size)


# --- small rules ---


@given(st.text(max_size=200))
def test_compression_ratio_is_the_references(text: str) -> None:
    assert compression_ratio(text) == utils.compression_ratio(text)


def test_empty_segments_are_cleared_and_stay() -> None:
    word = DraftWord(" a", 0.0, 1.0, 0.5)
    segments = [draft(1.0, 1.0, [HELLO], [word]), draft(1.0, 2.0, [HELLO], [word]), draft(2.0, 3.0, [HELLO])]
    segments[2].text = "  "
    clear_empty(segments)
    assert [segment.text for segment in segments] == ["", "text", ""]
    assert [segment.tokens for segment in segments] == [[], [HELLO], []]
    assert [segment.words for segment in segments] == [[], [word], []]


def test_last_end() -> None:
    assert last_end([]) is None
    assert last_end([draft(0, 4.0, [])]) == 4.0
    assert last_end([draft(0, 4.0, [], [DraftWord("a", 0, 3.5, 1)]), draft(4, 9, [])]) == 3.5


# --- clips ---


def test_clips() -> None:
    assert clips_from_seconds((), 1000) == [(0, 1000)]
    assert clips_from_seconds((2,), 1000) == [(200, 1000)]
    assert clips_from_seconds((1, 2.005, 3, 1e300), 1000) == [(100, 200), (300, 1000)]
    assert clips_from_seconds((20, 30), 1000) == []
    assert clips_from_seconds((), 0) == []


@pytest.mark.parametrize("seconds", [(-1.0,), (float("nan"),), (float("inf"),), (2.0, 1.0), (0, 2, 1, 3)])
def test_bad_clips_are_refused(seconds: tuple[float, ...]) -> None:
    with pytest.raises(OptionError) as error:
        clips_from_seconds(seconds, 1000)
    assert error.value.param == "clip_timestamps"


EDGES = st.lists(st.integers(0, 60), max_size=8).map(sorted)


@given(left=EDGES, right=EDGES)
def test_intersection_keeps_the_common_frames(left: list[int], right: list[int]) -> None:
    def clips(edges: list[int]) -> list[tuple[int, int]]:
        return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=False) if a < b]

    def frames(clips: list[tuple[int, int]]) -> set[int]:
        return {frame for a, b in clips for frame in range(a, b)}

    common = intersect_clips(clips(left), clips(right))
    assert frames(common) == frames(clips(left)) & frames(clips(right))
    assert common == sorted(common)
    assert all(a < b for a, b in common)


def test_many_clips_meet_many_regions_at_once() -> None:
    """One entry for each pair of a day's regions and clips would be gigabytes."""
    left, right = [[(i * 20 + o, i * 20 + o + 12) for i in range(50_000)] for o in (0, 10)]
    began = time.perf_counter()
    assert len(intersect_clips(left, right)) == 99_999
    assert time.perf_counter() - began < 2


# --- SegmentWriter ---


def test_ids_skip_what_users_do_not_see(tokenizer: WhisperTokenizer) -> None:
    writer = SegmentWriter(tokenizer, 10.0, with_words=False)
    first = writer.write([draft(0, 1, [HELLO]), draft(1, 1, []), draft(1, 2, [220]), draft(2, 3, [WORLD])])
    second = writer.write([draft(3, 3.5, [HELLO]), draft(9.5, 12, [WORLD]), draft(10.5, 12, [HELLO])])
    assert [segment.id for segment in first + second] == [0, 1, 2, 3]
    assert [(segment.start, segment.end) for segment in second] == [(3, 3.5), (9.5, 10.0)]
    assert all(segment.words is None for segment in first)


def test_words_stay_inside_the_file(tokenizer: WhisperTokenizer) -> None:
    words = [
        DraftWord(" a", 9.0, 9.5, 0.9),
        DraftWord("\ufffd", 9.5, 9.6, 0.1),
        DraftWord(" b", 9.8, 10.4, 0.8),
    ]
    (segment,) = SegmentWriter(tokenizer, 10.0, with_words=True).write([draft(9.0, 10.4, [HELLO], words)])
    assert segment.words is not None
    assert [(word.word, word.start, word.end) for word in segment.words] == [
        (" a", 9.0, 9.5),
        (" b", 9.8, 10.0),
    ]


def test_a_segment_of_rounding_alone_is_none(tokenizer: WhisperTokenizer) -> None:
    """7.6 s of audio, and a window at 7.6 s by its frames: 7.599999999999999."""
    writer = SegmentWriter(tokenizer, 7.6, with_words=False)
    assert writer.write([draft(7.599999999999999, 9.0, [HELLO]), draft(7.599, 7.6, [HELLO])]) == []
    assert [(s.start, s.end) for s in writer.write([draft(7.59, 9.0, [HELLO])])] == [(7.59, 7.6)]


@given(
    times=st.lists(st.tuples(st.floats(-1, 12), st.floats(-1, 2)), min_size=1, max_size=12),
    cut=st.integers(0, 12),
)
def test_words_are_ordered_and_take_time(
    tokenizer: WhisperTokenizer, times: list[tuple[float, float]], cut: int
) -> None:
    """Whatever alignment made of them, and across segments: 0 ≤ start < end ≤ duration, starts never decrease."""
    words = [DraftWord(" a", start, start + length, 0.5) for start, length in times]
    writer = SegmentWriter(tokenizer, 10.0, with_words=True)
    written = writer.write([draft(0, 1, [HELLO], words[:cut]), draft(1, 2, [HELLO], words[cut:])])
    shown = [word for segment in written for word in segment.words or ()]
    assert len(shown) == len(words)
    assert [word.start for word in shown] == sorted(word.start for word in shown)
    assert all(0 <= word.start < word.end <= 10.0 for word in shown)


def test_a_character_in_two_segments_goes_to_the_second(tokenizer: WhisperTokenizer) -> None:
    """The tokens of 🦩 are parts of its four bytes; windows can end between them."""
    ids = tokenizer.encode(" ok 🦩 end")
    cut = next(i for i in range(len(ids)) if tokenizer.decode(ids[:i]).endswith("\ufffd"))
    writer = SegmentWriter(tokenizer, 10.0, with_words=False)
    texts = [s.text for s in writer.write([draft(0, 1, ids[:cut])]) + writer.write([draft(1, 2, ids[cut:])])]
    assert texts == [" ok ", "🦩 end"]
    broken = SegmentWriter(tokenizer, 10.0, with_words=False)
    assert [s.text for s in broken.write([draft(0, 1, ids[:cut]), draft(1, 2, [HELLO])])] == [
        " ok ",
        tokenizer.decode([HELLO]),
    ]


@settings(max_examples=200, deadline=None)
@given(
    pieces=st.lists(
        st.tuples(
            st.floats(0, 12), st.floats(-0.5, 3), st.lists(st.one_of(st.integers(0, 50256), st.just(BEGIN)))
        ),
        max_size=8,
    )
)
def test_what_users_see_is_sound(
    tokenizer: WhisperTokenizer, pieces: list[tuple[float, float, list[int]]]
) -> None:
    """Whatever the model and its times were: valid text, ordered times, ids without gaps."""
    writer = SegmentWriter(tokenizer, 10.0, with_words=True)
    written = writer.write([draft(start, start + length, ids) for start, length, ids in pieces])
    assert [segment.id for segment in written] == list(range(len(written)))
    assert [segment.start for segment in written] == sorted(segment.start for segment in written)
    for segment in written:
        assert 0 <= segment.start < segment.end <= 10.0
        assert "\ufffd" not in segment.text
        assert segment.text.strip()
        segment.text.encode("utf-8")


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"])), data=st.data())
def test_no_character_is_lost_between_segments(
    tokenizer: WhisperTokenizer, text: str, data: st.DataObject
) -> None:
    ids = tokenizer.encode("a" + text)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=4)))
    parts = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    writer = SegmentWriter(tokenizer, 100.0, with_words=False)
    seen = "".join(s.text for i, part in enumerate(parts) for s in writer.write([draft(i, i + 1, part)]))
    # Pieces of white space alone are blank segments, which are dropped.
    assert "".join(seen.split()) == "".join(("a" + text).split())
