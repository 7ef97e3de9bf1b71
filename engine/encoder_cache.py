"""Encoder outputs by content: one owner, bytes as the unit, least recently used out first."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class EncoderEntry:
    """An encoder output [num_embeds, hidden] and how many scheduled requests rely on it."""

    output: Tensor
    ref_count: int = 0

    @property
    def num_bytes(self) -> int:
        return self.output.numel() * self.output.element_size()


class EncoderCache:
    """Maps (model, mm_hash) to an encoder output under a byte budget.

    A missing entry is never an error: whoever needs it encodes again. Entries in use are not evicted, so
    the budget can be exceeded by what one step holds; it is back under it when they are released.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.num_bytes = 0
        self.queries = 0
        self.hits = 0
        self._entries: OrderedDict[tuple[str, str], EncoderEntry] = OrderedDict()

    def __contains__(self, key: tuple[str, str]) -> bool:
        return key in self._entries

    def get(self, key: tuple[str, str]) -> Tensor | None:
        self.queries += 1
        entry = self._entries.get(key)
        if entry is None:
            return None
        self.hits += 1
        self._entries.move_to_end(key)
        return entry.output

    def put(self, key: tuple[str, str], output: Tensor) -> None:
        if key in self._entries:
            return
        self._entries[key] = entry = EncoderEntry(output)
        self.num_bytes += entry.num_bytes
        self._shrink()

    def pin(self, key: tuple[str, str]) -> None:
        """Keeps an entry until `unpin`; the entry must be there."""
        self._entries[key].ref_count += 1

    def unpin(self, key: tuple[str, str]) -> None:
        self._entries[key].ref_count -= 1
        self._shrink()

    def drop_model(self, model: str) -> None:
        for key in [k for k in self._entries if k[0] == model]:
            self.num_bytes -= self._entries.pop(key).num_bytes

    def _shrink(self) -> None:
        for key in list(self._entries):
            if self.num_bytes <= self.budget_bytes:
                return
            if self._entries[key].ref_count == 0:
                self.num_bytes -= self._entries.pop(key).num_bytes

    def check_integrity(self) -> None:
        """Raises AssertionError if the byte count or the pins are wrong; for tests."""
        assert self.num_bytes == sum(e.num_bytes for e in self._entries.values())
        assert all(e.ref_count >= 0 for e in self._entries.values())
        unpinned = sum(e.num_bytes for e in self._entries.values() if e.ref_count == 0)
        assert self.num_bytes <= self.budget_bytes or unpinned == 0
