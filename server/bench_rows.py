"""What a benchmark reports: figures of each variant by itself, and rows that compare them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .bench_rounds import Measurement, Results, Variant

Range = tuple[float, float]


@dataclass(frozen=True)
class Figure:
    """One variant by itself: median and range over the counted rounds, in the report's unit.

    per_cpu_second: median of the work done in a second of one core's time.
    error_rate: words wrong in a known text, 0 … ; None where no text is known. peak_rss: bytes.
    """

    name: str
    work: str
    rounds: int
    median: float
    range: Range
    per_cpu_second: float
    error_rate: float | None
    peak_rss: int


@dataclass(frozen=True)
class Row:
    """One comparison: medians of both sides, and the median of the ratios round by round (more is better).

    name: the work. against: the peer, None where ours stands alone. target: ratio to reach, if one is set.
    """

    name: str
    ours: float
    against: str | None = None
    theirs: float | None = None
    ratio: float | None = None
    ratio_range: Range | None = None
    target: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reached(self) -> bool | None:
        """Whether the target is reached; None without one."""
        if self.target is None or self.ratio is None:
            return None
        return self.ratio >= self.target

    def as_json(self, unit: str) -> dict[str, Any]:
        return {
            "name": self.name,
            "against": self.against,
            "unit": unit,
            "ours": self.ours,
            "theirs": self.theirs,
            "ratio": self.ratio,
            "ratio_range": self.ratio_range,
            "target": self.target,
            "reached": self.reached,
            **self.details,
        }


@dataclass(frozen=True)
class Report:
    """What one benchmark found. notes: what was measured and how, one line each, for whoever reads it."""

    benchmark: str
    unit: str
    rows: Sequence[Row]
    figures: Sequence[Figure]
    settings: Mapping[str, Any]
    notes: Sequence[str]


def make_figures(
    variants: Sequence[Variant],
    results: Results,
    error_rate: Callable[[Sequence[Measurement]], float | None],
) -> list[Figure]:
    """One a variant. error_rate: of what a variant made in its rounds."""
    figures = []
    for variant in variants:
        measured = results[variant.label]
        rates = [one.rate for one in measured]
        peak = max(one.peak_rss for one in measured)
        figures.append(
            Figure(
                variant.name,
                variant.work,
                len(measured),
                statistics.median(rates),
                (min(rates), max(rates)),
                statistics.median(one.amount / one.cpu_seconds for one in measured),
                error_rate(measured),
                peak,
            )
        )
    return figures


def make_rows(variants: Sequence[Variant], results: Results, targets: Mapping[str, float]) -> list[Row]:
    """Each peer beside our variant of the same work; ours alone where it has no peer.

    targets: label of a peer's variant → ratio to reach.
    """
    rows = []
    for ours in (variant for variant in variants if variant.ours):
        peers = [variant for variant in variants if variant.work == ours.work and not variant.ours]
        mine = results[ours.label]
        median = statistics.median(one.rate for one in mine)
        if not peers:
            rows.append(Row(ours.work, median))
        for peer in peers:
            theirs = results[peer.label]
            ratios = [a.rate / b.rate for a, b in zip(mine, theirs, strict=True)]
            rows.append(
                Row(
                    ours.work,
                    median,
                    peer.name,
                    statistics.median(one.rate for one in theirs),
                    statistics.median(ratios),
                    (min(ratios), max(ratios)),
                    targets.get(peer.label),
                )
            )
    return rows
