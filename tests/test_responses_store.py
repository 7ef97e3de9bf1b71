"""Kept responses stay within their bounds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sensorium.server.errors import ApiError
from sensorium.server.responses_store import ResponseStore


def response(name: str, text: str = "", status: str = "completed") -> dict[str, Any]:
    return {"id": name, "status": status, "text": text}


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["put", "get", "delete"]), st.integers(0, 9), st.integers(0, 400))),
    st.integers(1, 5),
    st.integers(50, 600),
)
def test_bounds(steps: list[tuple[str, int, int]], count: int, room: int) -> None:
    store = ResponseStore(count, room)
    for what, number, length in steps:
        name = str(number)
        if what == "put":
            store.put(response(name, "x" * length), [{"a": 1}])
            assert name in store or length > room - 100
        elif name in store:
            assert store.get(name).response["id"] == name
            if what == "delete":
                store.delete(name)
        assert len(store) <= count
        assert store.num_bytes <= room
    for number in range(10):
        if str(number) in store:
            store.delete(str(number))
    assert (len(store), store.num_bytes) == (0, 0)


def test_the_one_not_used_for_longest_goes_first() -> None:
    store = ResponseStore(2, 10_000)
    store.put(response("a"), [])
    store.put(response("b"), [])
    store.get("a")
    store.put(response("c"), [])
    assert ("a" in store, "b" in store, "c" in store) == (True, False, True)
    store.before("a")
    store.put(response("d"), [])
    assert ("a" in store, "c" in store) == (True, False)


def test_only_what_ended_can_be_continued() -> None:
    store = ResponseStore(9, 10_000)
    store.put(response("done"), [{"x": 1}])
    assert store.before("done") == ({"x": 1},)
    assert store.before(None) == ()
    for status in ("in_progress", "failed", "cancelled"):
        store.put(response(status, status=status), [])
        with pytest.raises(ApiError) as caught:
            store.before(status)
        assert caught.value.status == 400
