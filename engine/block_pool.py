"""One arena for every cached key and value of every model.

The arena is a single byte buffer of equal slabs. A slab is lent to one layer group of one model and cut
into that group's blocks; memory moves between models by slab. Blocks are reference-counted. A freed block
whose content has a name (a hash key) stays findable until its memory is needed, least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from ..models.base import KVGroupSpec

BLOCK_SIZE = 16  # tokens in a block of a "full" group


class NoFreeBlocks(Exception):
    """The arena cannot give as many blocks as were asked for, even after evicting all that is unused."""


class CacheConfigError(ValueError):
    """A model's blocks do not fit the arena; the text is one line for users."""


@dataclass(eq=False, slots=True)
class Block:
    """A piece of one slab. `index` counts blocks within the slab; ref_count 0 means free or evictable."""

    slab: int
    index: int
    ref_count: int = 0
    entry: CacheEntry | None = None


@dataclass(eq=False, slots=True)
class CacheEntry:
    """Named content: the blocks under one key live and are evicted together."""

    key: Hashable
    blocks: tuple[Block, ...]
    last_used: int = 0

    @property
    def evictable(self) -> bool:
        return all(b.ref_count == 0 for b in self.blocks)


def block_shape(spec: KVGroupSpec) -> tuple[int, ...]:
    """The tensor shape of one block of a group (see KVGroupSpec)."""
    if spec.kind == "cross":
        return (2, spec.num_kv_heads, spec.encoder_len, spec.head_dim)
    if spec.kind == "state":
        return (spec.state_size,)
    return (BLOCK_SIZE, spec.num_layers, 1 if spec.latent else 2, spec.num_kv_heads, spec.head_dim)


@dataclass(eq=False)
class LayerGroup:
    """A registered group: its view of the arena and its free blocks.

    view: "full": [slabs, blocks per slab x 16, layers, planes, kv_heads, head_dim];
    "cross": [slabs, blocks per slab, 2, kv_heads, encoder_len, head_dim];
    "state": [slabs, blocks per slab, state_size]. All alias the arena.
    """

    model: str
    spec: KVGroupSpec
    blocks_per_slab: int
    view: Tensor
    slabs: dict[int, list[Block]] = field(default_factory=dict)
    free: dict[int, set[int]] = field(default_factory=dict)  # slab → indices of blocks without content
    entries: OrderedDict[Hashable, CacheEntry] = field(default_factory=OrderedDict)
    evictable: OrderedDict[Hashable, CacheEntry] = field(default_factory=OrderedDict)  # oldest first

    @property
    def num_free(self) -> int:
        return sum(len(s) for s in self.free.values())


