"""The shape of the source tree: which folder may import which, flat folders, short files."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = (
    "server",
    "engine",
    "models",
    "encoders",
    "processors",
    "kernels",
)  # each may import those to its right
OTHERS = ("tests", "samples")
IGNORED = {"build", "dist", ".venv", ".types"}
MAX_LINES = 400


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).glob("*.py"))]


def imported_layers(path: Path, root: Path = ROOT) -> set[str]:
    """The layers that a file imports from, anywhere in it, relatively or absolutely."""
    package = ["sensorium", *path.relative_to(root).parts[:-1]]
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names |= {f"{module}.{alias.name}" for alias in node.names}
    found = (name.split(".") for name in names)
    return {parts[1] for parts in found if parts[0] == "sensorium" and len(parts) > 1 and parts[1] in LAYERS}


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_go_to_the_right(layer: str) -> None:
    allowed = set(LAYERS[LAYERS.index(layer) :])
    for path in sources(layer):
        wrong = imported_layers(path) - allowed
        assert not wrong, f"{path.relative_to(ROOT)} imports {', '.join(sorted(wrong))}"


def test_the_rule_sees_every_kind_of_import(tmp_path: Path) -> None:
    path = tmp_path / "models" / "x.py"
    path.parent.mkdir()
    path.write_text(
        "from ..engine import a\nfrom .. import server\nimport sensorium.kernels.b\n"
        "from sensorium.processors import c\ndef f():\n    from ..encoders.base import d\nfrom . import e\n"
    )
    assert imported_layers(path, tmp_path) == set(LAYERS)


def test_no_circles_within_a_layer() -> None:
    for layer in LAYERS:
        graph = {path.stem: siblings(path) for path in sources(layer)}
        while leaves := [name for name, used in graph.items() if not used & graph.keys()]:
            for name in leaves:
                del graph[name]
        assert not graph, f"circular imports in {layer}: {graph}"


def siblings(path: Path) -> set[str]:
    """Modules of its own folder that a file imports when it is imported itself."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            names = [node.module] if node.module else [alias.name for alias in node.names]
            found |= {name.split(".")[0] for name in names}
    return found


def test_folders_are_flat() -> None:
    for folder in (*LAYERS, *OTHERS):
        nested = [path for path in (ROOT / folder).rglob("*.py") if path.parent != ROOT / folder]
        assert not nested, f"nested sources: {nested}"


def test_the_root_holds_one_python_file() -> None:
    assert [path.name for path in ROOT.glob("*.py")] == ["__init__.py"]


def test_no_sources_elsewhere() -> None:
    homes = {*LAYERS, *OTHERS, *IGNORED}
    strays = [
        path
        for folder in ROOT.iterdir()
        if folder.is_dir() and folder.name not in homes and not folder.name.startswith(".")
        for path in folder.rglob("*.py")
    ]
    assert not strays


def test_files_are_short() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in [ROOT / "__init__.py", *sources(*LAYERS, *OTHERS)]
        if (lines := len(path.read_text().splitlines())) > MAX_LINES
    }
    assert not long
