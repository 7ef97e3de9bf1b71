"""`sensorium models`: what models there are, fetching and removing them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from ..models import store
from ..models.base import ModelError
from ..models.store import ModelEntry

OK, SOME_FAILED, UNAVAILABLE, INTERRUPTED = 0, 2, 4, 130
COLUMNS = ("name", "from", "size", "licence", "downloaded")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Adds the `models` command; `run` takes what it parses."""
    parser = subparsers.add_parser("models", help="list, download, find and remove models")
    actions = parser.add_subparsers(dest="action", metavar="{list,pull,path,rm}")
    actions.add_parser("list", help="every model that can be named, and whether it is downloaded (default)")
    pull = actions.add_parser("pull", help="download models; without a name, those served by default")
    pull.add_argument("names", nargs="*", metavar="NAME")
    where = actions.add_parser("path", help="print where a downloaded model is")
    where.add_argument("names", nargs="+", metavar="NAME")
    for action in (pull, where):
        action.add_argument("--revision", help="branch, tag or commit of a hub repository")
    remove = actions.add_parser("rm", help="delete downloaded models")
    remove.add_argument("names", nargs="+", metavar="NAME")
    return parser


def run(args: argparse.Namespace) -> int:
    """Runs the parsed command. Returns 0, 2 if some of several names failed, 4 if all did, 130 on Ctrl-C."""
    try:
        if args.action in (None, "list"):
            _show(store.list_models())
            return OK
        if args.action == "pull":
            names = args.names or store.default_models()
            return _each(names, lambda name: print(store.resolve(name, args.revision)))
        if args.action == "path":
            return _each(args.names, lambda name: print(store.path(name, args.revision)))
        return _each(args.names, store.remove)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _each(names: Sequence[str], act: Callable[[str], None]) -> int:
    failed = 0
    for name in names:
        try:
            act(name)
        except ModelError as error:
            failed += 1
            print(f"sensorium models: {error}", file=sys.stderr)
    if failed == 0:
        return OK
    return UNAVAILABLE if failed == len(names) else SOME_FAILED


def _show(entries: Sequence[ModelEntry]) -> None:
    """A table on a terminal; otherwise one line a model, its fields separated by tabs and sizes in bytes."""
    console = Console()
    if not console.is_terminal:
        for entry in entries:
            print(*_fields(entry, str(entry.size)), sep="\t")
        return
    table = Table(*COLUMNS)
    for entry in entries:
        table.add_row(*_fields(entry, f"{entry.size / 1e6:,.0f} MB"))
    console.print(table)


def _fields(entry: ModelEntry, size: str) -> tuple[str, ...]:
    downloaded = "yes" if entry.path is not None else "no"
    return entry.name, entry.source, size, entry.license or "-", downloaded
