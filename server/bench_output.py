"""How reports are shown and written, and the machine that they belong to."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import orjson
import torch
from rich.console import Console
from rich.table import Table

from .bench_rows import Figure, Range, Report, Row

MIB = 1 << 20
BUSY = 0.25  # load per core above which other work disturbs the figures
ROW_COLUMNS = ("work", "against", "ours", "theirs", "ratio", "min-max", "target")


def describe_machine(packages: Sequence[str]) -> dict[str, Any]:
    """The machine and the versions that figures belong to; nothing that tells which machine it was."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
        "memory_gib": round(memory / 2**30),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("sensorium", "torch", *packages)},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def machine_line(machine: Mapping[str, Any]) -> str:
    """The description in one line, with a warning where other work was under way."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    line = (
        f"{machine['cores']} cores ({machine['vector_instructions']}), {machine['memory_gib']} GiB; "
        f"Python {machine['python']}, {versions}"
    )
    if machine["load"] > BUSY * machine["cores"]:
        line += f"; other work was running (load {machine['load']}): the figures are provisional"
    return line


def write_json(path: Path, reports: Sequence[Report], machine: Mapping[str, Any]) -> None:
    """{"rows": […], "figures": […], "settings": {…}, "machine": {…}}, whole or not at all. Raises OSError."""
    body = {
        "rows": [row.as_json(report.unit) for report in reports for row in report.rows],
        "figures": [
            {"benchmark": report.benchmark, "unit": report.unit, **_figure_json(figure)}
            for report in reports
            for figure in report.figures
        ],
        "settings": {report.benchmark: dict(report.settings) for report in reports},
        "machine": dict(machine),
    }
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_bytes(orjson.dumps(body, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    beside.replace(path)


def _figure_json(figure: Figure) -> dict[str, Any]:
    return {
        "name": figure.name,
        "work": figure.work,
        "rounds": figure.rounds,
        "median": figure.median,
        "range": figure.range,
        "per_cpu_second": figure.per_cpu_second,
        "word_error_rate": figure.error_rate,
        "peak_rss_mib": round(figure.peak_rss / MIB, 1),
    }


def show(console: Console, reports: Sequence[Report], machine: Mapping[str, Any]) -> None:
    """Prints every table and what it means: rich tables on a terminal, aligned text otherwise."""
    for report in reports:
        _print_table(console, _figure_columns(report.unit), [_figure_cells(f) for f in report.figures])
        if any(row.against for row in report.rows):
            _print_table(console, ROW_COLUMNS, [_row_cells(row) for row in report.rows])
        for note in report.notes:
            _print_line(console, note)
    _print_line(console, machine_line(machine))


def _figure_columns(unit: str) -> tuple[str, ...]:
    return ("work", "by", unit, "min-max", "a CPU second", "word errors", "peak memory")


def _figure_cells(figure: Figure) -> tuple[str, ...]:
    errors = "-" if figure.error_rate is None else f"{figure.error_rate:.2%}"
    speeds = (_number(figure.median), _span(figure.range), _number(figure.per_cpu_second))
    return figure.work, figure.name, *speeds, errors, f"{figure.peak_rss / MIB:,.0f} MiB"


def _row_cells(row: Row) -> tuple[str, ...]:
    target = "-" if row.target is None else f"{row.target:.2f} {'reached' if row.reached else 'missed'}"
    cells = (row.name, row.against or "-", _number(row.ours), _number(row.theirs))
    return (*cells, _number(row.ratio), _span(row.ratio_range), target)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"


def _span(value: Range | None) -> str:
    return "-" if value is None else f"{value[0]:,.2f}-{value[1]:,.2f}"


def _print_table(console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """The first two columns are text and stand left, the others are figures and stand right."""
    if console.is_terminal:
        table = Table()
        for number, column in enumerate(columns):
            table.add_column(column, justify="left" if number < 2 else "right")
        for row in rows:
            table.add_row(*row)
        console.print(table)
        return
    widths = [max(len(row[number]) for row in (columns, *rows)) for number in range(len(columns))]
    for row in (columns, *rows):
        cells = [
            cell.ljust(width) if number < 2 else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        _print_line(console, "  ".join(cells).rstrip())
    _print_line(console, "")


def _print_line(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, markup=False, highlight=False)
