"""The command line: `sensorium COMMAND …`.

Exit codes of every command: 0 ok, 1 usage, 2 some failed, 3 all failed, 4 model or server unavailable,
130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module, metadata

from . import exits
from .flags import ArgumentParser

# command → module with add_parser(subparsers) and run(args) → exit code
COMMANDS = {"serve": "serve", "transcribe": "transcribe", "models": "models_cli", "bench": "bench"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; usage errors raise SystemExit."""
    _fill_standard_streams()
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = ArgumentParser("sensorium", description="One engine that hears, sees and reads.")
    version = f"sensorium {metadata.version('sensorium')}"
    parser.add_argument("--version", action="version", version=version)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    # Commands import torch, which takes seconds: only the one that is asked for, and none for the version.
    asked = arguments[0] if arguments else ""
    chosen = [asked] if asked in COMMANDS else [] if asked == "--version" else list(COMMANDS)
    modules = {name: import_module(f".{COMMANDS[name]}", __package__) for name in chosen}
    for module in modules.values():
        module.add_parser(subparsers)
    args = parser.parse_args(arguments)
    try:
        return int(modules[args.command].run(args))
    except KeyboardInterrupt:
        print("sensorium: interrupted", file=sys.stderr)
        return exits.INTERRUPTED
    except BrokenPipeError:
        # The reader of standard output has gone; nothing may try to flush into it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exits.SOME_FAILED


def _fill_standard_streams() -> None:
    """Leads streams that the process was started without (`>&-`) to the null device.

    Else the next file that is opened gets the stream's number, and what is printed ends up in it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


if __name__ == "__main__":
    sys.exit(main())
