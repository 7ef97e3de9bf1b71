"""Command-line flags generated from the fields of configuration dataclasses."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from ..engine.config import ConfigError
from . import exits

T = TypeVar("T")


class ArgumentParser(argparse.ArgumentParser):
    """argparse whose usage errors exit with 1 (its own 2 means "some failed"), without abbreviations."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(exits.USAGE, f"{self.prog}: error: {message}\n")


def add_flags(parser: argparse.ArgumentParser, config: type, title: str) -> None:
    """One flag for each field of `config`, with its help, choices and default."""
    group = parser.add_argument_group(title)
    hints = get_type_hints(config)
    for item in fields(config):
        flag = "--" + item.name.replace("_", "-")
        group.add_argument(
            flag, dest=item.name, default=argparse.SUPPRESS, **_argument(item, hints[item.name])
        )


def _argument(item: Field[Any], hint: Any) -> dict[str, Any]:
    help_text = item.metadata["help"].replace("%", "%%")
    if item.default not in (MISSING, None, ()):
        help_text += f" (default: {item.default})"
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction, "help": help_text}
    extra: dict[str, Any] = {"help": help_text}
    if "choices" in item.metadata:
        extra["choices"] = item.metadata["choices"]
    else:
        extra["metavar"] = item.metadata.get("metavar", item.name.rsplit("_", 1)[-1].upper())
    if get_origin(hint) is tuple:
        return {**extra, "action": "extend", "nargs": "+", "type": get_args(hint)[0]}
    plain = [kind for kind in get_args(hint) if kind is not type(None)] or [hint]
    return {**extra, "type": plain[0]}


def build(config: type[T], values: Mapping[str, Any]) -> T:
    """The configuration with these values. Raises ConfigError for an unknown key or an impossible value."""
    known = {item.name for item in fields(config)}  # type: ignore[arg-type]
    unknown = sorted(set(values) - known)
    if unknown:
        raise ConfigError(f"unknown setting: {', '.join(unknown)}")
    return config(**values)


def from_args(config: type[T], args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> T:
    """The configuration that the parsed flags describe; a flag left out takes its environment variable."""
    values: dict[str, Any] = {}
    for item in fields(config):  # type: ignore[arg-type]
        variable = item.metadata.get("env")
        if hasattr(args, item.name):
            value = getattr(args, item.name)
            values[item.name] = tuple(value) if isinstance(value, list) else value
        elif variable and environ.get(variable):
            values[item.name] = environ[variable]
    return build(config, values)
