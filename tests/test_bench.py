"""The benchmark's frame: rounds in turn, ratios, rows, tables and JSON, and the measuring processes."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from sensorium.server import bench, bench_output, bench_rows, bench_worker
from sensorium.server.__main__ import main
from sensorium.server.bench_rounds import BenchFailed, Variant, run_rounds

from .fake_bench import MIB, FakeWorkers, variant

# -- rounds and rows --------------------------------------------------------------------------------------


def test_variants_take_turns_and_the_warm_up_does_not_count() -> None:
    workers = FakeWorkers()
    told: list[str] = []
    chosen = [variant("a", 9, 1, 2, ours=True), variant("b", 9, 3, 4), variant("c", 9, 5, 6)]
    results = run_rounds(chosen, 2, workers.start, told.append)
    assert workers.diary == [
        "+a",
        "+b",
        "+c",
        "a0",
        "b0",
        "c0",
        "a1",
        "b1",
        "c1",
        "a2",
        "b2",
        "c2",
        "-c",
        "-b",
        "-a",
    ]
    assert {label: [one.rate for one in found] for label, found in results.items()} == {
        "w: a": [1, 2],
        "w: b": [3, 4],
        "w: c": [5, 6],
    }
    assert "warm-up, w: a: 9.00 in 1.0 s" in told
    assert "round 2/2, w: c: 6.00 in 1.0 s" in told


def test_workers_end_when_one_fails() -> None:
    workers = FakeWorkers()
    with pytest.raises(IndexError):
        run_rounds([variant("a", 1), variant("b", 1, 1)], 1, workers.start, lambda line: None)
    assert workers.diary == ["+a", "+b", "a0", "b0", "a1", "-b", "-a"]


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    chosen = [variant("us", 0, 10, 40, 30, ours=True), variant("peer", 0, 5, 10, 30)]
    results = run_rounds(chosen, 3, FakeWorkers().start, lambda line: None)
    (row,) = bench_rows.make_rows(chosen, results, {"w: peer": 2.5})
    # Of the medians it would be 30 / 10.
    assert (row.ours, row.theirs, row.ratio, row.ratio_range) == (30, 10, 2.0, (1.0, 4.0))
    assert row.target == 2.5
    assert row.reached is False


def test_every_peer_stands_beside_ours_of_the_same_work() -> None:
    chosen = [
        variant("us", 0, 10, work="one", ours=True),
        variant("p", 0, 5, work="one"),
        variant("us", 0, 12, work="two", ours=True),
        variant("p", 0, 3, work="two"),
        variant("q", 0, 4, work="two"),
        variant("us", 0, 7, work="alone", ours=True),
    ]
    results = run_rounds(chosen, 1, FakeWorkers().start, lambda line: None)
    rows = bench_rows.make_rows(chosen, results, {})
    assert [(row.name, row.against, row.ratio) for row in rows] == [
        ("one", "p", 2.0),
        ("two", "p", 4.0),
        ("two", "q", 3.0),
        ("alone", None, None),
    ]
    assert rows[-1].reached is None


# -- output -----------------------------------------------------------------------------------------------


def make_report() -> bench_rows.Report:
    rows = [
        bench_rows.Row("w", 30.0, "peer", 10.0, 2.0, (1.0, 4.0), 2.5, {"note": "x"}),
        bench_rows.Row("v", 7.0),
    ]
    figures = [bench_rows.Figure("us", "w", 3, 30.0, (10.0, 40.0), 17.5, 0.0694, 512 * MIB)]
    return bench_rows.Report("speech", "audio s/s", rows, figures, {"model": "m"}, ["a [note] of 3"])


def test_json_rows(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    bench_output.write_json(path, [make_report()], {"cores": 2})
    body = json.loads(path.read_text())
    assert body["rows"][0] == {
        "name": "w",
        "against": "peer",
        "unit": "audio s/s",
        "ours": 30.0,
        "theirs": 10.0,
        "ratio": 2.0,
        "ratio_range": [1.0, 4.0],
        "target": 2.5,
        "reached": False,
        "note": "x",
    }
    assert body["rows"][1]["ratio"] is None
    assert body["figures"][0]["peak_rss_mib"] == 512.0
    assert body["figures"][0]["per_cpu_second"] == 17.5
    assert body["settings"] == {"speech": {"model": "m"}}
    assert body["machine"] == {"cores": 2}
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.parametrize("terminal", [False, True])
def test_tables(terminal: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=140, color_system=None)
    machine = bench_output.describe_machine(["rich", "no-such-package"])
    bench_output.show(console, [make_report()], {**machine, "load": 0.0})
    text = out.getvalue()
    assert ("│" in text) == terminal
    for part in ("6.94%", "17.50", "512 MiB", "10.00-40.00", "2.50 missed", "a [note] of 3", "rich "):
        assert part in text
    assert "provisional" not in text
    assert "no-such-package" not in text


def test_a_busy_machine_makes_figures_provisional() -> None:
    machine = {**bench_output.describe_machine([]), "cores": 2, "load": 3.0}
    assert "provisional" in bench_output.machine_line(machine)


# -- measuring processes ----------------------------------------------------------------------------------

RUNNERS = """
import os
from dataclasses import dataclass
from sensorium.server.bench_rounds import Measurement

@dataclass
class Runner:
    mode: str
    def open(self):
        print("a library greets on standard output")
        if self.mode == "unopened":
            raise OSError("no such weights")
        return self
    def run(self, number):
        print("progress")
        if self.mode == "fails" and number:
            raise ValueError("bad round")
        if self.mode == "dies" and number:
            os._exit(7)
        return Measurement(number + 1.0, 0.5, 0.5, (str(os.getpid()), os.environ["OMP_NUM_THREADS"]), 1)
"""


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Variant]:
    """Variants whose runners lie in a module that measuring processes can import as well."""
    (tmp_path / "bench_runners.py").write_text(RUNNERS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delitem(sys.modules, "bench_runners", raising=False)
    import bench_runners

    return lambda mode: Variant(mode, "w", False, bench_runners.Runner(mode))


def test_a_process_is_kept_over_rounds_with_the_threads_it_was_given(
    runner: Callable[[str], Variant],
) -> None:
    with bench_worker.start_worker(runner("fine"), threads=3) as worker:
        first, second = worker.run(0), worker.run(1)
    assert (first.rate, second.rate) == (2.0, 4.0)
    assert first.outputs == second.outputs
    assert first.outputs[1] == "3"


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("unopened", "w: unopened: OSError: no such weights"),
        ("fails", "w: fails: ValueError: bad round"),
        ("dies", "w: dies: the process ended with 7"),
    ],
)
def test_failures_are_told_in_a_line(runner: Callable[[str], Variant], mode: str, message: str) -> None:
    def measure() -> None:
        with bench_worker.start_worker(runner(mode), threads=1) as worker:
            worker.run(0)
            worker.run(1)

    with pytest.raises(BenchFailed, match=re.escape(message)):
        measure()


# -- the command ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["speech", "--against", "vosk"],
        ["speech", "--clients", "0"],
        ["speech", "--clients", "1,x"],
        ["speech", "--lengths", "3,nan"],
        ["speech", "--rounds", "0"],
        ["no-such-benchmark"],
        [],
    ],
)
def test_flags_that_cannot_be(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *arguments])
    assert caught.value.code == 1
    assert "error:" in capsys.readouterr().err


def test_every_benchmark_keeps_to_the_frame() -> None:
    for module in bench.BENCHMARKS.values():
        assert module.SUMMARY
        assert bench.NOBODY not in module.PEERS