class BlockPool:
    """Owner of the arena. Every method is called from the engine's thread only."""

    def __init__(
        self,
        arena_bytes: int,
        slab_bytes: int,
        device: torch.device | str = "cpu",
        idle_cross_bytes: int | None = None,
    ) -> None:
        """idle_cross_bytes: encoder items that no one uses are kept up to this size while more memory lies
        untouched; recordings seldom come again, so a process need not grow to the whole arena for them."""
        self.slab_bytes = slab_bytes
        self.idle_cross_bytes = arena_bytes if idle_cross_bytes is None else idle_cross_bytes
        self.num_slabs = arena_bytes // slab_bytes
        if self.num_slabs < 1:
            raise CacheConfigError("--kv-cache-mb must hold at least one slab")
        # torch.empty maps the memory without touching it: pages become resident when first written.
        self.arena = torch.empty(self.num_slabs * slab_bytes, dtype=torch.uint8, device=device)
        self.groups: list[LayerGroup] = []
        self._free_slabs = list(range(self.num_slabs - 1, -1, -1))  # popped from the end: low slabs first
        self._clock = 0
        self.evictions = 0

    # -- groups ---------------------------------------------------------------------------------------

    def register(self, model: str, spec: KVGroupSpec) -> LayerGroup:
        shape = block_shape(spec)
        itemsize = spec.dtype.itemsize
        per_slab = self.slab_bytes // (prod(shape) * itemsize)
        if per_slab < 1:
            need = -(-prod(shape) * itemsize // 2**20)
            raise CacheConfigError(f"model {model} needs --slab-mb {need} or more for its {spec.name} cache")
        # One row of the view is what a slot or a block index addresses: a token, or a whole cross block.
        rows, row_shape = (per_slab * BLOCK_SIZE, shape[1:]) if spec.kind == "full" else (per_slab, shape)
        strides = [prod(row_shape[i + 1 :]) for i in range(len(row_shape))]
        view = self.arena.view(spec.dtype).as_strided(
            (self.num_slabs, rows, *row_shape),
            (self.slab_bytes // itemsize, prod(row_shape), *strides),
        )
        group = LayerGroup(model, spec, per_slab, view)
        self.groups.append(group)
        return group

    def unregister(self, group: LayerGroup) -> None:
        """Takes all slabs of a group back. No block of it may be referenced any more."""
        for entry in list(group.evictable.values()):
            self._drop_entry(group, entry)
        for slab in list(group.slabs):
            self._return_slab_if_free(group, slab)
        if group.slabs:
            raise RuntimeError(f"blocks of {group.model}/{group.spec.name} are still in use")
        self.groups.remove(group)

    # -- blocks ---------------------------------------------------------------------------------------

    def capacity(self, group: LayerGroup) -> int:
        """Blocks that the group could have if it had the whole arena."""
        return self.num_slabs * group.blocks_per_slab

    def num_available(self, group: LayerGroup) -> int:
        """Blocks that `allocate` can give right now, evicting all that is unused."""
        own = group.num_free + sum(len(e.blocks) for e in group.evictable.values())
        lendable = len(self._free_slabs) + sum(
            1 for g in self.groups if g is not group for blocks in g.slabs.values() if _idle(blocks)
        )
        return own + lendable * group.blocks_per_slab

    def allocate(self, group: LayerGroup, count: int, after: Block | None = None) -> list[Block]:
        """Gives `count` blocks with one reference each, all or nothing.

        after: the block that the first one should follow in memory, so that a sequence's pages form long
        contiguous runs. Raises NoFreeBlocks.
        """
        if group.spec.kind == "cross":
            self._trim_idle(group, count)
        if group.num_free + len(self._free_slabs) * group.blocks_per_slab < count:
            if self.num_available(group) < count:
                raise NoFreeBlocks
            self._evict(group, count)
        blocks = []
        for _ in range(count):
            after = self._take(group, after)
            after.ref_count = 1
            blocks.append(after)
        return blocks

    def share(self, group: LayerGroup, blocks: Sequence[Block]) -> None:
        """Adds a reference to blocks that are in use or cached."""
        for block in blocks:
            block.ref_count += 1
            if block.entry is not None:
                group.evictable.pop(block.entry.key, None)

    def release(self, group: LayerGroup, blocks: Sequence[Block]) -> None:
        """Drops one reference a block. Blocks with a name stay findable; the others are free at once."""
        self._clock += 1
        # Last block first: of a chain of pages the tail is then evicted before the head it depends on.
        for block in reversed(blocks):
            if block.ref_count < 1:
                raise RuntimeError("a block was released more often than it was taken")
            block.ref_count -= 1
            if block.ref_count:
                continue
            entry = block.entry
            if entry is None:
                group.free[block.slab].add(block.index)
                self._return_slab_if_free(group, block.slab)
            elif entry.evictable:
                entry.last_used = self._clock
                group.evictable[entry.key] = entry

    # -- content --------------------------------------------------------------------------------------

    def lookup(self, group: LayerGroup, key: Hashable) -> tuple[Block, ...] | None:
        """The blocks that hold this content, or None. The caller must `share` them before anything else."""
        entry = group.entries.get(key)
        return entry.blocks if entry else None

    def name(self, group: LayerGroup, key: Hashable, blocks: Sequence[Block]) -> None:
        """Makes referenced blocks findable under a key; where the key is taken already, nothing changes."""
        if key in group.entries:
            return
        entry = CacheEntry(key, tuple(blocks), self._clock)
        for block in blocks:
            block.entry = entry
        group.entries[key] = entry

    def unname(self, group: LayerGroup, block: Block) -> None:
        """Takes back the name of the entry that a block belongs to: its content was never written."""
        if block.entry is not None:
            self._drop_entry(group, block.entry)

    def copy(self, group: LayerGroup, source: Block, target: Block) -> None:
        """Copies one block's content."""
        rows = BLOCK_SIZE if group.spec.kind == "full" else 1
        view = group.view
        view[target.slab, target.index * rows : (target.index + 1) * rows] = view[
            source.slab, source.index * rows : (source.index + 1) * rows
        ]

    def forget(self, group: LayerGroup) -> None:
        """Drops every name of a group; blocks in use stay valid for who holds them."""
        for entry in list(group.entries.values()):
            self._drop_entry(group, entry)

    # -- inside ---------------------------------------------------------------------------------------

    def _take(self, group: LayerGroup, after: Block | None) -> Block:
        if after is not None and after.index + 1 in group.free.get(after.slab, ()):
            return self._pop(group, after.slab, after.index + 1)
        slab, index = _roomiest_start(group)
        if slab < 0:
            slab, index = self._borrow_slab(group), 0
        return self._pop(group, slab, index)

    def _pop(self, group: LayerGroup, slab: int, index: int) -> Block:
        group.free[slab].remove(index)
        return group.slabs[slab][index]

    def _borrow_slab(self, group: LayerGroup) -> int:
        slab = self._free_slabs.pop()
        group.slabs[slab] = [Block(slab, i) for i in range(group.blocks_per_slab)]
        group.free[slab] = set(range(group.blocks_per_slab))
        return slab

    def _return_slab_if_free(self, group: LayerGroup, slab: int) -> None:
        if len(group.free[slab]) == group.blocks_per_slab:
            del group.free[slab], group.slabs[slab]
            self._free_slabs.append(slab)

    def _drop_entry(self, group: LayerGroup, entry: CacheEntry) -> None:
        del group.entries[entry.key]
        group.evictable.pop(entry.key, None)
        for block in entry.blocks:
            block.entry = None
            if block.ref_count == 0:
                group.free[block.slab].add(block.index)
        for slab in {b.slab for b in entry.blocks}:
            self._return_slab_if_free(group, slab)

    def _trim_idle(self, group: LayerGroup, count: int) -> None:
        """Drops the oldest idle items of a cross group rather than touching fresh memory beside them."""
        block_bytes = prod(block_shape(group.spec)) * group.spec.dtype.itemsize
        while group.num_free < count and group.evictable:
            entry = next(iter(group.evictable.values()))
            idle = sum(len(e.blocks) for e in group.evictable.values()) * block_bytes
            if idle <= self.idle_cross_bytes:
                return
            self._drop_entry(group, entry)
            self.evictions += 1

    def _evict(self, group: LayerGroup, count: int) -> None:
        """Frees the least recently used content, of this group or a whole idle slab of another."""
        while group.num_free + len(self._free_slabs) * group.blocks_per_slab < count:
            own = next(iter(group.evictable.values()), None)
            donor = min(
                (
                    (max((b.entry.last_used for b in blocks if b.entry), default=-1), g, slab)
                    for g in self.groups
                    if g is not group
                    for slab, blocks in g.slabs.items()
                    if _idle(blocks)
                ),
                key=lambda candidate: candidate[0],
                default=None,
            )
            if donor is not None and (own is None or donor[0] < own.last_used):
                _, other, slab = donor
                for entry in {b.entry for b in other.slabs[slab] if b.entry}:
                    self._drop_entry(other, entry)
            elif own is not None:
                self._drop_entry(group, own)
            else:
                raise NoFreeBlocks
            self.evictions += 1

    # -- truth ----------------------------------------------------------------------------------------

    def usage(self) -> float:
        """Share of the arena's slabs that hold a block in use, 0 … 1."""
        busy = sum(1 for g in self.groups for blocks in g.slabs.values() if any(b.ref_count for b in blocks))
        return busy / self.num_slabs

    def check_integrity(self) -> None:
        """Raises AssertionError if any book-keeping contradicts another; for tests."""
        lent = [slab for g in self.groups for slab in g.slabs]
        assert sorted(lent + self._free_slabs) == list(range(self.num_slabs)), "a slab is lost or lent twice"
        for g in self.groups:
            assert set(g.free) == set(g.slabs)
            for slab, blocks in g.slabs.items():
                assert len(g.free[slab]) < g.blocks_per_slab, "an unused slab was not returned"
                for block in blocks:
                    assert block.ref_count >= 0
                    is_free = block.index in g.free[slab]
                    assert is_free == (block.ref_count == 0 and block.entry is None)
                    if block.entry is not None:
                        assert g.entries[block.entry.key] is block.entry
            for key, entry in g.entries.items():
                assert all(b.entry is entry for b in entry.blocks)
                assert (key in g.evictable) == entry.evictable
            assert set(g.evictable) <= set(g.entries)


def _idle(blocks: Sequence[Block]) -> bool:
    """Whether a slab holds nothing in use, nor a part of an entry that is in use elsewhere."""
    return all(b.ref_count == 0 and (b.entry is None or b.entry.evictable) for b in blocks)


def _roomiest_start(group: LayerGroup) -> tuple[int, int]:
    """Where a new run of blocks has the most room to grow: (slab, index), or (-1, 0) if nothing is free.

    A run that starts behind another sequence's last block leaves half of the gap to that sequence.
    """
    best, best_length = (-1, 0), 0
    for slab, indices in group.free.items():
        start = previous = -2
        for index in [*sorted(indices), -1]:
            if index == previous + 1 and index >= 0:
                previous = index
                continue
            length = previous - start + 1
            if start >= 0 and length > best_length:
                best_length = length
                best = (slab, start + (length // 2 if start > 0 else 0))
            start = previous = index
    return best
