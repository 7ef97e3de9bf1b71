"""Thinking spans of a model's output: told apart from the answer, held to a budget, kept free of a grammar.

A thinking model writes `<think>…</think>` before its answer. Where the span begins depends on the chat
template: it may open the span in the prompt (DeepSeek-R1, Qwen3's "thinking" releases), close it there
(thinking switched off), or leave it to the model (Qwen3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .base import Grammar, GrammarMatcher, TextTokenizer
from .logits import ends_with

Thinking = Literal["undecided", "open", "closed"]
"""What the prompt says of the output: it may open a thinking span, begins inside one, or holds none."""

DEEPSEEK_TURN = "<｜Assistant｜>"
LEADING_IDS = 2  # ids of white space that may come before an opening mark
ALL_TOKENS = -1  # an int32 word of a bitmask with every bit set


@dataclass(frozen=True)
class ReasoningFormat:
    """How a family marks its thinking.

    opens_after: the end of a prompt behind which the output begins inside the span, though nothing opens it.
    """

    name: str
    start: str = "<think>"
    end: str = "</think>"
    opens_after: str | None = None

    def thinking_after(self, prompt: str, prefill: str | None = None) -> Thinking:
        """prompt: as the template rendered it. prefill: the message in it that the output continues, if any.

        Only the prompt's tail counts: what users write about the marks opens and closes nothing.
        """
        if prefill is not None:
            opened, closed = prefill.rfind(self.start), prefill.rfind(self.end)
            if max(opened, closed) >= 0:
                return "open" if opened > closed else "closed"
            if prefill.strip():
                return "closed"
        tail = prompt.rstrip()
        if tail.endswith(self.start):
            return "open"
        if tail.endswith(self.end):
            return "closed"
        return "open" if self.opens_after and tail.endswith(self.opens_after) else "undecided"


REASONING_FORMATS = {
    "qwen3": ReasoningFormat("qwen3"),
    "deepseek_r1": ReasoningFormat("deepseek_r1", opens_after=DEEPSEEK_TURN),
}


def reasoning_format_of(chat_template: str | None) -> ReasoningFormat | None:
    """The format whose marks a chat template mentions, else None."""
    if chat_template is None or "</think>" not in chat_template:
        return None
    return REASONING_FORMATS["deepseek_r1" if DEEPSEEK_TURN in chat_template else "qwen3"]


_State = Literal["start", "opening", "thinking", "closing", "content"]
_FIRST_STATES: dict[Thinking, _State] = {"undecided": "start", "open": "opening", "closed": "content"}


@dataclass(frozen=True)
class ReasoningDelta:
    """What a piece of output added to the thinking and to the answer."""

    reasoning: str = ""
    content: str = ""


class ReasoningParser:
    """Divides one sequence's text into thinking and answer as it arrives; the cuts of the text do not matter.

    The white space around the thinking and between it and the answer belongs to neither. An answer without
    thinking comes out as it is. A span that is never closed is all thinking.
    """

    def __init__(self, form: ReasoningFormat, thinking: Thinking) -> None:
        self._form = form
        self._buffer = ""
        self._state = _FIRST_STATES[thinking]
        self._at_start = True  # whether nothing but white space of the thinking was seen

    def feed(self, text: str) -> ReasoningDelta:
        self._buffer += text
        reasoning = content = ""
        if self._state in ("start", "opening"):
            self._open()
        if self._state == "thinking":
            reasoning = self._think()
        if self._state == "closing":
            self._buffer = self._buffer.lstrip()
            if self._buffer:
                self._state = "content"
        if self._state == "content":
            content, self._buffer = self._buffer, ""
        return ReasoningDelta(reasoning, content)

    def finish(self) -> ReasoningDelta:
        """The end of the text: what was held back."""
        rest, self._buffer = self._buffer, ""
        if self._state == "start":
            return ReasoningDelta(content=rest)
        return ReasoningDelta(reasoning=rest.strip() if self._at_start else rest.rstrip())

    def _open(self) -> None:
        """Drops the opening mark once it is there; decides as soon as it cannot come any more."""
        body = self._buffer.lstrip()
        if body.startswith(self._form.start):
            self._state, self._buffer = "thinking", body[len(self._form.start) :]
        elif not self._form.start.startswith(body):
            self._state = "content" if self._state == "start" else "thinking"

    def _think(self) -> str:
        if self._at_start:
            self._buffer = self._buffer.lstrip()
            self._at_start = not self._buffer
        end = self._form.end
        position = self._buffer.find(end)
        if position >= 0:
            thought = self._buffer[:position].rstrip()
            self._state, self._buffer = "closing", self._buffer[position + len(end) :]
            return thought
        held = partial_suffix(self._buffer, end)
        thought = self._buffer[: len(self._buffer) - held].rstrip()
        self._buffer = self._buffer[len(thought) :]
        return thought


def partial_suffix(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins, but is not, `mark`."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0


def split_reasoning(text: str, form: ReasoningFormat, thinking: Thinking) -> tuple[str, str]:
    """(thinking, answer) of a whole output; both may be empty."""
    parser = ReasoningParser(form, thinking)
    parts = [parser.feed(text), parser.finish()]
    return "".join(p.reasoning for p in parts), "".join(p.content for p in parts)


@dataclass(frozen=True)
class ThinkingMarks:
    """The ids that open and close thinking in one vocabulary, each at least one, and where output begins."""

    start_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    thinking: Thinking

    @classmethod
    def of(cls, form: ReasoningFormat, tokenizer: TextTokenizer, thinking: Thinking) -> ThinkingMarks:
        start, end = (tuple(tokenizer.encode(mark, special=True)) for mark in (form.start, form.end))
        return cls(start, end, thinking)


def _find(ids: Sequence[int], wanted: Sequence[int], begin: int) -> int:
    """First place ≥ begin where `wanted` stands in `ids`, or -1."""
    last = len(ids) - len(wanted)
    while begin <= last:
        try:
            begin = ids.index(wanted[0], begin, last + 1)
        except ValueError:
            return -1
        if list(ids[begin : begin + len(wanted)]) == list(wanted):
            return begin
        begin += 1
    return -1


@dataclass(frozen=True)
class ThinkingBudget:
    """A logits processor that closes the first thinking span once it has lasted `budget` ≥ 0 tokens.

    The closing mark itself is not counted. It belongs behind all other processors: what it forces comes.
    """

    budget: int
    marks: ThinkingMarks

    def __call__(self, logits: Tensor, outputs: Sequence[Sequence[int]]) -> None:
        for row, sampled in enumerate(outputs):
            token = self._forced(sampled)
            if token is not None:
                logits[row] = -math.inf
                logits[row, token] = 0.0

    def _forced(self, sampled: Sequence[int]) -> int | None:
        """The one id that may come next, None while there is a choice."""
        marks = self.marks
        if marks.thinking == "closed":
            return None
        begin = 0
        if marks.thinking == "undecided":
            opened = _find(sampled[: LEADING_IDS + len(marks.start_ids)], marks.start_ids, 0)
            if opened < 0:
                return None
            begin = opened + len(marks.start_ids)
        spent = begin + self.budget
        if len(sampled) < spent or _find(sampled, marks.end_ids, begin) >= 0:
            return None
        # A closing mark that was under way when the budget ran out is completed, not begun anew.
        within = sampled[begin:spent]
        written = next(
            n for n in range(len(marks.end_ids) - 1, -1, -1) if ends_with(within, marks.end_ids[:n])
        )
        position = written + len(sampled) - spent
        # Beyond the mark only if something else changed what was forced; then there is nothing more to do.
        return marks.end_ids[position] if position < len(marks.end_ids) else None


@dataclass(frozen=True)
class GrammarAfterThinking:
    """A grammar that holds from the end of the thinking on; the thinking itself is free.

    If the model may still choose whether to think, its first token is one of the grammar or the opening mark
    (which has to be a token of its own).
    """

    grammar: Grammar
    marks: ThinkingMarks

    def matcher(self) -> GrammarMatcher:
        return ThinkingMatcher(self.grammar.matcher(), self.marks, self.marks.thinking, [])


class ThinkingMatcher:
    """The GrammarMatcher of `GrammarAfterThinking`."""

    def __init__(
        self, inner: GrammarMatcher, marks: ThinkingMarks, thinking: Thinking, recent: list[int]
    ) -> None:
        self._inner = inner
        self._marks = marks
        self._thinking: Thinking = thinking
        self._recent = recent  # the last ids of an open span, as many as the closing mark has
        if thinking == "undecided" and len(marks.start_ids) != 1:
            self._thinking = "closed"

    def fill_bitmask(self, bitmask: Tensor, row: int) -> None:
        if self._thinking == "open":
            bitmask[row] = ALL_TOKENS
            return
        self._inner.fill_bitmask(bitmask, row)
        if self._thinking == "undecided":
            word, bit = divmod(self._marks.start_ids[0], 32)
            bitmask[row, word] |= torch.tensor(1 << bit).to(torch.int32)

    def accept(self, token_id: int) -> bool:
        if self._thinking == "undecided":
            opens = token_id == self._marks.start_ids[0]
            self._thinking = "open" if opens else "closed"
            if opens:
                return True
        if self._thinking == "closed":
            return self._inner.accept(token_id)
        self._recent = [*self._recent, token_id][-len(self._marks.end_ids) :]
        if self._recent == list(self._marks.end_ids):
            self._thinking = "closed"
        return True

    def fork(self) -> ThinkingMatcher:
        return ThinkingMatcher(self._inner.fork(), self._marks, self._thinking, list(self._recent))

    @property
    def is_terminated(self) -> bool:
        return self._thinking == "closed" and self._inner.is_terminated
