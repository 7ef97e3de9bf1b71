"""`sensorium bench text`: one round's work, what each side is asked for, the command; one test measures truly."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sensorium.engine.config import EngineConfig
from sensorium.engine.engine import Engine
from sensorium.models import store
from sensorium.models.text_loader import open_text
from sensorium.processors.text import TextTokenizer
from sensorium.server import bench_text
from sensorium.server.__main__ import main
from sensorium.server.bench_llama_cpp import LlamaCppSession
from sensorium.server.bench_rounds import Measurement, Settings, Variant
from sensorium.server.bench_text import DEFAULT_SIZES, MODEL, QUICK_SIZES, Sizes
from sensorium.server.bench_text_ours import OurTextSession
from sensorium.server.bench_text_task import Moment, PromptTask, StreamTask, common_time

from .fake_bench import MIB, FakeWorkers
from .tiny_text import LLAMA, random_weights, write_tiny_text

Prompt = tuple[int, ...]


@pytest.fixture(scope="module")
def smollm2() -> TextTokenizer:
    return open_text(store.resolve(MODEL)).tokenizer


# -- the work of one round --------------------------------------------------------------------------------


def test_a_prompts_time_ends_with_its_first_token() -> None:
    asked: list[tuple[Prompt, int, bool]] = []

    def generate(prompt: Prompt, num_tokens: int, reuse: bool, arrived: Callable[[], None]) -> str:
        asked.append((prompt, num_tokens, reuse))
        time.sleep(0.05)
        arrived()
        time.sleep(0.3)
        return "x"

    task = PromptTask(((0,), (1, 2, 3)), reuse=False)
    found = task.measure(1, generate)
    assert (found.amount, found.outputs) == (3, ("x",))
    assert 0.05 <= found.seconds < 0.3
    assert found.cpu_seconds < 0.05
    assert found.peak_rss > 10 * MIB
    assert (task.context, task.streams) == (4, 1)
    again = PromptTask(((4, 5),), reuse=True)
    again.measure(0, generate)
    again.measure(2, generate)
    assert asked == [((1, 2, 3), 1, False), ((4, 5), 1, True), ((4, 5), 1, True)]


def test_streams_count_what_comes_while_all_are_under_way() -> None:
    def moments(*clock: float) -> list[Moment]:
        return [Moment(value, value * 2) for value in clock]

    late, early = moments(2.0, 3.0, 4.0, 5.0), moments(0.5, 1.0, 2.5, 4.0)
    assert common_time([late, early]) == (Moment(2.0, 4.0), Moment(4.0, 8.0), 4)
    assert common_time([late]) == (Moment(2.0, 4.0), Moment(5.0, 10.0), 3)
    with pytest.raises(ValueError, match="more --tokens"):
        common_time([late, moments(0.5, 1.0)])


def test_streams_run_together_on_prompts_of_their_round() -> None:
    barrier = threading.Barrier(2)
    asked: list[tuple[Prompt, int]] = []

    def generate(prompt: Prompt, num_tokens: int, reuse: bool, arrived: Callable[[], None]) -> str:
        asked.append((prompt, num_tokens))
        assert not reuse
        for _ in range(num_tokens):
            barrier.wait(5)
            arrived()
        return str(prompt[0])

    task = StreamTask((((0,), (1,)), ((2,), (3,))), 40)
    assert (task.streams, task.context) == (2, 41)
    assert task.measure(1, generate).outputs == ("2", "3")
    task.measure(0, generate)
    assert sorted(asked) == [((0,), 16), ((1,), 16), ((2,), 40), ((3,), 40)]


# -- prompts ----------------------------------------------------------------------------------------------


def test_prompts_are_as_long_as_asked_and_never_begin_alike(smollm2: TextTokenizer) -> None:
    tasks = bench_text.make_tasks(smollm2, Sizes(300, 9, 3), rounds=2)
    prompt, single, streams, cached = tasks.values()
    assert list(tasks) == [
        "prompt of 300 tokens",
        "1 stream of 9 tokens",
        "3 streams of 9 tokens",
        "prompt of 300 tokens, cached",
    ]
    assert isinstance(prompt, PromptTask)
    assert isinstance(cached, PromptTask)
    assert isinstance(single, StreamTask)
    assert isinstance(streams, StreamTask)
    assert [len(one) for one in prompt.prompts] == [64, 300, 300]
    assert [len(one) for one in cached.prompts] == [300]
    assert [one.context for one in tasks.values()] == [301, 25, 25, 301]
    found = [*prompt.prompts, *cached.prompts, *sum(single.prompts + streams.prompts, ())]
    assert len(found) == 4 + 3 * (1 + 3)
    assert len({one[:8] for one in found}) == len(found)
    assert {len(one) for one in sum(single.prompts + streams.prompts, ())} == {16}
    assert "house" in smollm2.decode(prompt.prompts[1])
    assert bench_text.make_tasks(smollm2, Sizes(300, 9, 3), rounds=2) == tasks


# -- the two sides ----------------------------------------------------------------------------------------


def chunk(text: str, finish_reason: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"text": text, "finish_reason": finish_reason}], **more}


class FakeServer:
    """Answers as llama.cpp's server does, with chunks that were given."""

    def __init__(self, *chunks: dict[str, Any]) -> None:
        self.chunks = chunks
        self.asked: list[dict[str, Any]] = []

    def handle_completions(self, request: dict[str, Any], take: Callable[[Any], bool]) -> None:
        self.asked.append(request)
        for one in self.chunks:
            assert not take(one)


