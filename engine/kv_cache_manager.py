"""Which pages each sequence holds: taking, sharing, giving back, over every layer group of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from ..models.base import KVCacheSpec
from .block_pool import BLOCK_SIZE, Block, BlockPool, CacheConfigError, LayerGroup, NoFreeBlocks
from .request import Request, Sequence


@dataclass
class CacheGroups:
    """The registered layer groups of one model, by kind."""

    spec: KVCacheSpec
    paged: dict[str, LayerGroup]
    states: dict[str, LayerGroup]
    cross: LayerGroup | None = None

    @classmethod
    def register(cls, pool: BlockPool, model: str, spec: KVCacheSpec) -> CacheGroups:
        """Registers every group of a model. Raises CacheConfigError."""
        registered: dict[str, LayerGroup] = {}
        try:
            for group in spec.groups:
                registered[group.name] = pool.register(model, group)
        except CacheConfigError:
            for done in registered.values():
                pool.unregister(done)
            raise
        return cls(
            spec,
            {g.name: registered[g.name] for g in spec.of_kind("full")},
            {g.name: registered[g.name] for g in spec.of_kind("state")},
            next((registered[g.name] for g in spec.of_kind("cross")), None),
        )

    def all(self) -> list[LayerGroup]:
        return [*self.paged.values(), *self.states.values(), *([self.cross] if self.cross else [])]


class KVCacheManager:
    """Gives sequences their pages. Every method is called from the engine's thread only."""

    def __init__(self, pool: BlockPool, prefix_caching: bool) -> None:
        self.pool = pool
        self.prefix_caching = prefix_caching
        self.groups: dict[str, CacheGroups] = {}
        self.prefix_queries = 0  # tokens
        self.prefix_hits = 0

    # -- what a request could need --------------------------------------------------------------------

    def slabs_needed(self, request: Request, tokens: int, step_tokens: int) -> int:
        """Slabs that hold the request at its longest, in an otherwise empty arena."""
        groups = self.groups[request.model]
        slabs = 0
        for group in groups.paged.values():
            longest = tokens
            if group.spec.window is not None:
                longest = min(tokens, group.spec.window + step_tokens + 2 * BLOCK_SIZE)
            slabs += -(-(_pages(longest) * request.width) // group.blocks_per_slab)
        for group in groups.states.values():
            slabs += -(-(group.spec.num_layers * request.width) // group.blocks_per_slab)
        if groups.cross and request.encoder_item:
            slabs += -(-groups.cross.spec.num_layers // groups.cross.blocks_per_slab)
        return slabs

    # -- encoder items --------------------------------------------------------------------------------

    def has_cross(self, request: Request) -> bool:
        cross, item = self.groups[request.model].cross, request.encoder_item
        return bool(cross and item and self.pool.lookup(cross, item.mm_hash))

    def take_cross(self, request: Request) -> bool:
        """Gives the request the pages of its encoder item. Returns whether they are new, to be filled.

        Raises NoFreeBlocks.
        """
        cross, item = self.groups[request.model].cross, request.encoder_item
        if cross is None or item is None:
            return False
        found = self.pool.lookup(cross, item.mm_hash)
        if found is not None:
            self.pool.share(cross, found)
            request.cross_blocks = list(found)
            return False
        request.cross_blocks = self.pool.allocate(cross, cross.spec.num_layers)
        # Named before they are filled: all sharers admitted in this step read them after the fill.
        self.pool.name(cross, item.mm_hash, request.cross_blocks)
        return True

    def unname_cross(self, request: Request) -> None:
        """Takes back the name of cross pages that were never written."""
        cross = self.groups[request.model].cross
        if cross is not None and request.cross_blocks:
            self.pool.unname(cross, request.cross_blocks[0])

    # -- a sequence's pages ---------------------------------------------------------------------------

    def grow(self, sequence: Sequence, end: int) -> None:
        """Gives a sequence the pages for its tokens up to `end`. Raises NoFreeBlocks; what it got it keeps."""
        groups = self.groups[sequence.request.model]
        for name, group in groups.paged.items():
            pages = sequence.pages.setdefault(name, [])
            needed = _pages(end) - len(pages)
            if needed > 0:
                last = pages[-1] if pages else None
                pages.extend(self.pool.allocate(group, needed, after=last))
        for name, group in groups.states.items():
            if name not in sequence.states:
                sequence.states[name] = self.pool.allocate(group, group.spec.num_layers)

    def room_to_admit(self, sequence: Sequence, end: int, spare: int) -> bool:
        """Whether pages up to `end` can be had so that `spare` pages of each group are left."""
        for name, group in self.groups[sequence.request.model].paged.items():
            needed = _pages(end) - len(sequence.pages.get(name, ()))
            if self.pool.num_available(group) < needed + spare:
                return False
        return True

    def release(self, sequence: Sequence) -> None:
        """Takes all pages of a sequence; it has nothing computed any more."""
        groups = self.groups[sequence.request.model]
        for name, pages in sequence.pages.items():
            self.pool.release(groups.paged[name], [page for page in pages if page is not None])
        for name, blocks in sequence.states.items():
            self.pool.release(groups.states[name], blocks)
        sequence.pages = {}
        sequence.states = {}
        sequence.num_computed = 0
        sequence.waiting_logprobs = None

    def release_request(self, request: Request) -> None:
        for sequence in request.sequences:
            self.release(sequence)
        cross = self.groups[request.model].cross
        if cross is not None and request.cross_blocks:
            self.pool.release(cross, request.cross_blocks)
            request.cross_blocks = []

    def reuse_prefix(self, sequence: Sequence) -> None:
        """Takes over pages of earlier requests that began with the same tokens."""
        request = sequence.request
        groups = self.groups[request.model]
        # A recurrent state exists at the end of a sequence only, so its prefixes cannot be taken over.
        if not self.prefix_caching or groups.states or request.params.needs_whole_prompt:
            return
        sequence.hash_blocks(request.hash_seed)
        # The last token is always computed, and so is every position whose logits are asked for.
        limit = sequence.num_tokens - 1
        probe = request.params.probe
        if probe is not None:
            limit = min([limit, *(p for p in probe.positions if p not in request.probe_rows)])
        keys = sequence.block_hashes[: limit // BLOCK_SIZE]
        self.prefix_queries += limit
        count = self._longest_prefix(groups, keys)
        if count == 0:
            return
        for name, group in groups.paged.items():
            first = _first_page(count * BLOCK_SIZE, group.spec.window)
            pages: list[Block | None] = [None] * first
            for key in keys[first:count]:
                found = self.pool.lookup(group, key)
                assert found is not None
                self.pool.share(group, found)
                pages += found
            sequence.pages[name] = pages
        sequence.num_computed = count * BLOCK_SIZE
        self.prefix_hits += sequence.num_computed

    def _longest_prefix(self, groups: CacheGroups, keys: list[bytes]) -> int:
        """How many leading pages are cached in every group, as far back as its window looks."""
        count = len(keys)
        for group in groups.paged.values():
            if group.spec.window is None:
                missing = (i for i, key in enumerate(keys[:count]) if self.pool.lookup(group, key) is None)
                count = next(missing, count)
        windowed = [group for group in groups.paged.values() if group.spec.window is not None]
        while count and not all(self._window_cached(group, keys, count) for group in windowed):
            count -= 1
        return count

    def _window_cached(self, group: LayerGroup, keys: list[bytes], count: int) -> bool:
        first = _first_page(count * BLOCK_SIZE, group.spec.window)
        return all(self.pool.lookup(group, key) is not None for key in keys[first:count])

    def advance(self, sequence: Sequence, end: int) -> None:
        """Counts tokens up to `end` as computed: full pages become findable, pages behind a window free."""
        groups = self.groups[sequence.request.model]
        before, after = sequence.num_computed // BLOCK_SIZE, end // BLOCK_SIZE
        sequence.num_computed = end
        if self.prefix_caching and after > before and not groups.states:
            sequence.hash_blocks(sequence.request.hash_seed)
            for name, group in groups.paged.items():
                for index in range(before, after):
                    page = sequence.pages[name][index]
                    if page is not None:
                        self.pool.name(group, sequence.block_hashes[index], (page,))
        for name, group in groups.paged.items():
            if group.spec.window is not None:
                pages = sequence.pages[name]
                for index in range(_first_page(end, group.spec.window) - 1, -1, -1):
                    page = pages[index]
                    if page is None:
                        break
                    self.pool.release(group, (page,))
                    pages[index] = None

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Gives a new sequence with its parent's tokens the parent's pages: full ones shared, the last copied.

        Where there is no room for a copy, the child is left with less computed and catches up later.
        """
        groups = self.groups[parent.request.model]
        full, tail = divmod(parent.num_computed, BLOCK_SIZE)
        try:
            for name, group in groups.states.items():
                child.states[name] = self.pool.allocate(group, group.spec.num_layers)
                for source, target in zip(parent.states[name], child.states[name], strict=True):
                    self.pool.copy(group, source, target)
            for name, group in groups.paged.items():
                pages = parent.pages[name][:full]
                self.pool.share(group, [page for page in pages if page is not None])
                child.pages[name] = pages
            child.num_computed = full * BLOCK_SIZE
            if tail:
                for name, group in groups.paged.items():
                    source_page = parent.pages[name][full]
                    assert source_page is not None
                    pages = child.pages[name]
                    (copy,) = self.pool.allocate(group, 1, after=pages[-1] if pages else None)
                    self.pool.copy(group, source_page, copy)
                    pages.append(copy)
                child.num_computed = parent.num_computed
        except NoFreeBlocks:
            if groups.states:
                self.release(child)  # a state cannot be rewound to a page's end

    # -- truth ----------------------------------------------------------------------------------------

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raises AssertionError unless every page reference belongs to exactly one holder; for tests."""
        held: Counter[Block] = Counter()
        for request in requests:
            held.update(request.cross_blocks)
            for sequence in request.sequences:
                for pages in sequence.pages.values():
                    held.update(page for page in pages if page is not None)
                    assert sequence.num_computed <= len(pages) * BLOCK_SIZE
                for blocks in sequence.states.values():
                    held.update(blocks)
                assert sequence.num_computed <= sequence.num_tokens
        for group in self.pool.groups:
            for blocks in group.slabs.values():
                for block in blocks:
                    assert block.ref_count == held.pop(block, 0), (
                        "a page is held by nobody or counted wrongly"
                    )
        assert not held
        self.pool.check_integrity()


def _pages(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)


def _first_page(num_computed: int, window: int | None) -> int:
    """The first page that a query at position num_computed, or behind it, can still see."""
    if window is None:
        return 0
    return max(0, num_computed - window + 1) // BLOCK_SIZE
