"""Workers of the benchmark that measure nothing: they answer by script and keep a diary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sensorium.server.bench_rounds import Measurement, Variant

MIB = 1 << 20


def measured(rate: float, *texts: str) -> Measurement:
    return Measurement(rate, 1.0, 2.0, texts, 100 * MIB)


@dataclass
class FakeRunner:
    """Its rates round by round, the warm-up first."""

    rates: tuple[float, ...]
    text: str = "hello"


class FakeWorkers:
    """Starts workers that answer by script, and keeps a diary of who did what when."""

    def __init__(self) -> None:
        self.diary: list[str] = []

    @contextmanager
    def start(self, variant: Variant, threads: int = 1) -> Iterator[Any]:
        self.diary.append(f"+{variant.name}")
        try:
            yield _FakeWorker(self, variant)
        finally:
            self.diary.append(f"-{variant.name}")


class _FakeWorker:
    def __init__(self, workers: FakeWorkers, variant: Variant) -> None:
        self._workers = workers
        self._variant = variant

    def run(self, number: int) -> Measurement:
        self._workers.diary.append(f"{self._variant.name}{number}")
        runner: Any = self._variant.runner
        if isinstance(runner, FakeRunner):
            return measured(runner.rates[number], runner.text)
        rate = 30.0 if self._variant.ours else 20.0 + number
        return measured(rate, *("and so my fellow" for _ in getattr(runner.task, "recordings", [0])))


def variant(name: str, *rates: float, work: str = "w", ours: bool = False) -> Variant:
    return Variant(name, work, ours, FakeRunner(rates))  # type: ignore[arg-type]
