"""Decides what the next step computes: one rule for prefill, chunked prefill and decode.

Every sequence has tokens that are not computed yet; a step gives each of them, in order of service, as
many as the token budget allows. Running requests go first, then waiting ones are admitted. When the arena
is full, the running request that is last in order gives its pages back and is computed again later.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from .block_pool import BlockPool, NoFreeBlocks
from .config import EngineConfig
from .encoder_cache import EncoderCache
from .kv_cache_manager import CacheGroups, KVCacheManager
from .request import Request, RequestStatus, Sequence


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
    """Owner of the queues."""

    def __init__(self, config: EngineConfig, pool: BlockPool, encoder_cache: EncoderCache) -> None:
        self.config = config
        self.pool = pool
        self.encoder_cache = encoder_cache
        self.kv = KVCacheManager(pool, config.prefix_caching)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.unservable: list[Request] = []  # could not be admitted into an empty arena; the engine ends them
        self.num_preemptions = 0

    @property
    def groups(self) -> dict[str, CacheGroups]:
        return self.kv.groups

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
            return (
                f"{request.width} sequences were asked for; --max-num-seqs allows {self.config.max_num_seqs}"
            )
        slabs = self.kv.slabs_needed(request, longest, self.config.max_num_batched_tokens)
        if slabs > self.pool.num_slabs:
            return "the request needs more cache than --kv-cache-mb gives"
        return None

    def add(self, request: Request) -> None:
        request.sequences = [request.first_sequence()]
        self.waiting.append(request)

    def finish(self, request: Request) -> None:
        """Takes a request out, whether done or aborted, and frees its pages."""
        self.kv.release_request(request)
        queue = self.running if request.status is RequestStatus.RUNNING else self.waiting
        if request.status is not RequestStatus.FINISHED:
            queue.remove(request)
        request.status = RequestStatus.FINISHED

    def preempt(self, request: Request) -> None:
        """Frees a running request's pages; it waits and is computed again from its known tokens."""
        self.kv.release_request(request)
        self.running.remove(request)
        request.status = RequestStatus.WAITING
        request.alignment.clear()
        request.pooled = None
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
            if request.width + self._reserve(request) > seats:
                break
            item = request.encoder_item
            cost = 0
            if item is not None and not self.kv.has_cross(request):
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
                count = min(sequence.num_uncomputed, budget)
                if count > 0:
                    budget -= count
                    output.sequences.append(ScheduledSequence(sequence, count))
        return list(outputs.values())

    def _next_waiting(self) -> Request:
        """Priority first; then whose owner has the least running, so that no one waits behind a long file."""
        running = Counter(id(r.owner) for r in self.running)
        return min(self.waiting, key=lambda r: (r.priority, running[id(r.owner)], r.arrival))

    def _reserve(self, request: Request) -> int:
        """Seats that an owner who runs something already must leave free for those who come next.

        A seat is held for a whole window of speech or answer: without this, whoever comes while a long file
        holds all of them waits for one to end.
        """
        has_running = any(r.owner is request.owner for r in self.running)
        return self.config.max_num_seqs // 4 if has_running else 0

    def _grow(self, planned: ScheduledSequence, scheduled: set[Request]) -> bool:
        """Gives a running sequence the pages it needs, preempting requests that are not in this step yet.

        Returns False if the request itself had to give way.
        """
        while True:
            try:
                self.kv.grow(planned.sequence, planned.end)
                return True
            except NoFreeBlocks:
                victim = max((r for r in self.running if r not in scheduled), key=lambda r: r.rank)
                self.preempt(victim)
                if not self.running:
                    self._forget_everything()
                if victim is planned.sequence.request:
                    return False

    def _forget_everything(self) -> None:
        """Drops all cached content. Only while nothing runs: then the whole arena is free afterwards."""
        for group in self.pool.groups:
            self.pool.forget(group)

    def _admit(self, request: Request, budget: int) -> bool | None:
        """Moves a waiting request to running with its first pages.

        Returns None if the arena has no room now, else whether its cross pages are new (to be filled).
        """
        fresh = False
        try:
            fresh = self.kv.take_cross(request)
            for sequence in request.sequences:
                self.kv.reuse_prefix(sequence)
                end = sequence.num_computed + min(sequence.num_uncomputed, budget)
                budget -= end - sequence.num_computed
                # Who runs already will need a page each soon: do not admit into their way.
                if self.running and not self.kv.room_to_admit(sequence, end, len(self.running)):
                    raise NoFreeBlocks
                self.kv.grow(sequence, end)
        except NoFreeBlocks:
            if fresh:
                self.kv.unname_cross(request)
            self.kv.release_request(request)
            return None
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.sequences[0].num_computed
        self.waiting.remove(request)
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        return fresh

    # -- after a step ---------------------------------------------------------------------------------

    def fork(self, parent: Sequence, index: int) -> Sequence:
        """A further sequence of a request, with the parent's tokens and (shared) pages."""
        child = parent.branch(index)
        self.kv.fork(parent, child)
        return child

    def check_integrity(self) -> None:
        """Raises AssertionError unless the queues, pages and caches agree; for tests."""
        self.kv.check_integrity([*self.running, *self.waiting])
        assert all(r.status is RequestStatus.WAITING for r in self.waiting)
        assert all(r.status is RequestStatus.RUNNING for r in self.running)
        assert sum(r.width for r in self.running) <= self.config.max_num_seqs
        self.encoder_cache.check_integrity()
