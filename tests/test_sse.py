from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from sensorium.server import sse


@given(st.lists(st.text(st.sampled_from(" \n\tab€"))))
def test_deltas_make_up_the_stripped_text(parts: list[str]) -> None:
    text = sse.DeltaText()
    deltas = [text.push(part) for part in parts]
    assert "".join(deltas) == text.text == "".join(parts).strip()


def test_event_is_one_data_line() -> None:
    line = sse.event({"type": "transcript.text.delta", "delta": "a\nb\r\n\u2028c"})
    assert line.startswith(b"data: {")
    assert line.endswith(b"}\n\n")
    assert line.count(b"\n") == 2
    assert b"\r" not in line
