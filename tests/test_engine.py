"""The whole engine on a tiny model: batches, preemption, forks, failures, aborts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from sensorium.engine.config import EngineConfig
from sensorium.engine.engine import Engine, EngineDead, ProgramAborted, ProgramFailed, UnknownModel
from sensorium.models.base import GenerationOutput, GenerationRequest, ModelError
from sensorium.processors.inputs import MultiModalFeature

from .engine_helpers import WorkList, mel_feature, work
from .tiny_whisper import write_tiny_whisper

PROMPT = (50258, 50259, 50359)
TIMEOUT = 120.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, whisper_base_dir: Path) -> Path:
    return write_tiny_whisper(tmp_path_factory.mktemp("tiny"), whisper_base_dir / "tokenizer.json")


def make_engine(checkpoint: Path, models: tuple[str, ...] = ("tiny",), **config: int | bool) -> Engine:
    engine = Engine(EngineConfig(**{"kv_cache_mb": 64, "slab_mb": 4, "threads": 1, **config}))
    for name in models:
        engine.load(name, checkpoint)
    engine.start()
    return engine


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[Engine]:
    engine = make_engine(checkpoint, kv_cache_mb=256)
    yield engine
    engine.shutdown()


def settle(engine: Engine) -> None:
    """Waits until the loop has taken out everything, then checks the books."""
    deadline = time.monotonic() + 10
    while engine.scheduler.has_requests and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    engine.scheduler.check_integrity()
    for group in engine.pool.groups:
        assert engine.pool.num_available(group) == engine.pool.capacity(group)


def mixed_work() -> list[GenerationRequest]:
    """Requests of many lengths over five recordings."""
    pieces = []
    for number in range(12):
        prompt = PROMPT + tuple(range(100, 100 + 17 * (number % 4)))
        pieces.append(work(number, prompt, mel_feature(number % 5), max_tokens=20 + 7 * (number % 5)))
    return pieces


def tokens_of(outputs: dict[object, GenerationOutput]) -> dict[object, list[tuple[int, ...]]]:
    return {key: [c.token_ids for c in o.completions] for key, o in outputs.items()}


@pytest.fixture(scope="module")
def solo(engine: Engine) -> dict[object, list[tuple[int, ...]]]:
    """What each piece gives when it runs alone."""
    result: dict[object, list[tuple[int, ...]]] = {}
    for piece in mixed_work():
        result |= tokens_of(engine.run("tiny", WorkList(piece)).wait(TIMEOUT))
    assert len({ids[0] for ids in result.values()}) == len(result)
    assert all(len(set(ids[0])) > 5 for ids in result.values())
    return result


def test_a_batch_gives_what_each_request_gives_alone(engine: Engine, solo: dict) -> None:
    assert tokens_of(engine.run("tiny", WorkList(*mixed_work())).wait(TIMEOUT)) == solo
    settle(engine)


@pytest.mark.parametrize(
    "config",
    [
        {"kv_cache_mb": 12, "slab_mb": 2, "max_num_seqs": 12},
        {"max_num_batched_tokens": 7},
        {"max_num_batched_tokens": 1},
        {"prefix_caching": False, "max_num_encoder_tokens": 1500},
    ],
    ids=["small arena", "chunks of 7", "token by token", "no prefix cache"],
)
def test_no_limit_changes_a_token(checkpoint: Path, solo: dict, config: dict[str, int]) -> None:
    engine = make_engine(checkpoint, **config)
    try:
        assert tokens_of(engine.run("tiny", WorkList(*mixed_work())).wait(TIMEOUT)) == solo
        settle(engine)
    finally:
        engine.shutdown()


def test_preemption_changes_no_token(checkpoint: Path, solo: dict) -> None:
    # Slabs of one page each leave room for five recordings and a few pages of text.
    engine = make_engine(checkpoint, kv_cache_mb=10, slab_mb=1, max_num_seqs=12, max_num_encoder_tokens=9000)
    try:
        full = engine.scheduler.groups["tiny"].paged["self"]
        spare = engine.pool.allocate(full, engine.pool.capacity(full) * 3 // 10)
        run = engine.run("tiny", WorkList(*mixed_work()))
        assert tokens_of(run.wait(TIMEOUT)) == solo
        engine.pool.release(full, spare)
        assert engine.scheduler.num_preemptions + engine.pool.evictions > 0
        settle(engine)
    finally:
        engine.shutdown()


def test_the_encoder_runs_once_for_a_recording(engine: Engine) -> None:
    before = engine.stats()
    feature = mel_feature(70)
    for _ in range(3):
        engine.run("tiny", WorkList(work("k", PROMPT, feature, max_tokens=3))).wait(TIMEOUT)
    pieces = [work(i, PROMPT, mel_feature(71), max_tokens=3, temperature=0.1 * i, seed=i) for i in range(4)]
    engine.run("tiny", WorkList(*pieces)).wait(TIMEOUT)
    assert engine.stats()["encoder_runs"] - before["encoder_runs"] == 2


def test_an_evicted_recording_is_encoded_again(checkpoint: Path) -> None:
    engine = make_engine(checkpoint, kv_cache_mb=8, slab_mb=4, encoder_cache_mb=1)
    try:
        first = tokens_of(
            engine.run("tiny", WorkList(work(0, PROMPT, mel_feature(0), max_tokens=9))).wait(TIMEOUT)
        )
        for number in range(1, 8):
            engine.run("tiny", WorkList(work(0, PROMPT, mel_feature(number), max_tokens=2))).wait(TIMEOUT)
        again = tokens_of(
            engine.run("tiny", WorkList(work(0, PROMPT, mel_feature(0), max_tokens=9))).wait(TIMEOUT)
        )
        assert again == first
        assert engine.stats()["encoder_runs"] == 9
        settle(engine)
    finally:
        engine.shutdown()


def test_two_models_share_the_arena_and_keep_apart(
    tmp_path_factory: pytest.TempPathFactory, checkpoint: Path, solo: dict
) -> None:
    tokenizer = checkpoint / "tokenizer.json"
    other = write_tiny_whisper(tmp_path_factory.mktemp("other"), tokenizer, seed=1, decoder_layers=3)
    engine = Engine(EngineConfig(kv_cache_mb=24, slab_mb=4, threads=1))
    try:
        engine.start()
        with pytest.raises(UnknownModel):
            engine.run("other", WorkList())
        engine.shutdown()
        engine = Engine(EngineConfig(kv_cache_mb=24, slab_mb=4, threads=1))
        engine.load("tiny", checkpoint)
        engine.load("other", other)
        with pytest.raises(ModelError, match="already"):
            engine.load("tiny", checkpoint)
        engine.start()
        runs = [engine.run(name, WorkList(*mixed_work())) for name in ("tiny", "other")]
        mine, others = (tokens_of(run.wait(TIMEOUT)) for run in runs)
        assert mine == solo
        assert all(mine[key] != others[key] for key in mine)
        settle(engine)
    finally:
        engine.shutdown()


def test_sampled_and_beam_sequences_are_deterministic_in_any_company(engine: Engine) -> None:
    pieces = [
        work("best_of", PROMPT, mel_feature(0), max_tokens=15, num_sequences=4, temperature=0.9, seed=7),
        work("beam", PROMPT, mel_feature(1), max_tokens=15, beam_size=4),
    ]
    alone: dict = {}
    for piece in pieces:
        alone |= engine.run("tiny", WorkList(piece)).wait(TIMEOUT)
    together = engine.run("tiny", WorkList(*pieces, *mixed_work())).wait(TIMEOUT)
    for piece in pieces:
        want, got = ({c.token_ids: c for c in o[piece.key].completions} for o in (alone, together))
        assert set(got) == set(want)
        assert len(want) == 4
        for ids, completion in want.items():
            assert got[ids].cumulative_logprob == pytest.approx(completion.cumulative_logprob, abs=1e-2)
    settle(engine)


def test_a_beam_is_at_least_as_likely_as_the_greedy_path(engine: Engine) -> None:
    greedy, beam = (
        engine.run("tiny", WorkList(work(0, PROMPT, mel_feature(3), max_tokens=6, beam_size=n))).wait(
            TIMEOUT
        )[0]
        for n in (1, 8)
    )
    best = max(c.cumulative_logprob for c in beam.completions)
    assert best >= greedy.completions[0].cumulative_logprob - 1e-3


def test_alignment_scores_and_probes_cover_the_prompt_in_any_chunks(checkpoint: Path, engine: Engine) -> None:
    class Probe:
        positions = (0, 5, 6, 20)

        def reduce(self, positions: list[int], logits: torch.Tensor) -> torch.Tensor:
            assert logits.shape == (len(positions), 51865)
            return logits[:, :7]

    prompt = PROMPT + tuple(range(200, 230))
    piece = work(0, prompt, mel_feature(4), max_tokens=0, probe=Probe(), alignment_heads=((1, 0), (0, 0)))
    whole = engine.run("tiny", WorkList(piece)).wait(TIMEOUT)[0]
    assert whole.completions == ()
    assert whole.probe.shape == (4, 7)
    assert whole.alignment_scores.shape == (2, len(prompt), 1500)
    small = make_engine(checkpoint, max_num_batched_tokens=5)
    try:
        pieces = small.run("tiny", WorkList(piece)).wait(TIMEOUT)[0]
        torch.testing.assert_close(pieces.probe, whole.probe, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(pieces.alignment_scores, whole.alignment_scores, atol=1e-3, rtol=1e-3)
    finally:
        small.shutdown()


def test_an_abort_frees_the_pages_and_touches_nobody_else(engine: Engine, solo: dict) -> None:
    long = WorkList(*(work(i, PROMPT, mel_feature(i), max_tokens=440, stop_token_ids=()) for i in range(4)))
    doomed, kept = engine.run("tiny", long), engine.run("tiny", WorkList(*mixed_work()))
    time.sleep(0.2)
    doomed.abort()
    doomed.abort()
    with pytest.raises(ProgramAborted):
        doomed.wait(TIMEOUT)
    assert tokens_of(kept.wait(TIMEOUT)) == solo
    settle(engine)


def test_media_that_cannot_be_prepared_fails_its_own_request_only(engine: Engine, solo: dict) -> None:
    def broken() -> torch.Tensor:
        raise OSError("gone")

    feature = MultiModalFeature("audio", "broken", broken, 1500)
    bad = [engine.run("tiny", WorkList(work(0, PROMPT, feature, max_tokens=3))) for _ in range(3)]
    good = engine.run("tiny", WorkList(*mixed_work()))
    for run in bad:
        with pytest.raises(ProgramFailed):
            run.wait(TIMEOUT)
    assert tokens_of(good.wait(TIMEOUT)) == solo
    # The failed item left no name behind: the same hash with good data is encoded.
    fixed = MultiModalFeature("audio", "broken", mel_feature(0).data, 1500)
    piece = work(0, mixed_work()[0].inputs.prompt_token_ids, fixed, max_tokens=20)
    assert tokens_of(engine.run("tiny", WorkList(piece)).wait(TIMEOUT)) == {0: solo[0]}
    settle(engine)


def test_a_program_that_raises_fails_alone(engine: Engine) -> None:
    class Broken(WorkList):
        def accept(self, output: GenerationOutput) -> list[GenerationRequest]:
            raise RuntimeError("bug with /a/path in it")

    run = engine.run("tiny", Broken(work(0, PROMPT, mel_feature(0), max_tokens=3), *mixed_work()))
    with pytest.raises(ProgramFailed) as caught:
        run.wait(TIMEOUT)
    assert "path" not in str(caught.value)
    settle(engine)
    assert engine.healthy


def test_a_request_that_can_never_run_fails_its_program(engine: Engine) -> None:
    run = engine.run("tiny", WorkList(work(0, PROMPT, mel_feature(0), max_tokens=500)))
    with pytest.raises(ProgramFailed, match="448"):
        run.wait(TIMEOUT)
    assert engine.run("tiny", WorkList()).wait(TIMEOUT) == {}


def test_a_failed_step_fails_its_requests_and_the_engine_lives(checkpoint: Path, solo: dict) -> None:
    engine = make_engine(checkpoint)
    try:
        model = engine.runners["tiny"].model
        forward, model.forward = (
            model.forward,
            lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory")),
        )
        with pytest.raises(ProgramFailed):
            engine.run("tiny", WorkList(*mixed_work())).wait(TIMEOUT)
        model.forward = forward
        assert tokens_of(engine.run("tiny", WorkList(*mixed_work())).wait(TIMEOUT)) == solo
        settle(engine)
    finally:
        engine.shutdown()


def test_a_dead_loop_is_reported_and_hangs_nobody(checkpoint: Path) -> None:
    engine = make_engine(checkpoint)
    engine.scheduler.schedule = lambda: (_ for _ in ()).throw(RuntimeError("bug"))  # type: ignore[method-assign]
    run = engine.run("tiny", WorkList(*mixed_work()))
    with pytest.raises(EngineDead):
        run.wait(TIMEOUT)
    assert not engine.healthy
    with pytest.raises(EngineDead):
        engine.run("tiny", WorkList())
    engine.shutdown(timeout=1)


def test_events_arrive_in_order_in_threads_and_in_asyncio(engine: Engine) -> None:
    class Counting(WorkList):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.left = count
            self.events: list[int] = []

        def start(self) -> list[GenerationRequest]:
            return [work(self.left, PROMPT, mel_feature(0), max_tokens=2)]

        def accept(self, output: GenerationOutput) -> list[GenerationRequest]:
            self.events.append(self.left)
            self.left -= 1
            return self.start() if self.left else []

        def take_events(self) -> list[int]:
            events, self.events = self.events, []
            return events

    assert list(engine.run("tiny", Counting(4)).iter_events()) == [4, 3, 2, 1]

    async def collect() -> tuple[list[int], object]:
        run = engine.run("tiny", Counting(4))
        seen = [event async for event in run.events()]
        return seen, await run.result()

    assert asyncio.run(collect()) == ([4, 3, 2, 1], {})


def test_shutdown_drains_or_aborts(checkpoint: Path) -> None:
    engine = make_engine(checkpoint)
    drained = engine.run("tiny", WorkList(*mixed_work()))
    engine.shutdown(drain=True, timeout=60)
    assert len(drained.wait(1)) == 12
    engine = make_engine(checkpoint)
    endless = engine.run("tiny", WorkList(work(0, PROMPT, mel_feature(0), max_tokens=440, stop_token_ids=())))
    engine.shutdown(drain=False)
    with pytest.raises(ProgramAborted):
        endless.wait(1)


def test_models_come_and_go_while_others_are_served(checkpoint: Path, solo: dict) -> None:
    engine = make_engine(checkpoint, kv_cache_mb=16)
    try:
        steady = engine.run("tiny", WorkList(*mixed_work()))
        engine.load("second", checkpoint)
        with pytest.raises(ModelError, match="already"):
            engine.load("second", checkpoint)
        assert tokens_of(engine.run("second", WorkList(*mixed_work())).wait(TIMEOUT)) == solo
        endless = engine.run("second", WorkList(*(w for w in mixed_work() for _ in range(3))))
        engine.unload("second")
        with pytest.raises(ProgramFailed, match="unloaded"):
            endless.wait(TIMEOUT)
        with pytest.raises(UnknownModel):
            engine.run("second", WorkList())
        with pytest.raises(UnknownModel):
            engine.unload("second")
        assert tokens_of(steady.wait(TIMEOUT)) == solo
        assert {group.model for group in engine.pool.groups} == {"tiny"}
        settle(engine)
    finally:
        engine.shutdown()


def test_pooled_states_do_not_depend_on_chunks_or_caches(checkpoint: Path, engine: Engine) -> None:
    prompt = PROMPT + tuple(range(300, 340))

    def pooled(where: Engine, kind: str) -> torch.Tensor:
        piece = work(0, prompt, mel_feature(6), max_tokens=0, pooling=kind)
        vector = where.run("tiny", WorkList(piece)).wait(TIMEOUT)[0].pooled
        assert vector is not None
        assert vector.shape == (64,)
        return vector

    small = make_engine(checkpoint, max_num_batched_tokens=7)
    try:
        for kind in ("last", "mean"):
            first = pooled(engine, kind)
            torch.testing.assert_close(pooled(engine, kind), first, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(pooled(small, kind), first, atol=1e-4, rtol=1e-4)
        assert not torch.allclose(pooled(engine, "last"), pooled(engine, "mean"))
    finally:
        small.shutdown()


def test_time_and_tokens_are_accounted_for(engine: Engine) -> None:
    before = engine.stats()
    engine.run("tiny", WorkList(work(0, PROMPT, mel_feature(90), max_tokens=5, stop_token_ids=()))).wait(
        TIMEOUT
    )
    after = engine.stats()
    assert after["generated_tokens"] - before["generated_tokens"] == 5
    assert after["prompt_tokens"] - before["prompt_tokens"] == len(PROMPT) - 1
    for stage in ("schedule", "encode", "prefill", "decode", "sample"):
        assert after[f"stage_{stage}_seconds"] > before[f"stage_{stage}_seconds"]