def test_llama_cpp_is_asked_for_greedy_tokens_without_an_end() -> None:
    end = chunk("", "length", usage={"completion_tokens": 1})
    server = FakeServer(chunk(" so"), end)
    session = LlamaCppSession(server, PromptTask(((7, 8), (9, 10)), reuse=False))
    found = session.run(1)
    assert (found.amount, found.outputs) == (2, (" so",))
    assert server.asked == [
        {
            "prompt": [9, 10],
            "n_predict": 1,
            "temperature": 0,
            "top_k": 1,
            "ignore_eos": True,
            "cache_prompt": False,
            "stream": True,
        }
    ]
    LlamaCppSession(server, PromptTask(((7, 8),), reuse=True)).run(1)
    assert server.asked[1]["cache_prompt"]


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([{"error": {"code": 400, "message": "too long"}}], "too long"),
        ([{"code": 400, "message": "too long"}], "too long"),
        ([chunk("a"), chunk("", "stop", usage={"completion_tokens": 2})], "2 tokens were made where 1"),
    ],
)
def test_llama_cpps_errors_are_told(chunks: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        LlamaCppSession(FakeServer(*chunks), PromptTask(((7,),), reuse=True)).run(0)


def test_a_peers_process_has_no_torch_in_it() -> None:
    code = "import sys, sensorium.server.bench_llama_cpp as m; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0


def test_ours_finds_a_prompt_again_and_never_one_that_must_be_computed(tmp_path: Path) -> None:
    engine = Engine(EngineConfig(kv_cache_mb=64, slab_mb=1, threads=1))
    engine.load("tiny", write_tiny_text(tmp_path / "tiny", random_weights(LLAMA)))
    engine.start()
    try:
        prompts = tuple(tuple(range(first, first + 50)) for first in (10, 70, 130))
        fresh = OurTextSession(engine, PromptTask(prompts, reuse=False))
        for number in range(3):
            assert fresh.run(number).amount == 50
        assert engine.stats()["prefix_hits"] == 0
        again = OurTextSession(engine, PromptTask(((5,) * 50,), reuse=True))
        assert again.run(0).outputs == again.run(1).outputs
        assert engine.stats()["prefix_hits"] > 0
        streams = OurTextSession(engine, StreamTask((((1,), (2,)), ((3,), (4,))), 6)).run(1)
        assert len(streams.outputs) == 2
        assert 0 < streams.amount <= 10
    finally:
        engine.shutdown(drain=False)


# -- the report -----------------------------------------------------------------------------------------


def measured(rate: float) -> Measurement:
    return Measurement(rate * 2, 2.0, 4.0, ("a",), 100 * MIB)


def report_of(model: str, sizes: Sizes, against: bool, **rates: float) -> Any:
    tasks: Any = dict.fromkeys(vars_of(sizes), PromptTask(((1,),), reuse=True))
    variants = bench_text.make_variants(Path("m.gguf"), tasks, 2, against)
    results = {one.label: [measured(_rate(one, sizes, rates))] for one in variants}
    settings = Settings(1, False, 2, frozenset(), lambda line: None)
    return bench_text.make_report(model, sizes, variants, results, settings)


def vars_of(sizes: Sizes) -> list[str]:
    names = sizes.names
    return [names.prompt, names.single, names.streams, names.cached]


def _rate(variant: Variant, sizes: Sizes, rates: dict[str, float]) -> float:
    if not variant.ours:
        return 100.0
    return rates["cached"] if variant.work == sizes.names.cached else rates["ours"]


def test_rows_have_their_targets_and_times_to_the_first_token() -> None:
    report = report_of(MODEL, DEFAULT_SIZES, True, ours=250.0, cached=5000.0)
    assert [(row.name, row.against, row.ratio, row.target, row.reached) for row in report.rows] == [
        ("prompt of 2,000 tokens", "llama.cpp", 2.5, 2.5, True),
        ("1 stream of 128 tokens", "llama.cpp", 2.5, 1.0, True),
        ("8 streams of 128 tokens", "llama.cpp", 2.5, 3.0, False),
        ("prompt of 2,000 tokens, cached", "llama.cpp", 50.0, None, None),
        ("prompt of 2,000 tokens, cached", "sensorium, not cached", 20.0, 15.0, True),
    ]
    first, single, *_, last = report.rows
    assert first.details == {"ours_seconds": 8.0, "theirs_seconds": 20.0}
    assert last.details == {"ours_seconds": 0.4, "theirs_seconds": 8.0}
    assert single.details == {}
    assert len(report.figures) == 8


def test_targets_are_for_the_usual_work() -> None:
    for model, sizes in ((MODEL, QUICK_SIZES), ("other", DEFAULT_SIZES)):
        rows = report_of(model, sizes, True, ours=250.0, cached=5000.0).rows
        assert {row.target for row in rows} == {None}


def test_without_a_peer_only_our_cached_prompt_is_compared() -> None:
    rows = report_of(MODEL, DEFAULT_SIZES, False, ours=250.0, cached=5000.0).rows
    assert [(row.against, row.ratio) for row in rows] == [
        (None, None),
        (None, None),
        (None, None),
        ("sensorium, not cached", 20.0),
    ]
    assert rows[0].details == {"ours_seconds": 8.0, "theirs_seconds": None}


def test_what_is_measured(tmp_path: Path, smollm2: TextTokenizer) -> None:
    tasks = bench_text.make_tasks(smollm2, Sizes(40, 4, 20), rounds=1)
    made: list[Any] = bench_text.make_variants(tmp_path, tasks, threads=2, against=True)
    assert [one.name for one in made] == ["sensorium", "llama.cpp"] * 4
    assert [one.ours for one in made] == [True, False] * 4
    assert {one.runner.task.streams for one in made} == {1, 20}
    assert {one.runner.config.threads for one in made if one.ours} == {2}
    assert [one.runner.config.max_num_seqs for one in made if one.ours] == [16, 16, 20, 16]
    assert {one.runner.threads for one in made if not one.ours} == {2}


# -- the command ------------------------------------------------------------------------------------------


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> FakeWorkers:
    fakes = FakeWorkers()
    monkeypatch.setattr(bench_text, "start_worker", fakes.start)
    return fakes


def test_the_command_shows_and_writes_what_it_found(
    tmp_path: Path, workers: FakeWorkers, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    assert main(["bench", "text", "--quick", "--streams", "2", "--threads", "1", "--json", str(path)]) == 0
    body = json.loads(path.read_text())
    assert [(row["name"], row["against"]) for row in body["rows"]] == [
        ("prompt of 200 tokens", "llama.cpp"),
        ("1 stream of 16 tokens", "llama.cpp"),
        ("2 streams of 16 tokens", "llama.cpp"),
        ("prompt of 200 tokens, cached", "llama.cpp"),
        ("prompt of 200 tokens, cached", "sensorium, not cached"),
    ]
    assert body["rows"][0]["ratio"] == pytest.approx(30 / 21)
    assert body["rows"][0]["theirs_seconds"] == pytest.approx(200 / 21)
    assert body["settings"]["text"] == {
        "model": MODEL,
        "threads": 1,
        "rounds": 1,
        "quick": True,
        "prompt_tokens": 200,
        "tokens": 16,
        "streams": 2,
    }
    out = capsys.readouterr().out
    assert "Time to the first token of 200: sensorium 1,000 ms (not cached)" in out
    assert str(store.resolve(MODEL)) not in out + path.read_text()
    assert len(workers.diary) == 8 * 4  # come, warm up, one round, go


def test_ours_alone(workers: FakeWorkers, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "text", "--against", "none", "--quick"]) == 0
    assert "llama.cpp " not in capsys.readouterr().out.split("Model")[0]
    assert len(workers.diary) == 4 * 4


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--model", "{hub}"], 1, "hub is none: use --against none"),
        (["--model", "no-such-model"], 4, "no model 'no-such-model'"),
        (["--prompt-tokens", "8192"], 1, f"{MODEL} cannot hold 8,193 tokens"),
        (["--tokens", "8190"], 1, f"{MODEL} cannot hold 8,206 tokens"),
    ],
)
def test_usage_errors(
    arguments: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    workers: FakeWorkers,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hub = write_tiny_text(tmp_path / "hub", random_weights(LLAMA))
    assert main(["bench", "text", *(one.format(hub=hub) for one in arguments)]) == code
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert workers.diary == []


@pytest.mark.parametrize("arguments", [["--prompt-tokens", "16"], ["--tokens", "1"], ["--streams", "65"]])
def test_numbers_that_cannot_be(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "text", *arguments])
    assert caught.value.code == 1
    assert "is not a whole number from" in capsys.readouterr().err


def test_without_llama_cpp_there_is_a_hint(
    monkeypatch: pytest.MonkeyPatch, workers: FakeWorkers, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_text, "find_spec", lambda name: None)
    assert main(["bench", "text", "--quick"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "sensorium[bench]" in line
    assert main(["bench", "text", "--quick", "--against", "none"]) == 0


@pytest.mark.slow
def test_the_real_thing(tmp_path: Path) -> None:
    """Every piece of work with tiny numbers, each side in its process; one thread, which no other waits for."""
    path = tmp_path / "result.json"
    sizes = ["--prompt-tokens", "64", "--tokens", "8", "--streams", "2"]
    assert main(["bench", "text", "--quick", "--threads", "1", *sizes, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 5
    for row in rows:
        assert row["ratio"] == pytest.approx(row["ours"] / row["theirs"])
        assert row["ours"] > 0
    cached, uncached = rows[3], rows[0]
    assert cached["theirs_seconds"] < uncached["theirs_seconds"]
