"""Every command and example of the README runs as it stands there."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .live import serve

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXAMPLES = EXAMPLE.findall((ROOT / "README.md").read_text())


def commands() -> list[str]:
    """The shell commands, one each, continuation lines joined."""
    blocks = [code for language, code in EXAMPLES if language == "bash"]
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server; the examples' address is replaced by its own, so that port 8000 need not be free."""
    with serve(tmp_path_factory.mktemp("readme") / "log") as server:
        yield server.url


def run(command: list[str], directory: Path, **options: object) -> str:
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=300, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder that looks like the checkout to the examples, where they may write."""
    shutil.copytree(ROOT / "samples", tmp_path / "samples")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/sensorium").symlink_to(Path(sys.executable).parent / "sensorium")
    return tmp_path


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("curl")])
def test_a_curl_command(command: str, address: str, checkout: Path) -> None:
    output = run(["bash", "-c", command.replace("http://127.0.0.1:8000", address) + " -sf"], checkout)
    if "announcement" in command:
        assert "short recording" in output
    else:
        assert output.startswith("{")


@pytest.mark.parametrize("code", [code for language, code in EXAMPLES if language == "python"])
def test_a_python_example(code: str, address: str, checkout: Path) -> None:
    output = run([sys.executable, "-P", "-c", code.replace("http://127.0.0.1:8000", address)], checkout)
    assert ("short recording" in output) or ("whisper-base" in output)


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith(".venv/bin/")])
def test_a_command_line(command: str, checkout: Path) -> None:
    output = run(["bash", "-c", command], checkout)
    if "--output out" in command:
        written = sorted(path.name for path in (checkout / "out").rglob("*.*"))
        assert written == ["announcement.wav.txt", "announcement.wav.verbose.json"]
    else:
        assert ("short recording" in output) or ("whisper-base" in output)


def test_the_two_make_targets_exist() -> None:
    makes = [c for c in commands() if c.startswith("make")]
    assert makes == ["make serve", "make test"]
    for command in makes:
        assert "pip install" in run(["make", "--dry-run", "--always-make", command.split()[1]], ROOT)


def test_every_linked_page_exists() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / target).is_file(), target
