"""The scheduler under random loads: nothing lost, nothing leaked, limits kept, everybody served."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sensorium.engine.block_pool import BLOCK_SIZE, BlockPool
from sensorium.engine.config import EngineConfig
from sensorium.engine.encoder_cache import EncoderCache
from sensorium.engine.kv_cache_manager import CacheGroups
from sensorium.engine.output import OutputProcessor
from sensorium.engine.request import Request
from sensorium.engine.scheduler import ScheduledSequence, Scheduler
from sensorium.models.base import GenerationOutput, KVCacheSpec, KVGroupSpec

from .engine_helpers import Owner, make_request, mel_feature, work

VOCAB = 40


def make_scheduler(slabs: int = 24, **config: int) -> Scheduler:
    settings_ = EngineConfig(kv_cache_mb=1024, **{"max_num_seqs": 6, "max_num_batched_tokens": 64, **config})
    pool = BlockPool(slabs << 14, 1 << 14)
    scheduler = Scheduler(settings_, pool, EncoderCache(1 << 20))
    for model, layers in (("a", 1), ("b", 2)):
        full = KVGroupSpec("self", "full", layers, 1, 16, torch.float32)
        cross = KVGroupSpec("cross", "cross", layers, 1, 16, torch.float32, encoder_len=30)
        spec = KVCacheSpec((full, cross), max_model_len=120)
        scheduler.groups[model] = CacheGroups.register(pool, model, spec)
    hybrid = KVCacheSpec(
        (
            KVGroupSpec("full", "full", 1, 1, 16),
            KVGroupSpec("sliding", "full", 2, 1, 16, window=20),
            KVGroupSpec("state", "state", 2, state_size=100),
        ),
        max_model_len=120,
    )
    windowed = KVCacheSpec(hybrid.groups[:2], max_model_len=120)
    scheduler.groups["c"] = CacheGroups.register(pool, "c", hybrid)
    scheduler.groups["d"] = CacheGroups.register(pool, "d", windowed)
    return scheduler


def check_window(item: ScheduledSequence) -> None:
    """Every key that this step's tokens can see is there; what no one can see any more was given back."""
    sequence = item.sequence
    for name, pages in sequence.pages.items():
        window = 20 if name == "sliding" else 1000
        first = max(0, sequence.num_computed - window + 1) // BLOCK_SIZE
        assert [page is None for page in pages[: -(-item.end // BLOCK_SIZE)]] == [
            index < first for index in range(-(-item.end // BLOCK_SIZE))
        ]


def deliver(request: Request, result: GenerationOutput) -> None:
    request.owner.deliver(result)


def fail(request: Request, reason: str) -> None:
    raise AssertionError(reason)


def run_step(scheduler: Scheduler, output: OutputProcessor, generator: torch.Generator) -> int:
    """A step without a model: random logits. Returns the tokens computed."""
    plans = scheduler.schedule()
    tokens = 0
    for plan in plans:
        assert len({s.sequence for s in plan.sequences}) == len(plan.sequences)
        for item in plan.sequences:
            assert item.num_tokens > 0
            assert item.end <= item.sequence.num_tokens
            assert all(item.end <= len(pages) * BLOCK_SIZE for pages in item.sequence.pages.values())
            check_window(item)
            tokens += item.num_tokens
        sampled = [
            s.sequence
            for s in plan.sequences
            if s.end == s.sequence.num_tokens and s.sequence.request.params.max_tokens > 0
        ]
        logits = torch.randn(len(sampled), VOCAB, generator=generator)
        batch = SimpleNamespace(scheduled=plan.sequences, sampled=sampled)
        output.update(batch, logits)
    assert tokens <= scheduler.config.max_num_batched_tokens
    scheduler.check_integrity()
    return tokens


LOADS = st.lists(
    st.tuples(
        st.integers(0, 30),  # step of arrival
        st.sampled_from("abcd"),
        st.integers(1, 70),  # prompt tokens
        st.integers(0, 50),  # max_tokens
        st.integers(0, 3),  # which recording
        st.sampled_from([(1, 1), (1, 1), (3, 1), (1, 4)]),  # sequences, beams
        st.integers(0, 2),  # priority
        st.one_of(st.none(), st.integers(0, 40)),  # step of abort
    ),
    min_size=1,
    max_size=10,
)


@settings(deadline=None, max_examples=60)
@given(load=LOADS, slabs=st.integers(16, 40), budget=st.integers(8, 100), seed=st.integers(0, 99))
def test_every_request_ends_and_every_page_comes_back(
    load: list[tuple], slabs: int, budget: int, seed: int
) -> None:
    scheduler = make_scheduler(slabs, max_num_batched_tokens=budget)
    output = OutputProcessor(scheduler, deliver, fail)
    generator = torch.Generator().manual_seed(seed)
    owners, requests, expected = [Owner() for _ in range(3)], {}, 0
    for step in range(3000):
        for number, (arrival, model, prompt, limit, item, width, priority, _) in enumerate(load):
            if arrival != step:
                continue
            ids = tuple(int(t) for t in torch.randint(1, VOCAB, (prompt,), generator=generator))
            piece = work(
                number,
                ids,
                mel_feature(item),
                max_tokens=limit,
                num_sequences=width[0],
                beam_size=width[1],
                temperature=0.5 if width[0] > 1 else 0.0,
                seed=1,
                stop_token_ids=(0,),
            )
            request = make_request(number, model, piece, owners[number % 3], priority)
            if scheduler.refusal(request) is None:
                scheduler.add(request)
                requests[number] = request
        for number, request in list(requests.items()):
            if load[number][-1] == step and request in [*scheduler.running, *scheduler.waiting]:
                scheduler.finish(request)
                del requests[number]
                scheduler.check_integrity()
        run_step(scheduler, output, generator)
        if step > 40 and not scheduler.has_requests:
            break
    assert not scheduler.has_requests, "a request was starved"
    expected = len(requests)
    assert sum(len(o.delivered) for o in owners) == expected
    for groups in scheduler.groups.values():
        for group in groups.all():
            assert scheduler.pool.num_available(group) == scheduler.pool.capacity(group)


def test_a_short_request_does_not_wait_behind_a_long_file() -> None:
    scheduler = make_scheduler(slabs=200, max_num_seqs=4)
    long_file, short_clip = Owner(), Owner()
    for number in range(20):
        piece = work(number, (1,), mel_feature(number), max_tokens=5)
        scheduler.add(make_request(number, "a", piece, long_file))
    output = OutputProcessor(scheduler, deliver, fail)
    generator = torch.Generator().manual_seed(0)
    run_step(scheduler, output, generator)
    scheduler.add(make_request(20, "a", work(20, (1,), mel_feature(20), max_tokens=5), short_clip))
    while not short_clip.delivered:
        run_step(scheduler, output, generator)
    # A seat had been left free for it: it was done with the first round of the long file.
    assert len(long_file.delivered) <= 3


def test_lower_priority_value_is_served_first() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    owner = Owner()
    output = OutputProcessor(scheduler, deliver, fail)
    for number, priority in enumerate((5, 0)):
        piece = work(number, (1,), mel_feature(0), max_tokens=2)
        scheduler.add(make_request(number, "a", piece, owner, priority))
    generator = torch.Generator().manual_seed(0)
    while scheduler.has_requests:
        run_step(scheduler, output, generator)
    assert [o.key for o in owner.delivered] == [1, 0]


def test_the_encoder_budget_spreads_new_items_over_steps() -> None:
    scheduler = make_scheduler(max_num_encoder_tokens=2 * 1500)
    for number in range(5):
        scheduler.add(
            make_request(number, "a", work(number, (1,), mel_feature(number), max_tokens=1), Owner())
        )
    assert [len(p.encoder_requests) for p in scheduler.schedule()] == [2]


def test_an_item_above_the_encoder_budget_runs_alone() -> None:
    scheduler = make_scheduler(max_num_encoder_tokens=10)
    scheduler.add(make_request(0, "a", work(0, (1,), mel_feature(0), max_tokens=1), Owner()))
    assert [len(p.encoder_requests) for p in scheduler.schedule()] == [1]


def test_one_recording_is_filled_once_and_two_share_no_prefix() -> None:
    scheduler = make_scheduler()
    output = OutputProcessor(scheduler, deliver, fail)
    generator = torch.Generator().manual_seed(0)
    prompt = tuple(range(1, 36))
    owner = Owner()
    for number, item in enumerate((0, 0, 1)):
        scheduler.add(make_request(number, "a", work(number, prompt, mel_feature(item), max_tokens=1), owner))
        plans = scheduler.schedule()
        (scheduled,) = plans[0].sequences
        assert len(plans[0].encoder_requests) == (number != 1)
        # The second request finds both full pages; the third has other audio and finds none.
        assert scheduled.num_tokens == (3 if number == 1 else 35)
        output.update(
            SimpleNamespace(scheduled=plans[0].sequences, sampled=[scheduled.sequence]),
            torch.randn(1, VOCAB, generator=generator),
        )
    assert scheduler.kv.prefix_hits == 32


@pytest.mark.parametrize(
    ("piece", "reason"),
    [
        (work(0, (1,) * 100, mel_feature(0), max_tokens=30), "positions"),
        (work(0, (), mel_feature(0), max_tokens=3), "empty"),
        (work(0, (1,), mel_feature(0), max_tokens=3, beam_size=7), "--max-num-seqs"),
    ],
)
def test_what_can_never_run_is_refused(piece, reason: str) -> None:
    refusal = make_scheduler().refusal(make_request(0, "a", piece, Owner()))
    assert refusal is not None
    assert reason in refusal


def test_more_cache_than_the_arena_is_refused() -> None:
    scheduler = make_scheduler(slabs=2)
    request = make_request(0, "b", work(0, (1,) * 60, mel_feature(0), max_tokens=40), Owner())
    assert "--kv-cache-mb" in (scheduler.refusal(request) or "")


@settings(deadline=None, max_examples=40)
@given(
    items=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 60)), min_size=3, max_size=12),
    seed=st.integers(0, 99),
)
def test_scattered_caches_never_block_what_fits_an_empty_arena(
    items: list[tuple[str, int]], seed: int
) -> None:
    # One at a time through an arena of just the size that the largest needs: cached pages of both models
    # and both groups lie over every slab, and each request must still get its slabs.
    scheduler = make_scheduler(slabs=3, max_num_batched_tokens=16)
    output = OutputProcessor(scheduler, deliver, fail)
    generator = torch.Generator().manual_seed(seed)
    for number, (model, prompt) in enumerate(items):
        owner = Owner()
        piece = work(number, tuple(range(prompt)), mel_feature(number), max_tokens=30, stop_token_ids=())
        request = make_request(number, model, piece, owner)
        if scheduler.refusal(request) is not None:
            continue
        scheduler.add(request)
        for _ in range(200):
            if not scheduler.has_requests:
                break
            run_step(scheduler, output, generator)
        assert not scheduler.unservable
        assert len(owner.delivered) == 1
