"""Variants of one piece of work, run in turn: A B C … A B C …, only one at a time, each in its own process.

Whatever else the machine does meets all of them alike, so ratios within a round mean more than the rates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Protocol

WARM_UP = 0  # number of the round that is not counted


class BenchUsage(Exception):
    """The benchmark cannot be run as it was asked for; the text is one line for users."""


class BenchFailed(Exception):
    """A variant could not be measured; the text is one line for users."""


@dataclass(frozen=True)
class Measurement:
    """One variant's round: the amount of work done (its unit is the benchmark's) and the seconds it took.

    cpu_seconds: of all threads together; other work on the machine lengthens it far less than `seconds`.
    outputs: what it made, in the order of the inputs. peak_rss: bytes, of the process since it started.
    """

    amount: float
    seconds: float
    cpu_seconds: float
    outputs: tuple[str, ...]
    peak_rss: int

    @property
    def rate(self) -> float:
        return self.amount / self.seconds


class Session(Protocol):
    """A system that is loaded and ready, in the process that measures it."""

    def run(self, number: int) -> Measurement:
        """Does the work once. number: of the round, WARM_UP first; no two rounds may share cached results."""


class Runner(Protocol):
    """Opens the session. Goes to the measuring process by pickle; its module imports only what it needs."""

    def open(self) -> Session: ...


@dataclass(frozen=True)
class Variant:
    """One system, set up in one way, at one piece of work.

    work: what is done; variants of equal work are compared. ours: it is the one that the others stand beside.
    """

    name: str
    work: str
    ours: bool
    runner: Runner

    @property
    def label(self) -> str:
        return f"{self.work}: {self.name}"


class Worker(Protocol):
    """Where a variant is measured: a process of its own outside tests. Raises BenchFailed."""

    def run(self, number: int) -> Measurement: ...


@dataclass(frozen=True)
class Settings:
    """What all benchmarks are asked for. against: peers, of those known. tell: takes a line of progress."""

    rounds: int
    quick: bool
    threads: int
    against: frozenset[str]
    tell: Callable[[str], None]


Results = Mapping[str, Sequence[Measurement]]  # label of a variant → its counted rounds, in order
StartWorker = Callable[[Variant], AbstractContextManager[Worker]]


def run_rounds(
    variants: Sequence[Variant], rounds: int, start: StartWorker, tell: Callable[[str], None]
) -> Results:
    """Warms all up, then measures every variant once a round. All stay loaded. Raises BenchFailed."""
    results: dict[str, list[Measurement]] = {variant.label: [] for variant in variants}
    with ExitStack() as stack:
        workers = []
        for variant in variants:
            tell(f"loading {variant.label}")
            workers.append(stack.enter_context(start(variant)))
        for number in range(rounds + 1):
            for variant, worker in zip(variants, workers, strict=True):
                measured = worker.run(number)
                if number != WARM_UP:
                    results[variant.label].append(measured)
                title = "warm-up" if number == WARM_UP else f"round {number}/{rounds}"
                tell(f"{title}, {variant.label}: {measured.rate:.2f} in {measured.seconds:.1f} s")
    return results
