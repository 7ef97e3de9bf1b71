"""Keeps what users write from turning into special tokens of a rendered prompt."""

from __future__ import annotations

import re
from typing import Any, TypeVar

from ..processors.text import TextTokenizer
from .messages import map_strings

T = TypeVar("T")

# Characters of a private use area, which stand in a rendered prompt for what must not be read as it stands.
OPEN, CLOSE = "\uf8f0", "\uf8f1"
END_OF_PREFILL = "\uf8f2"
OURS = re.compile(f"[{OPEN}{CLOSE}{END_OF_PREFILL}]")
MARK = re.compile(f"{OPEN}([0-9]+){CLOSE}")

# Templates look for these in earlier answers, and they steer nothing: a turn cannot be forged with them.
HARMLESS = frozenset({"<think>", "</think>"})


class SpecialGuard:
    """Hides special tokens' texts in the parts of one prompt before it is rendered.

    The template's own special tokens are then the only ones; what was hidden is encoded as plain text.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: list[str] = []

    def hide(self, value: T) -> T:
        """The same strings, lists and mappings with marks in the place of special tokens' texts."""
        hidden: Any = map_strings(value, self._hide)
        return hidden

    def show(self, text: str) -> str:
        """The text with what was hidden."""
        return MARK.sub(lambda mark: self._texts[int(mark[1])], text) if self._texts else text

    def encode(self, text: str) -> list[int]:
        """Ids of a rendered prompt in which marks stand."""
        if not self._texts:
            return self._tokenizer.encode(text, special=True)
        ids: list[int] = []
        for index, piece in enumerate(MARK.split(text)):
            hidden = index % 2 == 1
            plain = self._texts[int(piece)] if hidden else piece
            if plain:
                ids += self._tokenizer.encode(plain, special=not hidden)
        return ids

    def _hide(self, text: str) -> str:
        text = OURS.sub(self._mark, text)
        return self._tokenizer.special_pattern.sub(self._mark, text)

    def _mark(self, match: re.Match[str]) -> str:
        if match[0] in HARMLESS:
            return match[0]
        self._texts.append(match[0])
        return f"{OPEN}{len(self._texts) - 1}{CLOSE}"


def up_to_prefill(text: str) -> str:
    """A rendered prompt up to where the last message's text ends; the message ended in END_OF_PREFILL, " ".

    A template that trims messages has trimmed that space, so the text before is trimmed too.
    """
    before, _, after = text.rpartition(END_OF_PREFILL)
    return before if after.startswith(" ") else before.rstrip()
