"""Drives a model over paged caches without an engine: pages in random order, freed behind the window.

Every cell of a cache that holds no key is NaN, so that reading one spoils the result.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from sensorium.kernels.attention import AttentionMetadata, ForwardContext, StateMetadata
from sensorium.models.base import KVGroupSpec, Model
from torch import Tensor

PAGE = 16
SLABS = 3


@dataclass
class Pages:
    """The cache of one paged group and who owns its pages; a page is (slab, index)."""

    spec: KVGroupSpec
    cache: Tensor
    free: list[tuple[int, int]]
    tables: dict[str, list[tuple[int, int] | None]] = field(default_factory=dict)


class PagedHarness:
    """Sequences by name; `run` feeds each some tokens and returns the logits of all of them."""

    def __init__(self, model: Model, pages: int = 96, seed: int = 0) -> None:
        self.model = model
        self.lengths: dict[str, int] = {}
        self.random = random.Random(seed)
        self.paged = [self._pages(g, pages) for g in model.kv_cache_spec.of_kind("full")]
        self.states = {
            g.name: torch.full((1, 64, g.state_size), float("nan"))
            for g in model.kv_cache_spec.of_kind("state")
        }
        self.state_layers = {g.name: g.num_layers for g in model.kv_cache_spec.of_kind("state")}

    def _pages(self, spec: KVGroupSpec, pages: int) -> Pages:
        free = [(slab, index) for slab in range(SLABS) for index in range(pages // SLABS)]
        self.random.shuffle(free)
        planes = 1 if spec.latent else 2
        shape = (SLABS, pages // SLABS * PAGE, spec.num_layers, planes, spec.num_kv_heads, spec.head_dim)
        return Pages(spec, torch.full(shape, float("nan"), dtype=spec.dtype), free)

    @torch.no_grad()
    def run(self, batch: Sequence[tuple[str, Sequence[int]]]) -> list[Tensor]:
        """One step. batch: (sequence, its next tokens). Returns float32 [tokens, vocab] for each."""
        begins = [self.lengths.get(name, 0) for name, _ in batch]
        ends = [begin + len(ids) for begin, (_, ids) in zip(begins, batch, strict=True)]
        starts = [0]
        for _, ids in batch:
            starts.append(starts[-1] + len(ids))
        names = [name for name, _ in batch]
        attn = {pages.spec.name: self._attend(pages, names, begins, ends, starts) for pages in self.paged}
        states = {group: self._states(group, names, begins, starts) for group in self.states}
        ids = torch.tensor([token for _, tokens in batch for token in tokens])
        positions = torch.cat([torch.arange(b, e) for b, e in zip(begins, ends, strict=True)])
        hidden = self.model.forward(ids, positions, ForwardContext(attn, None, states))
        self.lengths |= dict(zip(names, ends, strict=True))
        logits = self.model.compute_logits(hidden)
        return [logits[first:last] for first, last in pairwise(starts)]

    def _attend(
        self, pages: Pages, names: list[str], begins: list[int], ends: list[int], starts: list[int]
    ) -> AttentionMetadata:
        slabs, rows, runs, first_keys = [], [], [], []
        for name, begin, end in zip(names, begins, ends, strict=True):
            table = pages.tables.setdefault(name, [])
            first_page = self._drop_behind_window(pages, table, begin)
            while len(table) * PAGE < end:
                table.append(pages.free.pop())
            for position in range(begin, end):
                slab, index = self._owned(table, position // PAGE)
                slabs.append(slab)
                rows.append(index * PAGE + position % PAGE)
            stretches: list[tuple[int, int, int]] = []
            for page in range(first_page, len(table)):
                slab, index = self._owned(table, page)
                first, last = index * PAGE, index * PAGE + min(PAGE, end - page * PAGE)
                if stretches and stretches[-1][0] == slab and stretches[-1][2] == first:
                    stretches[-1] = (slab, stretches[-1][1], last)
                else:
                    stretches.append((slab, first, last))
            runs.append(stretches)
            first_keys.append(first_page * PAGE)
        return AttentionMetadata(
            cache=pages.cache,
            query_start_loc=starts,
            seq_lens=ends,
            slot_slabs=torch.tensor(slabs),
            slot_rows=torch.tensor(rows),
            runs=runs,
            first_keys=first_keys,
            window=pages.spec.window,
        )

    def _drop_behind_window(self, pages: Pages, table: list[tuple[int, int] | None], begin: int) -> int:
        """Gives back the pages that no query from `begin` on can see; returns the first one kept."""
        if pages.spec.window is None:
            return 0
        kept = max(0, begin - pages.spec.window + 1) // PAGE
        for page in range(min(kept, len(table))):
            if (owned := table[page]) is not None:
                slab, index = owned
                pages.cache[slab, index * PAGE : (index + 1) * PAGE] = float("nan")
                pages.free.insert(self.random.randrange(len(pages.free) + 1), owned)
                table[page] = None
        return kept

    @staticmethod
    def _owned(table: list[tuple[int, int] | None], page: int) -> tuple[int, int]:
        owned = table[page]
        assert owned is not None, "a page behind the window is wanted again"
        return owned

    def _states(self, group: str, names: list[str], begins: list[int], starts: list[int]) -> StateMetadata:
        """Blocks in the order of the sequences' names' first use, layers scattered."""
        layers = self.state_layers[group]
        known = [name for name in self.lengths if name not in names] + names
        order = list(dict.fromkeys([*self.lengths, *known]))
        stride = self.states[group].shape[1] // layers
        blocks = [[(0, layer * stride + order.index(name)) for layer in range(layers)] for name in names]
        return StateMetadata(self.states[group], starts, blocks, [begin == 0 for begin in begins])

    def free(self, name: str) -> None:
        """Forgets a sequence and spoils its pages."""
        for pages in self.paged:
            for owned in pages.tables.pop(name, []):
                if owned is not None:
                    slab, index = owned
                    pages.cache[slab, index * PAGE : (index + 1) * PAGE] = float("nan")
                    pages.free.append(owned)
        self.lengths.pop(name)

    def greedy(self, name: str, prompt: Sequence[int], steps: int) -> list[int]:
        """The likeliest continuation, a token a step."""
        return [token for token, _ in self.greedy_margins(name, prompt, steps)]

    def greedy_margins(self, name: str, prompt: Sequence[int], steps: int) -> list[tuple[int, float]]:
        """The likeliest continuation, and by how much each token's logit beats the next best."""
        found: list[tuple[int, float]] = []
        feed = list(prompt)
        for _ in range(steps):
            best = self.run([(name, feed)])[0][-1].topk(2)
            found.append((int(best.indices[0]), float(best.values[0] - best.values[1])))
            feed = [found[-1][0]]
        return found
