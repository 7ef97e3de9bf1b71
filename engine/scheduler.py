"""Decides what the next step computes: one rule for prefill, chunked prefill and decode.

Every sequence has tokens that are not computed yet; a step gives each of them, in order of service, as
many as the token budget allows. Running requests go first, then waiting ones are admitted. When the arena
is full, the running request that is last in order gives its pages back and is computed again later.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ..models.base import KVCacheSpec
from .block_pool import BLOCK_SIZE, Block, BlockPool, LayerGroup, NoFreeBlocks
from .config import EngineConfig
from .encoder_cache import EncoderCache
from .request import Request, RequestStatus, Sequence


@dataclass
class CacheGroups:
    """The registered layer groups of one model; `cross_needed` are the blocks of one encoder item."""

    spec: KVCacheSpec
    full: LayerGroup
    cross: LayerGroup | None = None

    @property
    def cross_needed(self) -> int:
        return self.cross.spec.num_layers if self.cross else 0


@dataclass
class ScheduledSequence:
    """`num_tokens` tokens of a sequence, from its num_computed on, are computed in this step."""

    sequence: Sequence
    num_tokens: int

    @property
    def end(self) -> int:
        return self.sequence.num_computed + self.num_tokens


@dataclass
class SchedulerOutput:
    """One model's share of a step. encoder_requests: their cross pages are new and must be filled."""

    model: str
    sequences: list[ScheduledSequence] = field(default_factory=list)
    encoder_requests: list[Request] = field(default_factory=list)


