from __future__ import annotations

import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sensorium.models.speech import ChunkingStrategy
from sensorium.server import fields
from sensorium.server.fields import FieldError


@given(st.floats(0, 1))
def test_number_reads_what_python_writes(value: float) -> None:
    assert fields.number(0, 1)(repr(value)) == value


@pytest.mark.parametrize(
    "text", ["1_0", "nan", "inf", "1e999", "١", "0x1", "", "--1", "1,0", "1 0", "e5", "."]
)
def test_number_is_strict(text: str) -> None:
    with pytest.raises(FieldError):
        fields.number(0, math.inf)(text)


def test_minus_zero_is_zero() -> None:
    assert math.copysign(1, fields.number(0, 1)("-0.0")) == 1


@pytest.mark.parametrize("text", ["1.0", "1e1", "", "1_0", "9" * 5000, "0", "9", "٣"])
def test_integer_is_strict(text: str) -> None:
    with pytest.raises(FieldError):
        fields.integer(1, 8)(text)


@given(st.text(max_size=20))
def test_readers_raise_nothing_but_field_errors(text: str) -> None:
    readers = (
        *(fields.number(0, 1), fields.integer(1, 8), fields.boolean, fields.choice(("a", "b"))),
        *(fields.items, fields.clip_times, fields.chunking),
    )
    for read in readers:
        for value in (text, f"[{text}]", f'{{"type": "server_vad", "threshold": {text}}}'):
            with contextlib.suppress(FieldError):
                read(value)


def test_messages_are_one_line() -> None:
    with pytest.raises(FieldError, match=r"^must be true or false, not 'a\\nb'$"):
        fields.boolean("a\nb")


@pytest.mark.parametrize(
    ("text", "times"),
    [
        ("0", (0.0,)),
        ("1,2", (1.0, 2.0)),
        ("1.5, 2.5, 2.5, 9", (1.5, 2.5, 2.5, 9.0)),
        ("[0, 5.25, 6]", (0.0, 5.25, 6.0)),
    ],
)
def test_clip_times(text: str, times: tuple[float, ...]) -> None:
    assert fields.clip_times(text) == times


@pytest.mark.parametrize(
    "text", ["2,1", "1,1", "0,1,0.5", "-1", "1,,2", "[1", "x", '{"a": 1}', "0," * 10_001 + "0"]
)
def test_clip_times_that_make_no_clips(text: str) -> None:
    with pytest.raises(FieldError):
        fields.clip_times(text)


@pytest.mark.parametrize(
    ("text", "strategy"),
    [
        ("auto", ChunkingStrategy()),
        ('"auto"', ChunkingStrategy()),
        ('{"type": "server_vad"}', ChunkingStrategy(0.5, 300, 200)),
        (
            '{"type": "server_vad", "threshold": 0.3, "prefix_padding_ms": 0, "silence_duration_ms": 500}',
            ChunkingStrategy(0.3, 0, 500),
        ),
        ('{"type": "server_vad", "threshold": null}', ChunkingStrategy(0.5, 300, 200)),
    ],
)
def test_chunking(text: str, strategy: ChunkingStrategy) -> None:
    assert fields.chunking(text) == strategy


@pytest.mark.parametrize(
    "text", ["none", "{}", "[]", '{"type": "server_vad", "threshold": 0}', "{" * 5000, "1"]
)
def test_chunking_that_is_none(text: str) -> None:
    with pytest.raises(FieldError):
        fields.chunking(text)
