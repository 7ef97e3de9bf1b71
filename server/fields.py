"""Text values of form fields and command-line options, read strictly.

Every reader raises FieldError with a sentence that completes "<name> …".
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection
from itertools import pairwise
from typing import Any

import orjson

from ..models.speech import ChunkingStrategy
from .errors import shown

MAX_CLIP_TIMES = 10_000
MAX_SEED = 2**63 - 1
SERVER_VAD = ChunkingStrategy(
    threshold=0.5, prefix_padding_ms=300, silence_duration_ms=200
)  # OpenAI's defaults

# float() and int() would also take "1_0", " 1", "nan", "١" and "1e999".
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_INTEGER = re.compile(r"[+-]?\d{1,19}", re.ASCII)
_TRUTH = {"true": True, "1": True, "false": False, "0": False}


class FieldError(ValueError):
    """A value that cannot be read; the text completes a sentence that begins with the field's name."""


def absent(text: str) -> bool:
    """Whether a client meant "not given": clients send null and None as text or as nothing."""
    return text.strip() in ("", "null", "None", "undefined")


def text(value: str) -> str:
    return value


def number(low: float, high: float) -> Callable[[str], float]:
    """Reader of a finite number within [low, high]; high may be infinite."""
    allowed = f"between {low:g} and {high:g}" if high < math.inf else f"of at least {low:g}"

    def read(value: str) -> float:
        found = float(value) if _NUMBER.fullmatch(value.strip()) else math.nan
        if not (low <= found <= high and math.isfinite(found)):
            raise FieldError(f"must be a number {allowed}, not {shown(value)}")
        return found + 0.0  # -0.0 becomes 0.0

    return read


def integer(low: int, high: int) -> Callable[[str], int]:
    """Reader of a whole number within [low, high]."""

    def read(value: str) -> int:
        found = int(value) if _INTEGER.fullmatch(value.strip()) else None
        if found is None or not low <= found <= high:
            raise FieldError(f"must be a whole number from {low} to {high}, not {shown(value)}")
        return found

    return read


def boolean(value: str) -> bool:
    found = _TRUTH.get(value.strip().lower())
    if found is None:
        raise FieldError(f"must be true or false, not {shown(value)}")
    return found


def choice(allowed: Collection[str]) -> Callable[[str], str]:
    """Reader of one of a few words."""

    def read(value: str) -> str:
        if value.strip() not in allowed:
            raise FieldError(f"must be one of {', '.join(allowed)}, not {shown(value)}")
        return value.strip()

    return read


def items(value: str) -> list[str]:
    """The items of a JSON list or of a comma-separated one; a single word is a list of one."""
    if value.strip().startswith("["):
        try:
            found = orjson.loads(value)
        except orjson.JSONDecodeError:
            raise FieldError(f"must be a list, not {shown(value)}") from None
        return [item if isinstance(item, str) else orjson.dumps(item).decode() for item in found]
    return [item.strip() for item in value.split(",")]


def clip_times(value: str) -> tuple[float, ...]:
    """Reader of start, end, start, end … in seconds, in ascending order; the last end may be left out."""
    read = number(0, math.inf)
    times = tuple(read(item) for item in items(value))
    if len(times) > MAX_CLIP_TIMES:
        raise FieldError(f"must hold at most {MAX_CLIP_TIMES} times")
    for index, (earlier, later) in enumerate(pairwise(times)):
        # A clip needs a length (even index: start, end); the next may begin where the last one ended.
        if later < earlier or (later == earlier and index % 2 == 0):
            raise FieldError("must be start,end,start,end… in seconds, each later than the one before")
    return times


def chunking(value: str) -> ChunkingStrategy:
    """Reader of "auto" or of a JSON server_vad object."""
    if value.strip().strip('"') == "auto":
        return ChunkingStrategy()
    try:
        found = orjson.loads(value)
    except orjson.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise FieldError(f'must be "auto" or a server_vad object, not {shown(value)}')
    return server_vad({key: item if isinstance(item, str) else _json(item) for key, item in found.items()})


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()


def server_vad(parts: dict[str, str]) -> ChunkingStrategy:
    """The strategy of a server_vad object, its values as text."""
    readers: dict[str, Callable[[str], Any]] = {
        "threshold": number(0, 1),
        "prefix_padding_ms": integer(0, 60_000),
        "silence_duration_ms": integer(0, 60_000),
    }
    unknown = sorted(set(parts) - set(readers) - {"type"})
    if unknown:
        raise FieldError(f"has an unknown key {shown(unknown[0])}")
    if parts.get("type") != "server_vad":
        raise FieldError('must be "auto" or an object of type "server_vad"')
    values = {}
    for key, read in readers.items():
        sent = parts.get(key, "")
        try:
            values[key] = getattr(SERVER_VAD, key) if absent(sent) else read(sent)
        except FieldError as error:
            raise FieldError(f"[{key}] {error}") from None
    if not 0 < values["threshold"] < 1:
        raise FieldError("[threshold] must lie between 0 and 1")
    return ChunkingStrategy(**values)