class Scheduler:
    """Owner of the queues and of which request holds which pages."""

    def __init__(self, config: EngineConfig, pool: BlockPool, encoder_cache: EncoderCache) -> None:
        self.config = config
        self.pool = pool
        self.encoder_cache = encoder_cache
        self.groups: dict[str, CacheGroups] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.unservable: list[Request] = []  # could not be admitted into an empty arena; the engine ends them
        self.num_preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0

    @property
    def has_requests(self) -> bool:
        return bool(self.running or self.waiting)

    # -- entry and exit -------------------------------------------------------------------------------

    def refusal(self, request: Request) -> str | None:
        """Why this request could never run here, or None."""
        groups = self.groups[request.model]
        prompt, params = len(request.work.inputs.prompt_token_ids), request.params
        if prompt < 1:
            return "the prompt is empty"
        longest = prompt + max(params.max_tokens - 1, 0)  # the last sampled token is never fed back
        if longest > groups.spec.max_model_len:
            return f"prompt and output need {longest} positions; the model has {groups.spec.max_model_len}"
        if request.width > self.config.max_num_seqs:
            return f"{request.width} sequences were asked for; --max-num-seqs allows {self.config.max_num_seqs}"
        pages = -(-longest // BLOCK_SIZE) * request.width
        slabs = -(-pages // groups.full.blocks_per_slab)
        if groups.cross:
            slabs += -(-groups.cross_needed // groups.cross.blocks_per_slab)
        if slabs > self.pool.num_slabs:
            return "the request needs more cache than --kv-cache-mb gives"
        return None

    def add(self, request: Request) -> None:
        request.sequences = [request.first_sequence()]
        self.waiting.append(request)

    def finish(self, request: Request) -> None:
        """Takes a request out, whether done or aborted, and frees its pages."""
        self._release_pages(request)
        queue = self.running if request.status is RequestStatus.RUNNING else self.waiting
        if request.status is not RequestStatus.FINISHED:
            queue.remove(request)
        request.status = RequestStatus.FINISHED

    def _release_pages(self, request: Request) -> None:
        groups = self.groups[request.model]
        for sequence in request.sequences:
            self.release_sequence(sequence)
        if groups.cross and request.cross_blocks:
            self.pool.release(groups.cross, request.cross_blocks)
            request.cross_blocks = []

    def release_sequence(self, sequence: Sequence) -> None:
        self.pool.release(self.groups[sequence.request.model].full, sequence.blocks)
        sequence.blocks = []
        sequence.num_computed = 0
        sequence.logprobs = None

    def preempt(self, request: Request) -> None:
        """Frees a running request's pages; it waits and is computed again from its known tokens."""
        self._release_pages(request)
        self.running.remove(request)
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        request.alignment.clear()
        self.waiting.append(request)
        self.num_preemptions += 1

    # -- a step ---------------------------------------------------------------------------------------

    def schedule(self) -> list[SchedulerOutput]:
        """Plans one step; returns the share of each model that has work."""
        outputs: dict[str, SchedulerOutput] = {}
        budget = self.config.max_num_batched_tokens
        scheduled: set[Request] = set()

        preemptions = self.num_preemptions
        self.running.sort(key=lambda r: r.rank)
        for request in list(self.running):
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted for one before it
            planned = []
            for sequence in request.sequences:
                count = min(sequence.num_uncomputed, budget)
                if count > 0:
                    planned.append(ScheduledSequence(sequence, count))
                    budget -= count
            if planned and all(self._grow(p, scheduled) for p in planned):
                scheduled.add(request)
                output = outputs.setdefault(request.model, SchedulerOutput(request.model))
                output.sequences += planned
        if self.num_preemptions > preemptions:
            return list(outputs.values())  # who was just put out must not come straight back in

        encoder_budget = self.config.max_num_encoder_tokens
        seats = self.config.max_num_seqs - sum(r.width for r in self.running)
        while self.waiting and budget > 0:
            request = self._next_waiting()
            if request.width > seats:
                break
            item = request.encoder_item
            cost = 0
            if item is not None and not self._has_cross(request):
                in_cache = (request.model, item.mm_hash) in self.encoder_cache
                cost = 0 if in_cache else item.num_embeds
            # An item larger than the whole budget runs alone rather than never.
            if cost > encoder_budget and encoder_budget < self.config.max_num_encoder_tokens:
                break
            fresh_cross = self._admit(request, budget)
            if fresh_cross is None and not self.running:
                # Cached pages that lie scattered can keep a slab from everyone: start from an empty arena.
                self._forget_everything()
                fresh_cross = self._admit(request, budget)
                if fresh_cross is None:
                    self.unservable.append(request)
                    break
            if fresh_cross is None:
                break
            encoder_budget -= cost
            output = outputs.setdefault(request.model, SchedulerOutput(request.model))
            if fresh_cross:
                output.encoder_requests.append(request)
            seats -= request.width
            for sequence in request.sequences:
                count = min(sequence.num_uncomputed, budget, len(sequence.blocks) * BLOCK_SIZE - sequence.num_computed)
                if count > 0:
                    budget -= count
                    output.sequences.append(ScheduledSequence(sequence, count))
        return list(outputs.values())

    def _next_waiting(self) -> Request:
        """Priority first; then whose owner has the least running, so that no one waits behind a long file."""
        running = Counter(id(r.owner) for r in self.running)
        return min(self.waiting, key=lambda r: (r.priority, running[id(r.owner)], r.arrival))

    def _grow(self, planned: ScheduledSequence, scheduled: set[Request]) -> bool:
        """Gives a running sequence the pages it needs, preempting requests that are not in this step yet.

        Returns False if the request itself had to give way.
        """
        sequence = planned.sequence
        group = self.groups[sequence.request.model].full
        needed = -(-planned.end // BLOCK_SIZE) - len(sequence.blocks)
        while needed > 0:
            try:
                last = sequence.blocks[-1] if sequence.blocks else None
                sequence.blocks += self.pool.allocate(group, needed, after=last)
                return True
            except NoFreeBlocks:
                victim = max((r for r in self.running if r not in scheduled), key=lambda r: r.rank)
                self.preempt(victim)
                if not self.running:
                    self._forget_everything()
                if victim is sequence.request:
                    return False
        return True

    def _forget_everything(self) -> None:
        """Drops all cached content. Only while nothing runs: then the whole arena is free afterwards."""
        for group in self.pool.groups:
            self.pool.forget(group)

    def _has_cross(self, request: Request) -> bool:
        groups, item = self.groups[request.model], request.encoder_item
        return bool(groups.cross and item and self.pool.lookup(groups.cross, item.mm_hash))

    def _admit(self, request: Request, budget: int) -> bool | None:
        """Moves a waiting request to running with its first pages.

        Returns None if the arena has no room now, else whether its cross pages are new (to be filled).
        """
        groups, item = self.groups[request.model], request.encoder_item
        fresh = False
        cross: list[Block] = []
        try:
            if groups.cross is not None and item is not None:
                found = self.pool.lookup(groups.cross, item.mm_hash)
                if found is not None:
                    cross = list(found)
                    self.pool.share(groups.cross, cross)
                else:
                    cross = self.pool.allocate(groups.cross, groups.cross_needed)
                    # Named before it is filled: all sharers admitted in this step read it after the fill.
                    self.pool.name(groups.cross, item.mm_hash, cross)
                    fresh = True
            request.cross_blocks = cross
            for sequence in request.sequences:
                self._reuse_prefix(sequence)
                count = min(sequence.num_uncomputed, budget)
                needed = -(-(sequence.num_computed + count) // BLOCK_SIZE) - len(sequence.blocks)
                # Who runs already will need a page each soon: do not admit into their way.
                if self.running and self.pool.num_available(groups.full) < needed + len(self.running):
                    raise NoFreeBlocks
                last = sequence.blocks[-1] if sequence.blocks else None
                sequence.blocks += self.pool.allocate(groups.full, max(needed, 0), after=last)
        except NoFreeBlocks:
            if fresh and groups.cross is not None and cross:
                self.pool.unname(groups.cross, cross[0])
            self._release_pages(request)
            return None
        self.waiting.remove(request)
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        return fresh

    def _reuse_prefix(self, sequence: Sequence) -> None:
        """Takes over pages of earlier requests that began with the same tokens."""
        request = sequence.request
        if not self.config.prefix_caching or request.params.alignment_heads:
            return
        group = self.groups[request.model].full
        sequence.hash_blocks(request.hash_seed)
        # The last token is always computed, and so is every position whose logits are asked for.
        limit = sequence.num_tokens - 1
        probe = request.params.probe
        if probe is not None:
            limit = min([limit, *(p for p in probe.positions if p not in request.probe_rows)])
        for key in sequence.block_hashes[: limit // BLOCK_SIZE]:
            self.prefix_queries += 1
            blocks = self.pool.lookup(group, key)
            if blocks is None:
                break
            self.prefix_hits += 1
            self.pool.share(group, blocks)
            sequence.blocks += blocks
            sequence.num_computed += BLOCK_SIZE

    # -- after a step ---------------------------------------------------------------------------------

    def advance(self, scheduled: ScheduledSequence) -> None:
        """Counts tokens as computed and makes the pages that became full findable."""
        sequence = scheduled.sequence
        before = sequence.num_computed // BLOCK_SIZE
        sequence.num_computed = scheduled.end
        full = sequence.num_computed // BLOCK_SIZE
        if not self.config.prefix_caching or full == before:
            return
        sequence.hash_blocks(sequence.request.hash_seed)
        group = self.groups[sequence.request.model].full
        for index in range(before, full):
            self.pool.name(group, sequence.block_hashes[index], (sequence.blocks[index],))

    def fork(self, parent: Sequence) -> Sequence:
        """A second sequence with the same tokens: full pages are shared, the last one is copied."""
        request = parent.request
        group = self.groups[request.model].full
        child = Sequence(request, list(parent.token_ids), parent.num_prompt)
        child.cumulative_logprob = parent.cumulative_logprob
        child.block_hashes = list(parent.block_hashes)
        full = parent.num_computed // BLOCK_SIZE
        child.blocks = parent.blocks[:full]
        self.pool.share(group, child.blocks)
        child.num_computed = full * BLOCK_SIZE
        if parent.num_computed > child.num_computed:
            last = child.blocks[-1] if child.blocks else None
            try:
                (block,) = self.pool.allocate(group, 1, after=last)
            except NoFreeBlocks:
                return child  # no page to copy into: the tail is computed again when there is room
            self.pool.copy(group, parent.blocks[full], block)
            child.blocks.append(block)
            child.num_computed = parent.num_computed
        return child

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page reference belongs to exactly one holder; for tests."""
        held: Counter[Block] = Counter()
        for request in [*self.running, *self.waiting]:
            held.update(request.cross_blocks)
            for sequence in request.sequences:
                held.update(sequence.blocks)
                assert sequence.num_computed <= len(sequence.blocks) * BLOCK_SIZE
                assert sequence.num_computed <= sequence.num_tokens
        for group in self.pool.groups:
            for blocks in group.slabs.values():
                for block in blocks:
                    assert block.ref_count == held.pop(block, 0), "a page is held by nobody or counted wrongly"
        assert not held
        assert all(r.status is RequestStatus.WAITING for r in self.waiting)
        assert all(r.status is RequestStatus.RUNNING for r in self.running)
        assert sum(r.width for r in self.running) <= self.config.max_num_seqs
        self.pool.check_integrity()
        self.encoder_cache.check_integrity()
