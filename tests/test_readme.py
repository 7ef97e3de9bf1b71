"""Every command and example of the README runs as it stands there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from .examples import ROOT, Page, make_checkout, run, run_python, run_shell
from .live import serve

README = Page.read(ROOT / "README.md")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serve(tmp_path_factory.mktemp("readme") / "log") as server:
        yield server.url


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return make_checkout(tmp_path)


@pytest.mark.parametrize("command", [c for c in README.commands if c.startswith("curl")])
def test_a_curl_command(command: str, address: str, checkout: Path) -> None:
    output = run_shell(command, address, checkout)
    if "announcement" in command:
        assert "short recording" in output
    else:
        assert output.startswith("{")


@pytest.mark.parametrize("code", README.programs)
def test_a_python_example(code: str, address: str, checkout: Path) -> None:
    output = run_python(code, address, checkout)
    if "announcement" in code:
        assert "short recording" in output
    elif "json_schema" in code:
        assert set(json.loads(output)) == {"city", "capital"}
    elif "capital of France" in code:
        assert "Paris" in output
    elif "completions" in code:
        assert output.strip()
    else:
        assert "whisper-base" in output


@pytest.mark.parametrize("command", [c for c in README.commands if c.startswith(".venv/bin/")])
def test_a_command_line(command: str, checkout: Path) -> None:
    output = run_shell(command, "", checkout)
    if "--output out" in command:
        written = sorted(path.name for path in (checkout / "out").rglob("*.*"))
        assert written == ["announcement.wav.txt", "announcement.wav.verbose.json"]
    else:
        assert ("short recording" in output) or ("whisper-base" in output)


def test_the_two_make_targets_exist() -> None:
    makes = [c for c in README.commands if c.startswith("make")]
    assert makes == ["make serve", "make test"]
    for command in makes:
        assert "pip install" in run(["make", "--dry-run", "--always-make", command.split()[1]], ROOT)


def test_every_command_is_run() -> None:
    assert {c.split()[0] for c in README.commands} == {"curl", "make", ".venv/bin/sensorium"}
