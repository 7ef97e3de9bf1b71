"""A real vocabulary, random walks through a grammar's masks, and random schemas."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from sensorium.engine.structured import bitmask_width
from sensorium.models.base import Grammar, GrammarMatcher
from sensorium.processors.text import byte_of_character
from tokenizers import Tokenizer

EOT = 50257  # Whisper's end of text
LOGITS = 51872  # wider than the vocabulary, as padded checkpoints are
# What ends an open value soonest comes first.
CLOSERS = [bytes([byte]) for byte in b'}]"@.0:nulae,1-tr{[']


class Vocabulary:
    """Whisper's byte-level vocabulary as a text tokenizer: ids below the end of text stand for bytes."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        spelling = byte_of_character()
        texts = [self.tokenizer.id_to_token(token_id) for token_id in range(EOT)]
        self.bytes = [bytes(spelling[char] for char in text) if "<|" not in text else b"" for text in texts]
        self.vocab_size = 51865
        self.id_of = {token: token_id for token_id, token in enumerate(self.bytes) if token}
        self.is_text = np.array([_is_text(token) for token in self.bytes])
        self.short = np.array([0 < len(token) <= 2 for token in self.bytes]) & self.is_text

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return b"".join(self.token_bytes(token_id) for token_id in token_ids).decode()

    def token_bytes(self, token_id: int) -> bytes:
        return self.bytes[token_id] if token_id < EOT else b""

    def is_special(self, token_id: int) -> bool:
        return not self.token_bytes(token_id)


def _is_text(token: bytes) -> bool:
    try:
        return bool(token.decode())
    except UnicodeDecodeError:
        return False


def allowed_tokens(matcher: GrammarMatcher) -> np.ndarray:
    """bool [LOGITS]"""
    bitmask = torch.zeros((1, bitmask_width(LOGITS)), dtype=torch.int32)
    matcher.fill_bitmask(bitmask, 0)
    return np.unpackbits(bitmask.numpy().view(np.uint8), bitorder="little")[:LOGITS].astype(bool)


def walk(vocabulary: Vocabulary, grammar: Grammar, seed: int, free: int = 20, steps: int = 600) -> str | None:
    """A random text of the grammar: `free` random tokens, then what closes it; None if it does not end."""
    draw = random.Random(seed)
    matcher = grammar.matcher()
    tokens: list[int] = []
    for step in range(steps):
        mask = allowed_tokens(matcher)
        closing = step >= free
        if mask[EOT] and (closing or draw.random() < 0.2 or mask.sum() == 1):
            assert matcher.accept(EOT)
            assert matcher.is_terminated
            return vocabulary.decode(tokens)
        token = choose(vocabulary, mask, closing, draw)
        if token is None:
            return None
        assert matcher.accept(token)
        assert not matcher.is_terminated
        tokens.append(token)
    return None


def choose(vocabulary: Vocabulary, mask: np.ndarray, closing: bool, draw: random.Random) -> int | None:
    if closing and draw.random() < 0.9:
        in_string = mask[vocabulary.id_of[b"z"]] and mask[vocabulary.id_of[b"}"]]
        for closer in [b'"', *CLOSERS] if in_string else CLOSERS:
            if mask[vocabulary.id_of[closer]]:
                return vocabulary.id_of[closer]
    for kind in (
        (vocabulary.short, vocabulary.is_text) if closing or draw.random() < 0.7 else (vocabulary.is_text,)
    ):
        options = (mask[:EOT] & kind).nonzero()[0]
        if len(options):
            return int(draw.choice(options))
    return None


NAMES = st.sampled_from(["a", "b", "id", "a name", 'quo"te', "é", ""])
SCALARS = (
    st.none() | st.booleans() | st.integers(-50, 50) | st.sampled_from(["", "x", "é\n", 'a"b', 1.5, -0.25])
)
PATTERNS = st.sampled_from(
    ["^[a-z]{2,5}$", "^(cat|dog)s?$", r"^\d{3}-\d{4}$", "[A-F0-9]+", r"^\w+@\w+\.com$", "^.{1,4}$", "x|^y$"]
)
FORMATS = st.sampled_from(["date", "time", "date-time", "email", "uuid", "ipv4", "hostname", "uri"])


def pair(least: str, most: str, low: int, high: int) -> st.SearchStrategy[dict[str, Any]]:
    """Either, both or none of two bounds."""
    numbers = st.tuples(st.integers(low, high), st.integers(low, high)).map(sorted)
    picked = st.tuples(numbers, st.booleans(), st.booleans())
    return picked.map(
        lambda drawn: {
            name: value for name, value, on in zip((least, most), drawn[0], drawn[1:], strict=True) if on
        }
    )


def joined(*parts: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.tuples(*parts).map(lambda drawn: {key: value for part in drawn for key, value in part.items()})


def optional(**keywords: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=keywords)


def of_type(name: str) -> st.SearchStrategy[dict[str, Any]]:
    return st.just({"type": name})


STRINGS = joined(
    of_type("string"),
    st.one_of(
        pair("minLength", "maxLength", 0, 9),
        PATTERNS.map(lambda pattern: {"pattern": pattern}),
        FORMATS.map(lambda name: {"format": name}),
    ),
)
INTEGERS = joined(
    of_type("integer"), pair("minimum", "maximum", -99, 999), optional(multipleOf=st.integers(1, 12))
)
NUMBERS = joined(
    of_type("number"),
    pair("minimum", "maximum", -99, 99),
    optional(exclusiveMinimum=st.integers(-99, 0), exclusiveMaximum=st.floats(1, 99)),
)
LEAVES = st.one_of(
    STRINGS,
    INTEGERS,
    NUMBERS,
    st.sampled_from(["null", "boolean"]).map(lambda name: {"type": name}),
    st.lists(SCALARS, min_size=1, max_size=4).map(lambda values: {"enum": values}),
    SCALARS.map(lambda value: {"const": value}),
    st.just({"$ref": "#/$defs/leaf"}),
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    arrays = joined(
        of_type("array"),
        pair("minItems", "maxItems", 0, 4),
        optional(items=inner | st.booleans(), prefixItems=st.lists(inner, max_size=3)),
    )
    objects = joined(
        of_type("object"),
        optional(
            properties=st.dictionaries(NAMES, inner, max_size=4),
            required=st.lists(NAMES, max_size=3, unique=True),
            additionalProperties=st.booleans() | inner,
        ),
        pair("minProperties", "maxProperties", 0, 5),
    )
    maps = st.one_of(
        st.fixed_dictionaries(
            {"patternProperties": st.dictionaries(PATTERNS, inner, min_size=1, max_size=2)}
        ),
        st.fixed_dictionaries({"propertyNames": STRINGS, "additionalProperties": inner}),
    )
    combined = st.tuples(
        st.sampled_from(["anyOf", "oneOf", "allOf"]), st.lists(inner, min_size=1, max_size=3)
    )
    several = st.lists(inner, min_size=2, max_size=3).map(
        lambda schemas: {
            key: value for schema in schemas if "$ref" not in schema for key, value in schema.items()
        }
    )
    return st.one_of(arrays, objects, maps, combined.map(lambda drawn: {drawn[0]: drawn[1]}), several)


SCHEMAS = st.builds(
    lambda schema, leaf: {**schema, "$defs": {"leaf": leaf}},
    st.recursive(LEAVES, containers, max_leaves=8),
    st.one_of(STRINGS, INTEGERS, NUMBERS),
)
