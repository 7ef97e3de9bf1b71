"""Text of growing sequences: stop strings found and never leaked, however the text arrives."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sensorium.engine.detokenizer import SequenceText, first_stop, held_length
from sensorium.models.base import SamplingParams
from sensorium.processors.text import TextTokenizer

ALPHABET = "abc é日😀"
TEXTS = st.text(ALPHABET, max_size=40)
STOPS = st.lists(st.text("abc é日", min_size=1, max_size=4), max_size=3)


@pytest.fixture(scope="module")
def tokenizer(whisper_base_dir: Path) -> TextTokenizer:
    return TextTokenizer.from_directory(whisper_base_dir)


def run(
    tokenizer: TextTokenizer, ids: list[int], pieces: list[int], **params: object
) -> tuple[list[str], str | None]:
    """Feeds ids in pieces of these sizes; returns what was handed out, and the stop string."""
    text = SequenceText(tokenizer, SamplingParams(max_tokens=1, **params))  # type: ignore[arg-type]
    shown, position, sizes = [], 0, iter(pieces)
    while position < len(ids):
        size = next(sizes, 1)
        fresh, stop = text.add(ids[position : position + size])
        shown.append(fresh)
        position += size
        if stop is not None:
            assert text.text == "".join(shown)
            return shown, stop
    shown.append(text.finish())
    assert text.text == "".join(shown)
    return shown, None


@settings(deadline=None, max_examples=200)
@given(text=TEXTS, stops=STOPS, pieces=st.lists(st.integers(1, 5), max_size=30))
def test_any_arrival_gives_the_same_text_and_no_piece_of_a_stop(
    tokenizer: TextTokenizer, text: str, stops: list[str], pieces: list[int]
) -> None:
    ids = tokenizer.encode(text)
    shown, stop = run(tokenizer, ids, pieces, stop=tuple(stops))
    whole = tokenizer.decode(ids)
    hit = first_stop(whole, stops) if stops else None
    if hit is None:
        assert stop is None
        assert "".join(shown) == whole
        return
    assert stop is not None
    assert "".join(shown) == whole[: whole.find(stop)] or "".join(shown) == whole[: hit[0]]
    assert not any(s in "".join(shown) for s in stops)


def test_a_stop_string_can_be_part_of_the_text(tokenizer: TextTokenizer) -> None:
    ids = tokenizer.encode("one END two")
    assert run(tokenizer, ids, [], stop=("END",))[1] == "END"
    assert "".join(run(tokenizer, ids, [], stop=("END",))[0]) == "one "
    assert "".join(run(tokenizer, ids, [], stop=("END",), include_stop=True)[0]) == "one END"


def test_what_only_looked_like_a_stop_is_shown_at_the_end(tokenizer: TextTokenizer) -> None:
    shown, stop = run(tokenizer, tokenizer.encode("almost EN"), [], stop=("END",))
    assert stop is None
    assert "".join(shown) == "almost EN"
    assert "E" not in "".join(shown[:-1])


def test_stops_do_not_count_before_they_are_watched(tokenizer: TextTokenizer) -> None:
    text = SequenceText(tokenizer, SamplingParams(max_tokens=9, stop=("a",)))
    assert text.add(tokenizer.encode("a"), watch=False) == ("a", None)
    assert text.add(tokenizer.encode("ba"), watch=True) == ("b", "a")


def test_first_complete_stop_wins() -> None:
    assert first_stop("xaby", ("b", "ab")) == (1, "ab")
    assert first_stop("xaby", ("aby", "b")) == (2, "b")
    assert first_stop("xyz", ("ab",)) is None


def test_held_length() -> None:
    assert held_length("abcEN", ("END",)) == 2
    assert held_length("abcEND", ("END!",)) == 3
    assert held_length("abc", ("END",)) == 0
    assert held_length("", ("END",)) == 0
