"""Examples in Markdown pages, and running them as they stand there."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ADDRESS = "http://127.0.0.1:8000"  # of every example; a test's own server takes its place
EXAMPLE = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Page:
    """commands: the shell commands, one each, continuation lines joined. programs: in Python."""

    path: Path
    commands: list[str]
    programs: list[str]

    @classmethod
    def read(cls, path: Path) -> Page:
        examples = EXAMPLE.findall(path.read_text())
        blocks = [code for language, code in examples if language == "bash"]
        commands = [c for block in blocks for c in block.replace("\\\n", " ").splitlines() if c.strip()]
        return cls(path, commands, [code for language, code in examples if language == "python"])

    def links(self) -> list[str]:
        """Targets of links within the project: path, #heading, or both."""
        return re.findall(r"\]\(([^):]+)\)", self.path.read_text())


def headings(path: Path) -> set[str]:
    """The page's headings as links name them."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def run(command: list[str], directory: Path) -> str:
    """What the command prints; it must succeed."""
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_shell(command: str, address: str, directory: Path) -> str:
    failing = re.sub(r"\bcurl\b", "curl -sf", command)  # by itself curl is content with an error's body
    return run(["bash", "-o", "pipefail", "-c", failing.replace(ADDRESS, address)], directory)


def run_python(code: str, address: str, directory: Path) -> str:
    return run([sys.executable, "-P", "-c", code.replace(ADDRESS, address)], directory)


def make_checkout(folder: Path) -> Path:
    """Makes a folder that looks like the checkout to the examples, where they may write."""
    shutil.copytree(ROOT / "samples", folder / "samples")
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/sensorium").symlink_to(Path(sys.executable).parent / "sensorium")
    return folder
