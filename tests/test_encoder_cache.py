"""The encoder cache under arbitrary use."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sensorium.engine.encoder_cache import EncoderCache

OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["put", "get", "pin", "unpin"]), st.integers(0, 6), st.integers(1, 40)),
    max_size=80,
)


@settings(deadline=None)
@given(OPERATIONS)
def test_budget_and_pins_hold(operations: list[tuple[str, int, int]]) -> None:
    cache = EncoderCache(budget_bytes=4 * 60)
    sizes: dict[int, int] = {}
    pins: dict[int, int] = {}
    for verb, number, size in operations:
        key = ("m", str(number))
        if verb == "put":
            if key not in cache:
                sizes[number] = size
            cache.put(key, torch.full((size,), float(number)))
        elif verb == "get":
            output = cache.get(key)
            assert (output is not None) == (key in cache)
            if output is not None:
                assert output.tolist() == [float(number)] * sizes[number]
        elif verb == "pin" and key in cache:
            cache.pin(key)
            pins[number] = pins.get(number, 0) + 1
        elif verb == "unpin" and pins.get(number):
            cache.unpin(key)
            pins[number] -= 1
        cache.check_integrity()
        assert all(("m", str(n)) in cache for n, count in pins.items() if count), "a pinned entry was evicted"
    assert cache.hits <= cache.queries


def test_the_least_recently_used_entry_goes_first() -> None:
    cache = EncoderCache(budget_bytes=8)
    for name in "ab":
        cache.put(("m", name), torch.zeros(1))
    cache.get(("m", "a"))
    cache.put(("m", "c"), torch.zeros(1))
    assert ("m", "a") in cache
    assert ("m", "b") not in cache


def test_models_do_not_share_entries() -> None:
    cache = EncoderCache(budget_bytes=100)
    cache.put(("m", "x"), torch.zeros(1))
    assert cache.get(("n", "x")) is None
    cache.drop_model("m")
    assert cache.num_bytes == 0
    cache.check_integrity()
