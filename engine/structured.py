"""Structured output: grammars compiled for one vocabulary, the masks of the tokens that may come next.

Grammars are compiled by xgrammar, first in a process of their own (structured_sandbox.py) within `limit_seconds`,
5 by default, and 2 GiB; JSON schemas are rewritten to what it enforces exactly (structured_schema.py).
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..models.base import GrammarMatcher, TextTokenizer
from .structured_sandbox import STEP_SECONDS, TOO_AMBIGUOUS, Sandbox, build
from .structured_text import GrammarError, check_text

__all__ = [
    "CompiledGrammar",
    "GrammarCompiler",
    "GrammarError",
    "apply_bitmask",
    "bitmask_width",
    "constrain",
]

LIMIT_SECONDS = 5.0
MAX_CACHED = 256
MAX_CACHED_BYTES = 128 << 20
MAX_WORKERS = 4  # grammars of one compiler that are compiled at a time
MAX_CHOICES = 10_000
GRACE_SECONDS = 2.0  # CPU time that the masks of a sequence may take before their average is judged

_CONTROL = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")  # those but line breaks


def bitmask_width(vocab_size: int) -> int:
    """Numbers (int32) in a row of a bitmask: a bit a token."""
    return -(-vocab_size // 32)


@dataclass(frozen=True)
class CompiledGrammar:
    """A grammar for one vocabulary; a value: equal if it came from the same text and the same compiler."""

    kind: str
    text: str
    compiler: object = field(repr=False)  # an identity
    handle: Any = field(compare=False, repr=False)  # xgrammar's own
    stop_token_ids: tuple[int, ...] = field(compare=False, repr=False)

    def matcher(self) -> CompiledMatcher:
        import xgrammar  # loads transformers, a second and 150 MB that only users of grammars pay

        return CompiledMatcher(xgrammar.GrammarMatcher(self.handle), self.stop_token_ids)


class CompiledMatcher:
    """One sequence's place in a compiled grammar. Used by one thread at a time."""

    def __init__(self, matcher: Any, stop_token_ids: tuple[int, ...], seconds: float = 0.0, steps: int = 0):
        self._matcher = matcher
        self._stop_token_ids = stop_token_ids
        self._seconds = seconds
        self._steps = steps

    def fill_bitmask(self, bitmask: Tensor, row: int) -> None:
        """Stop tokens are allowed where the grammar is complete, and alone once one was accepted.

        bitmask: int32 [rows, ceil(vocab / 32)] on the CPU. Raises GrammarError where no token fits (a grammar
        without an end, or text that the vocabulary cannot write), and when the grammar turns out so ambiguous
        that masks take over 0.1 s of CPU time a token.
        """
        if self._matcher.is_terminated():
            bitmask[row] = 0
            for token_id in self._stop_token_ids:
                bit = token_id % 32
                bitmask[row, token_id // 32] |= 1 << bit if bit < 31 else -(1 << 31)
            return
        began = time.thread_time()
        self._matcher.fill_next_token_bitmask(bitmask, row)
        self._seconds += time.thread_time() - began
        self._steps += 1
        if self._seconds > max(GRACE_SECONDS, STEP_SECONDS * self._steps):
            raise GrammarError(TOO_AMBIGUOUS)
        if not bitmask[row].any():
            raise GrammarError("the grammar allows no further token")

    def accept(self, token_id: int) -> bool:
        return not self._matcher.is_terminated() and bool(self._matcher.accept_token(token_id))

    def fork(self) -> CompiledMatcher:
        return CompiledMatcher(self._matcher.fork(), self._stop_token_ids, self._seconds, self._steps)

    @property
    def is_terminated(self) -> bool:
        """Whether the grammar was completed and a stop token accepted."""
        return bool(self._matcher.is_terminated())


class GrammarCompiler:
    """Compiles grammars for one text model and keeps the recent ones. Thread-safe; calls block.

    The helper process starts with the first grammar (seconds), or early by `start`.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        vocab_size: int,
        stop_token_ids: Sequence[int],
        *,
        limit_seconds: float = LIMIT_SECONDS,
        max_cached: int = MAX_CACHED,
        max_cached_bytes: int = MAX_CACHED_BYTES,
    ) -> None:
        """vocab_size: width of the logits, which may exceed the tokenizer's; what it does not know never fits.

        stop_token_ids: the ids that end a complete text, at least one, each below vocab_size.
        """
        if not stop_token_ids or not all(0 <= token_id < vocab_size for token_id in stop_token_ids):
            raise ValueError("a grammar needs stop tokens of the vocabulary")
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.stop_token_ids = tuple(dict.fromkeys(stop_token_ids))
        self.limit_seconds = limit_seconds
        self._max_cached = max_cached
        self._max_cached_bytes = max_cached_bytes
        self._lock = threading.Lock()
        self._start_lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(MAX_WORKERS)
        self._cache: OrderedDict[tuple[str, str], tuple[CompiledGrammar, int]] = OrderedDict()
        self._cached_bytes = 0
        self._compiling: dict[tuple[str, str], Future[CompiledGrammar]] = {}
        self._sandbox: Sandbox | None = None
        self._compiler: Any = None
        self._json_compiler: Any = None
        self._identity = object()

    def start(self) -> Sandbox:
        """Starts the helper process unless it runs."""
        with self._start_lock:
            if self._sandbox is None:
                import xgrammar  # loads transformers, a second and 150 MB that only users of grammars pay

                vocabulary = [b""] * self.vocab_size  # special, and what only the logits have
                for token_id in range(min(self.tokenizer.vocab_size, self.vocab_size)):
                    if not self.tokenizer.is_special(token_id):
                        vocabulary[token_id] = self.tokenizer.token_bytes(token_id)
                stop = list(self.stop_token_ids)
                info = xgrammar.TokenizerInfo(vocabulary, vocab_size=self.vocab_size, stop_token_ids=stop)
                # xgrammar lets raw control characters into strings of limited length, where JSON has none.
                vocabulary = [b"" if _CONTROL.search(token) else token for token in vocabulary]
                json_info = xgrammar.TokenizerInfo(
                    vocabulary, vocab_size=self.vocab_size, stop_token_ids=stop
                )
                self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
                self._json_compiler = xgrammar.GrammarCompiler(json_info, max_threads=1, cache_enabled=False)
                self._sandbox = Sandbox(info.serialize_json(), self.limit_seconds)
            return self._sandbox

    def close(self) -> None:
        """Ends the helper process; grammars that were compiled stay usable."""
        with self._start_lock:
            if self._sandbox is not None:
                self._sandbox.close()
                self._sandbox = None

    def compile_json_object(self) -> CompiledGrammar:
        """Any JSON object."""
        return self._compile("json_schema", '{"type": "object"}')

    def compile_json_schema(
        self, schema: Mapping[str, Any] | bool | str, strict: bool = True
    ) -> CompiledGrammar:
        """JSON that is valid under a schema, given as a value or as text.

        Objects that list properties have no others, unless `additionalProperties` says so.
        strict: a schema that cannot be enforced in full is a GrammarError that names the keyword; otherwise
        such keywords are left out.
        """
        return self._compile("json_schema", _as_text(schema, "the schema"), strict)

    def compile_regex(self, pattern: str) -> CompiledGrammar:
        """Text that a regular expression (ECMA-262, without look-around and back-references) matches whole."""
        return self._compile("regex", pattern)

    def compile_choice(self, choices: Sequence[str]) -> CompiledGrammar:
        """Exactly one of the texts."""
        if isinstance(choices, str) or not choices or not all(isinstance(text, str) for text in choices):
            raise GrammarError("a choice needs a list of at least one text")
        if len(choices) > MAX_CHOICES:
            raise GrammarError(f"a choice of more than {MAX_CHOICES} texts is not supported")
        alternatives = (
            "".join(char if char.isalnum() and char.isascii() else f"\\U{ord(char):08x}" for char in text)
            for text in dict.fromkeys(choices)
        )
        return self._compile("ebnf", "root ::= " + " | ".join(f'"{text}"' for text in alternatives))

    def compile_ebnf(self, grammar: str) -> CompiledGrammar:
        """A grammar in GBNF notation with a rule `root`."""
        return self._compile("ebnf", grammar)

    def compile_structural_tag(self, tag: Mapping[str, Any] | str, strict: bool = True) -> CompiledGrammar:
        """Free text with structured parts: {"type": "structural_tag", "format": …} or structures and triggers."""
        return self._compile("structural_tag", _as_text(tag, "the structural tag"), strict)

    def _compile(self, kind: str, text: str, strict: bool = True) -> CompiledGrammar:
        key = (kind if strict else f"{kind}, lenient", check_text(text, "the grammar"))
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key][0]
            future = self._compiling.get(key)
            mine = future is None
            if future is None:
                future = self._compiling[key] = Future()
        if mine:
            try:
                grammar, size = self._run(kind, text, strict, key[0])
            except BaseException as error:
                with self._lock:
                    del self._compiling[key]
                future.set_exception(error)
            else:
                with self._lock:
                    del self._compiling[key]
                    self._keep(key, grammar, size)
                future.set_result(grammar)
        return future.result()

    def _run(self, kind: str, text: str, strict: bool, name: str) -> tuple[CompiledGrammar, int]:
        sandbox = self.start()
        compiler = self._json_compiler if kind == "json_schema" else self._compiler
        with self._slots:
            handle = build(compiler, kind, sandbox.check(kind, text, strict))
        grammar = CompiledGrammar(name, text, self._identity, handle, self.stop_token_ids)
        return grammar, len(text) + int(handle.memory_size_bytes)

    def _keep(self, key: tuple[str, str], grammar: CompiledGrammar, size: int) -> None:
        self._cache[key] = (grammar, size)
        self._cached_bytes += size
        while len(self._cache) > self._max_cached or self._cached_bytes > self._max_cached_bytes:
            _, (_, freed) = self._cache.popitem(last=False)
            self._cached_bytes -= freed


def _as_text(value: Any, what: str) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError as error:
        raise GrammarError(f"{what} is nested too deeply") from error
    except (TypeError, ValueError) as error:
        raise GrammarError(f"{what} holds a value that JSON does not have") from error


def apply_bitmask(logits: Tensor, bitmask: Tensor, rows: Sequence[int]) -> None:
    """Sets the logits of tokens that may not come next to -inf, in place.

    logits: float32 [n, vocab]. bitmask: int32 [at least n, at least ceil(vocab / 32)], on the CPU.
    rows: the rows of both that are changed.
    """
    vocab_size = logits.shape[-1]
    if bitmask.shape[-1] < bitmask_width(vocab_size):
        raise ValueError(f"a bitmask of {bitmask.shape[-1] * 32} tokens does not cover {vocab_size} logits")
    dense = [row for row in rows if logits.device.type != "cpu" or not _keep_few(logits[row], bitmask[row])]
    if dense:
        import xgrammar  # loads transformers, a second and 150 MB that only users of grammars pay

        xgrammar.apply_token_bitmask_inplace(
            logits, bitmask.to(logits.device), vocab_size=vocab_size, indices=dense
        )


def _keep_few(logits: Tensor, words: Tensor) -> bool:
    """Masks one row if few tokens are allowed, which xgrammar's kernel is slow at (0.32 ms against 0.03 ms)."""
    used = words.nonzero()[:, 0]
    if len(used) * 8 > len(words):
        return False
    block, bit = ((words[used, None] >> torch.arange(32)) & 1).nonzero(as_tuple=True)
    token_ids = used[block] * 32 + bit
    token_ids = token_ids[token_ids < len(logits)]
    kept = logits[token_ids]
    logits.fill_(-torch.inf)
    logits[token_ids] = kept
    return True


def constrain(logits: Tensor, matchers: Sequence[GrammarMatcher | None]) -> dict[int, GrammarError]:
    """Leaves to every row the tokens that its matcher allows; rows without a matcher stay as they are.

    logits: float32 [len(matchers), vocab], changed in place. Returns the rows whose grammar cannot go on, with
    the reason: their logits are unchanged, their requests have to end.
    """
    bitmask = torch.empty((len(matchers), bitmask_width(logits.shape[-1])), dtype=torch.int32)
    rows: list[int] = []
    failed: dict[int, GrammarError] = {}
    for row, matcher in enumerate(matchers):
        if matcher is None:
            continue
        try:
            matcher.fill_bitmask(bitmask, row)
        except GrammarError as error:
            failed[row] = error
        else:
            rows.append(row)
    if rows:
        apply_bitmask(logits, bitmask, rows)
    return failed
