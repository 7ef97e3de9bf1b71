"""Text of a growing sequence: complete characters only, and never a piece of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from ..models.base import SamplingParams, TextTokenizer
from ..processors.text import Detokenizer


class SequenceText:
    """Makes text of one sequence's ids and watches for its stop strings.

    `text` is all that was handed out. What could become a stop string is held back until it is decided.
    """

    def __init__(self, tokenizer: TextTokenizer, params: SamplingParams) -> None:
        self.text = ""
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens)
        self._stop = tuple(s for s in params.stop if s)
        self._include_stop = params.include_stop
        self._held = ""

    def add(self, token_ids: Sequence[int], watch: bool = True) -> tuple[str, str | None]:
        """Returns (fresh text, the stop string that ended it or None). watch: whether stop strings count yet."""
        pending = self._held + self._detokenizer.add(token_ids)
        self._held = ""
        if watch and self._stop:
            hit = first_stop(pending, self._stop)
            if hit is not None:
                start, stop = hit
                return self._hand_out(pending[: start + (len(stop) if self._include_stop else 0)]), stop
            keep = held_length(pending, self._stop)
            pending, self._held = pending[: len(pending) - keep], pending[len(pending) - keep :]
        return self._hand_out(pending), None

    def finish(self) -> str:
        """What was held back and turned out to be text after all."""
        pending, self._held = self._held + self._detokenizer.flush(), ""
        return self._hand_out(pending)

    def _hand_out(self, fresh: str) -> str:
        self.text += fresh
        return fresh


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """(position, stop string) of the one that is complete first; of those that end together the longest.

    That choice does not depend on how the text arrived in pieces.
    """
    hits = [(text.find(stop), stop) for stop in stops]
    return min(
        (hit for hit in hits if hit[0] >= 0), key=lambda hit: (hit[0] + len(hit[1]), hit[0]), default=None
    )


def held_length(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of the text that a stop string could begin with."""
    longest = min(len(text), max(len(stop) for stop in stops) - 1)
    for length in range(longest, 0, -1):
        tail = text[-length:]
        if any(stop.startswith(tail) for stop in stops):
            return length
    return 0
