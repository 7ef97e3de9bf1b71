"""Limits and checks of what users send as a grammar: JSON documents and regular expressions.

Regular expressions have ECMA-262's meaning (\\d and \\w are ASCII, no line break in `.`) and match a whole text.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

MAX_TEXT_BYTES = 256 * 1024  # of a schema, regular expression or grammar
MAX_NODES = 50_000  # values within a schema document
MAX_DOCUMENT_DEPTH = 200
MAX_COUNT = 100_000  # repetitions that a regular expression, minItems or minLength may ask for

_QUANTIFIER = re.compile(r"\{(\d{1,9})(?:(,)(\d{0,9}))?\}")
_ESCAPE = re.compile(r"\\(?:[dDwWsSnrtfv0]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[^0-9a-zA-Z])", re.DOTALL)
_CHARACTER_ESCAPES = frozenset('nrtfv0xu"\\')


class GrammarError(ValueError):
    """A schema, regular expression or grammar is malformed, impossible, unsupported or too costly; one line."""


def check_text(text: object, what: str) -> str:
    """Raises GrammarError unless `text` is a string of Unicode characters within MAX_TEXT_BYTES."""
    if not isinstance(text, str):
        raise GrammarError(f"{what} must be a string")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise GrammarError(f"{what} holds half a surrogate pair") from error
    if size > MAX_TEXT_BYTES:
        raise GrammarError(f"{what} is larger than {MAX_TEXT_BYTES // 1024} KiB")
    return text


def parse_document(document: object, what: str) -> Any:
    """A JSON text or parsed value → a value of bounded depth and size, of JSON's types only."""
    if isinstance(document, str):
        try:
            document = json.loads(check_text(document, what), parse_constant=_refuse_constant)
        except RecursionError as error:
            raise GrammarError(f"{what} is nested too deeply") from error
        except json.JSONDecodeError as error:
            raise GrammarError(f"{what} is not JSON: {error.msg} at character {error.pos}") from error
    stack: list[tuple[object, int]] = [(document, 0)]
    nodes = 0
    while stack:
        value, depth = stack.pop()
        nodes += 1
        if depth > MAX_DOCUMENT_DEPTH:
            raise GrammarError(f"{what} is nested too deeply")
        if nodes > MAX_NODES:
            raise GrammarError(f"{what} holds more than {MAX_NODES} values")
        if isinstance(value, Mapping):
            if not all(isinstance(name, str) for name in value):
                raise GrammarError(f"{what} has a name that is not a string")
            stack.extend((item, depth + 1) for item in value.values())
        elif isinstance(value, list | tuple):
            stack.extend((item, depth + 1) for item in value)
        elif isinstance(value, float) and not math.isfinite(value):
            raise GrammarError(f"{what} holds a number that JSON does not have")
        elif value is not None and not isinstance(value, str | int | float):
            raise GrammarError(f"{what} holds a value that JSON does not have")
    check_text(json.dumps(document, ensure_ascii=False), what)
    return document


def _refuse_constant(name: str) -> NoReturn:
    raise GrammarError(f"{name} is not JSON")


def normalize_regex(pattern: object, *, in_json: bool = False) -> str:
    """Checks a regular expression and rewrites what xgrammar reads otherwise.

    in_json: the text stands within a JSON string, where xgrammar writes literal characters unescaped: quotes,
    backslashes and control characters outside of a character class are refused.
    """
    text = check_text(pattern, "the regular expression")
    out: list[str] = []
    depth = position = 0
    in_class = False
    while position < len(text):
        char = text[position]
        step = char
        if char == "\\":
            escape = _ESCAPE.match(text, position)
            if escape is None:
                raise GrammarError(f"the escape {text[position : position + 2]!r} is not supported")
            step = escape[0]
        literal = char == '"' or (char == "\\" and step[1] in _CHARACTER_ESCAPES)
        position += len(step)
        if in_class:
            in_class = char != "]"
        elif in_json and (literal or ord(char) < 0x20):
            raise GrammarError("a pattern with quotes, backslashes or control characters is not supported")
        elif char == "[":
            in_class = True
            if text.startswith(("]", "^]"), position):
                raise GrammarError("an empty character class is not supported")
            if text.startswith("^", position):
                step, position = "[^", position + 1
        elif char == ".":
            step = r"[^\n\r\u2028\u2029]"
        elif char == "(":
            depth += 1
            if text.startswith("?", position) and not text.startswith("?:", position):
                raise GrammarError("look-around, flags and named groups are not supported")
        elif char == ")":
            depth -= 1
        elif char in "^$":
            # The whole text is matched anyway: an anchor elsewhere would be ignored, and change the meaning.
            edge = text[position - 2 : position - 1] if char == "^" else text[position : position + 1]
            if depth or edge not in ("", "|"):
                raise GrammarError(f"{char} is only supported at an end of the regular expression")
            step = ""
        elif char == "{":
            step = _quantifier(text, position - 1)
            position += len(step) - 1
        out.append(step)
    if in_class:
        raise GrammarError("a character class of the regular expression is not closed")
    return "".join(out)


def _quantifier(text: str, position: int) -> str:
    match = _QUANTIFIER.match(text, position)
    if match is None:
        raise GrammarError("a brace of the regular expression is no repetition; escape it")
    counts = [int(count) for count in (match[1], match[3]) if count]
    if max(counts) > MAX_COUNT:
        raise GrammarError(f"more than {MAX_COUNT} repetitions are not supported")
    if counts != sorted(counts):
        raise GrammarError(f"the repetition {match[0]} is impossible")
    return match[0]
