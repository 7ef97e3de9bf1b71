"""The pages in docs/: their examples run, their tables hold every flag, field and exit code, their links lead."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from sensorium.engine.config import EngineConfig
from sensorium.server import exits, transcribe
from sensorium.server.config import ServerConfig
from sensorium.server.fields import SERVER_VAD
from sensorium.server.protocol import PARAMETERS

from .examples import ROOT, Page, headings, make_checkout, run_python, run_shell
from .live import serve

PAGES = [Page.read(path) for path in sorted((ROOT / "docs").glob("*.md"))]
README = Page.read(ROOT / "README.md")
RUN = [page for page in PAGES if page.path.name != "performance.md"]  # its benchmarks take minutes
COMMANDS = [(page.path.name, command) for page in RUN for command in page.commands]
TRANSCRIPTION = (ROOT / "docs/transcription.md").read_text()
SERVING = (ROOT / "docs/serving.md").read_text()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serve(tmp_path_factory.mktemp("docs") / "log", "--model", "whisper-base") as server:
        yield server.url


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_a_command(page: str, command: str, address: str, tmp_path: Path) -> None:
    output = run_shell(command, address, make_checkout(tmp_path))
    if "--output out" in command:
        written = sorted(path.name for path in (tmp_path / "out").rglob("*.*"))
        assert written == ["announcement.wav.txt", "announcement.wav.verbose.json"]
    elif "announcement" in command:
        assert re.search("short.{0,99}recording", output, re.DOTALL)
    else:
        assert any(text in output for text in ("whisper-base", '"status":"ok"', '"version":'))


@pytest.mark.parametrize("code", [code for page in RUN for code in page.programs])
def test_a_program(code: str, address: str, tmp_path: Path) -> None:
    assert "short recording" in run_python(code, address, make_checkout(tmp_path))


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.path.name)
def test_every_link_leads_somewhere(page: Page) -> None:
    for link in page.links():
        name, _, heading = link.partition("#")
        target = page.path.parent / name if name else page.path
        assert target.exists(), link
        assert not heading or heading in headings(target), link


def shown(default: Any) -> str:
    if default is True:
        return "on"
    if default in (None, ()):
        return "none"
    return f"{default:g}" if isinstance(default, float) else str(default)


@pytest.mark.parametrize("config", [ServerConfig, EngineConfig])
def test_every_flag_of_serve_is_documented(config: type) -> None:
    section = re.split(r"^##+ ", SERVING, flags=re.MULTILINE)
    title = {ServerConfig: "Server\n", EngineConfig: "Engine\n"}[config]
    (table,) = [part for part in section if part.startswith(title)]
    wanted = [
        f"| `--{field.name.replace('_', '-')}` | {shown(field.default)} | {field.metadata['help']} |"
        for field in fields(config)
    ]
    assert [line for line in table.splitlines() if line.startswith("| `")] == wanted


def test_every_flag_of_transcribe_is_documented() -> None:
    parser = argparse.ArgumentParser()
    transcribe.add_parser(parser.add_subparsers())
    help_text = parser._subparsers._group_actions[0].choices["transcribe"].format_help()  # type: ignore[union-attr, index]
    own = help_text.partition("\nengine:")[0].partition("\noptions:")[2]
    flags = set(re.findall(r"^  (--[a-z-]+)", own, re.MULTILINE))
    rows = "\n".join(re.findall(r"^\| `--.*$", TRANSCRIPTION, re.MULTILINE))
    assert set(re.findall(r"--[a-z-]+", rows)) == flags


def test_every_field_is_documented() -> None:
    rows = dict(re.findall(r"^\| `([a-z_]+)(?:\[\])?` \| [^|]* \| ([^|]*) \|", TRANSCRIPTION, re.MULTILINE))
    refused = TRANSCRIPTION.partition("Refused with status 400")[2].partition("\n\n")[0]
    for parameter in PARAMETERS:
        if parameter.schema.get("maxItems") == 0:
            assert f"`{parameter.name}`" in refused, parameter.name
            continue
        default = parameter.schema.get("default")
        if default is not None:
            assert rows[parameter.name].strip("` ") == str(default).removesuffix(".0").lower(), parameter.name
        assert parameter.name in rows, parameter.name
    for key in ("threshold", "prefix_padding_ms", "silence_duration_ms"):
        assert rows[key] == str(getattr(SERVER_VAD, key))


def test_every_exit_code_is_documented() -> None:
    codes = {value for name, value in vars(exits).items() if name.isupper()}
    for text in (TRANSCRIPTION, SERVING):
        table = text.partition("| exit code |")[2]
        found = {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)}
        assert found <= codes
        assert text is SERVING or found == codes
