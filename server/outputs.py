"""Where the command line's results go: one file for each input and format, or standard output in order."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

STDIN = "-"
EXTENSIONS: Mapping[str, str] = {
    "txt": ".txt",
    "srt": ".srt",
    "vtt": ".vtt",
    "json": ".json",
    "verbose_json": ".verbose.json",
}


def mirrored(files: Sequence[str]) -> dict[str, Path]:
    """Input → path of its results relative to the output folder, before the format's extension.

    A path below the working folder is kept as given, any other is taken relative to the deepest folder
    common to all of those. Two files never share a result: where they would, whole paths are mirrored. One
    file under two spellings of its path is one result.
    """
    paths = [name for name in files if name != STDIN]
    outside = [Path(os.path.abspath(name)) for name in paths if not _is_below(name)]
    root = os.path.commonpath([path.parent for path in outside]) if outside else ""
    found = {name: Path("stdin") for name in files}
    for name in paths:
        below = _is_below(name)
        found[name] = Path(os.path.normpath(name) if below else os.path.relpath(os.path.abspath(name), root))
    owners: dict[Path, set[str]] = {}
    for name, result in found.items():
        owners.setdefault(result, set()).add(STDIN if name == STDIN else os.path.abspath(name))
    if any(len(files) > 1 for files in owners.values()):
        found.update((name, Path(os.path.relpath(os.path.abspath(name), "/"))) for name in paths)
    return found


def _is_below(name: str) -> bool:
    return not os.path.isabs(name) and Path(os.path.normpath(name)).parts[0] != os.pardir


class FolderOutput:
    """Writes each result into a folder as soon as it is there; a file appears whole or not at all."""

    def __init__(self, folder: Path, files: Sequence[str]) -> None:
        self._folder = folder
        self._paths = mirrored(files)

    def write(self, name: str, results: Mapping[str, bytes]) -> None:
        """results: format → contents. Raises OSError."""
        stem = self._folder / self._paths[name]
        stem.parent.mkdir(parents=True, exist_ok=True)
        for kind, contents in results.items():
            _write_whole(stem.with_name(stem.name + EXTENSIONS[kind]), contents)

    def skip(self, name: str) -> None:
        """Nothing is written for an input that failed."""


def _write_whole(path: Path, contents: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".sensorium-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(contents)
            os.fchmod(file.fileno(), 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _umask() -> int:
    """The process's file mode mask, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


class StreamOutput:
    """Standard output in the order of the inputs: each result once all before it are out."""

    def __init__(self, files: Sequence[str]) -> None:
        self._order = list(files)
        self._ready: dict[str, bytes] = {}
        self._error: OSError | None = None

    def write(self, name: str, results: Mapping[str, bytes]) -> None:
        """results: format → contents. Raises OSError, the first one again for every later result."""
        if self._error is not None:
            raise self._error
        self._ready[name] = b"".join(results.values())
        self._flush()

    def skip(self, name: str) -> None:
        if self._error is None:
            self._ready[name] = b""
            self._flush()

    def _flush(self) -> None:
        try:
            self._write_ready()
        except BrokenPipeError:
            raise
        except OSError as error:
            self._error = error
            # What the stream still holds must not fail a second time when the program ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise

    def _write_ready(self) -> None:
        while self._order and self._order[0] in self._ready:
            contents = self._ready.pop(self._order.pop(0))
            if sys.stdout.isatty():
                sys.stdout.write(contents.decode())  # a progress bar below moves out of the text's way
            else:
                sys.stdout.buffer.write(contents)
        sys.stdout.flush()
