"""The arena and its books under arbitrary use."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sensorium.engine.block_pool import (
    BLOCK_SIZE,
    BlockPool,
    CacheConfigError,
    LayerGroup,
    NoFreeBlocks,
    block_shape,
)
from sensorium.models.base import KVGroupSpec

SLAB = 1 << 16
FULL = KVGroupSpec("self", "full", num_layers=2, num_kv_heads=2, head_dim=8, dtype=torch.float32)
WIDE = KVGroupSpec("self", "full", num_layers=3, num_kv_heads=2, head_dim=8, dtype=torch.float32)
CROSS = KVGroupSpec("cross", "cross", 2, 2, 8, torch.float32, encoder_len=100)


def make_pool(slabs: int = 4) -> tuple[BlockPool, list[LayerGroup]]:
    pool = BlockPool(slabs * SLAB, SLAB)
    return pool, [pool.register("a", FULL), pool.register("a", CROSS), pool.register("b", WIDE)]


class PoolMachine(RuleBasedStateMachine):
    """Every block is stamped with its holder's number; nobody's stamp may ever change under the holder."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.groups = make_pool()
        self.held: list[tuple[LayerGroup, list, float]] = []
        self.named: dict[tuple[int, int], float] = {}
        self.stamp = 0.0
        self.next_key = 0

    def write(self, group: LayerGroup, block: object, value: float) -> None:
        self.rows(group, block).fill_(value)

    def rows(self, group: LayerGroup, block) -> torch.Tensor:
        count = 1 if group.spec.kind == "cross" else BLOCK_SIZE
        return group.view[block.slab, block.index * count : (block.index + 1) * count]

    @rule(which=st.integers(0, 2), count=st.integers(1, 12), follow=st.booleans())
    def allocate(self, which: int, count: int, follow: bool) -> None:
        group = self.groups[which]
        available = self.pool.num_available(group)
        after = next((h[1][-1] for h in self.held if h[0] is group), None) if follow else None
        try:
            blocks = self.pool.allocate(group, count, after=after)
        except NoFreeBlocks:
            assert count > available
            return
        assert count <= available
        assert len({(b.slab, b.index) for b in blocks}) == count
        self.stamp += 1
        for block in blocks:
            assert block.ref_count == 1
            assert block.entry is None
            self.write(group, block, self.stamp)
        self.held.append((group, blocks, self.stamp))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        group, blocks, _ = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release(group, blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def name(self, data: st.DataObject) -> None:
        group, blocks, stamp = self.held[data.draw(st.integers(0, len(self.held) - 1))]
        if any(b.entry for b in blocks):
            return
        self.pool.name(group, self.next_key, blocks)
        self.named[self.groups.index(group), self.next_key] = stamp
        self.next_key += 1

    @precondition(lambda self: self.named)
    @rule(data=st.data())
    def reuse(self, data: st.DataObject) -> None:
        which, key = data.draw(st.sampled_from(sorted(self.named)))
        blocks = self.pool.lookup(self.groups[which], key)
        if blocks is None:
            del self.named[which, key]
            return
        self.pool.share(self.groups[which], blocks)
        self.held.append((self.groups[which], list(blocks), self.named[which, key]))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        group, blocks, stamp = self.held[data.draw(st.integers(0, len(self.held) - 1))]
        try:
            (target,) = self.pool.allocate(group, 1)
        except NoFreeBlocks:
            return
        self.pool.copy(group, blocks[0], target)
        self.held.append((group, [target], stamp))

    @rule(which=st.integers(0, 2))
    def forget(self, which: int) -> None:
        self.pool.forget(self.groups[which])
        assert not self.groups[which].entries

    @invariant()
    def books_agree(self) -> None:
        self.pool.check_integrity()
        for group, blocks, stamp in self.held:
            for block in blocks:
                assert bool((self.rows(group, block) == stamp).all()), "a held block was overwritten"

    def teardown(self) -> None:
        for group, blocks, _ in self.held:
            self.pool.release(group, blocks)
        for group in self.groups:
            assert self.pool.num_available(group) == self.pool.capacity(group), "memory was lost"
            self.pool.unregister(group)
        assert self.pool.usage() == 0


PoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase


@pytest.mark.parametrize("spec", [FULL, WIDE, CROSS])
def test_a_groups_view_is_exactly_its_blocks(spec: KVGroupSpec) -> None:
    pool = BlockPool(3 * SLAB, SLAB)
    group = pool.register("m", spec)
    blocks = pool.allocate(group, pool.capacity(group))
    rows = 1 if spec.kind == "cross" else BLOCK_SIZE
    for number, block in enumerate(blocks):
        part = group.view[block.slab, block.index * rows : (block.index + 1) * rows]
        assert tuple(part.shape) == ((1, *block_shape(spec)) if rows == 1 else block_shape(spec))
        part.fill_(number)
    for number, block in enumerate(blocks):
        assert bool((group.view[block.slab, block.index * rows : (block.index + 1) * rows] == number).all())


def test_memory_moves_from_an_idle_model_to_a_busy_one() -> None:
    pool, (full, _, wide) = make_pool()
    taken = pool.allocate(full, pool.capacity(full))
    for number, block in enumerate(taken):
        pool.name(full, number, (block,))
    pool.release(full, taken)
    assert len(pool.allocate(wide, pool.capacity(wide))) == pool.capacity(wide)
    assert all(pool.lookup(full, number) is None for number in range(len(taken)))
    pool.check_integrity()


def test_the_least_recently_used_content_goes_first() -> None:
    pool = BlockPool(SLAB, SLAB)
    group = pool.register("m", FULL)
    first, second, *rest = pool.allocate(group, pool.capacity(group))
    pool.name(group, "old", (first,))
    pool.name(group, "new", (second,))
    pool.release(group, (first,))
    pool.release(group, (second,))
    pool.allocate(group, 1)
    assert pool.lookup(group, "old") is None
    assert pool.lookup(group, "new") is not None
    pool.release(group, rest)


def test_blocks_of_one_sequence_lie_side_by_side() -> None:
    pool = BlockPool(2 * SLAB, SLAB)
    group = pool.register("m", FULL)
    sequences = [pool.allocate(group, 1) for _ in range(2)]
    for _ in range(3):
        for blocks in sequences:
            blocks += pool.allocate(group, 1, after=blocks[-1])
    for blocks in sequences:
        assert [b.index - blocks[0].index for b in blocks] == [0, 1, 2, 3]
        assert len({b.slab for b in blocks}) == 1


def test_a_cache_larger_than_a_slab_is_refused_with_the_flag_to_change() -> None:
    pool = BlockPool(SLAB, SLAB)
    huge = KVGroupSpec("cross", "cross", 1, 8, 64, torch.float32, encoder_len=1500)
    with pytest.raises(CacheConfigError, match="--slab-mb 6"):
        pool.register("m", huge)


def test_untouched_slabs_are_not_resident() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * 4096

    before = resident()
    pool = BlockPool(512 << 20, 16 << 20)
    assert resident() - before < 32 << 20
    assert pool.num_slabs == 32


def test_idle_recordings_do_not_grow_over_untouched_memory() -> None:
    pool = BlockPool(40 * SLAB, SLAB, idle_cross_bytes=4 * SLAB)
    group = pool.register("m", CROSS)
    for number in range(60):
        blocks = pool.allocate(group, 2)
        pool.name(group, number, blocks)
        pool.release(group, blocks)
        pool.check_integrity()
    assert len(group.slabs) <= 6
    assert pool.lookup(group, 59) is not None
    # What is in use may fill everything, whatever idles.
    assert len(pool.allocate(group, pool.capacity(group))) == pool.capacity(group)
