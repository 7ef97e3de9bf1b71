"""`sensorium bench`: our work beside that of others, in one interleaved run."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from rich.console import Console

from ..models.base import ModelError
from . import bench_output, bench_speech, bench_text, exits
from .bench_rounds import BenchFailed, BenchUsage, Settings
from .bench_rows import Report

ROUNDS, QUICK_ROUNDS = 3, 1
NOBODY = "none"


class Benchmark(Protocol):
    """A module that measures one kind of work, beside PEERS; versions of PACKAGES go into the result."""

    SUMMARY: str
    PEERS: tuple[str, ...]
    PACKAGES: tuple[str, ...]

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace, settings: Settings) -> Report: ...


BENCHMARKS: Mapping[str, Benchmark] = {"speech": bench_speech, "text": bench_text}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Adds the `bench` command; `run` takes what it parses."""
    parser = subparsers.add_parser("bench", help="measure speed, beside other engines")
    names = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, benchmark in BENCHMARKS.items():
        one = names.add_parser(name, help=benchmark.SUMMARY, description=f"Measures {benchmark.SUMMARY}.")
        benchmark.add_arguments(one)
        _add_common(one, benchmark.PEERS)
    return parser


def _add_common(parser: argparse.ArgumentParser, peers: Sequence[str]) -> None:
    known = ", ".join([*peers, NOBODY])

    def against(value: str) -> frozenset[str]:
        found = frozenset(value.split(",")) - {NOBODY}
        if unknown := sorted(found - set(peers)):
            raise argparse.ArgumentTypeError(f"unknown peer {unknown[0]!r}; known are {known}")
        return found

    add = parser.add_argument
    rounds = f"rounds that count, after a warm-up (default: {ROUNDS}; {QUICK_ROUNDS} with --quick)"
    add("--rounds", type=_count, metavar="N", help=rounds)
    add("--quick", action="store_true", help="little work: to see that it runs, not how fast")
    add(
        "--against",
        type=against,
        default=frozenset(peers),
        metavar="PEER,…",
        help=f"whom to measure besides: {known} (default: all)",
    )
    add("--threads", type=_count, metavar="N", help="CPU threads for each side (default: every core)")
    add("--json", type=Path, metavar="FILE", help="write the result there as well")


def _count(value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"{value!r} is not a whole number above 0")
    return int(value)


def run(args: argparse.Namespace) -> int:
    """Runs the parsed benchmark and shows what it found. Returns the exit code."""
    benchmark = BENCHMARKS[args.benchmark]
    settings = Settings(
        rounds=args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS),
        quick=args.quick,
        threads=args.threads or len(os.sched_getaffinity(0)),
        against=args.against,
        tell=_tell,
    )
    if args.json is not None and not args.json.parent.is_dir():
        return _refuse(f"--json: {args.json.parent} is no folder", exits.USAGE)
    machine = bench_output.describe_machine(benchmark.PACKAGES)
    try:
        report = benchmark.run(args, settings)
    except BenchUsage as error:
        return _refuse(str(error), exits.USAGE)
    except ModelError as error:
        return _refuse(str(error), exits.UNAVAILABLE)
    except BenchFailed as error:
        return _refuse(str(error), exits.ALL_FAILED)
    bench_output.show(Console(), [report], machine)
    if args.json is not None:
        try:
            bench_output.write_json(args.json, [report], machine)
        except OSError as error:
            return _refuse(f"{args.json}: cannot write: {error.strerror or error}", exits.SOME_FAILED)
    return exits.OK


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _refuse(message: str, code: int) -> int:
    print(f"sensorium bench: {message}", file=sys.stderr)
    return code
