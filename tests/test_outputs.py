from __future__ import annotations

import io
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sensorium.server.outputs import FolderOutput, StreamOutput, mirrored


@pytest.mark.parametrize(
    ("files", "results"),
    [
        (["a/b.mp3", "a/c.mp3"], ["a/b.mp3", "a/c.mp3"]),
        (["b.mp3", "b.wav"], ["b.mp3", "b.wav"]),
        (["./x/../a.mp3", "-"], ["a.mp3", "stdin"]),
        (["/data/x/a.mp3"], ["a.mp3"]),
        (["/data/x/a.mp3", "/data/y/a.mp3"], ["x/a.mp3", "y/a.mp3"]),
        (["../x/a.mp3", "../y/a.mp3"], ["x/a.mp3", "y/a.mp3"]),
        (["a.mp3", "/data/a.mp3"], ["work/a.mp3", "data/a.mp3"]),
        (["stdin", "-"], ["work/stdin", "stdin"]),
        (["x/a.mp3", "./x/../x/a.mp3", "y/b.mp3"], ["x/a.mp3", "x/a.mp3", "y/b.mp3"]),
        (["a/f", "/work/a/f", "f"], ["work/a/f", "work/a/f", "work/f"]),
    ],
)
def test_mirrored(files: list[str], results: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getcwd", lambda: "/work")
    assert list(mirrored(files).items()) == [
        (name, Path(path)) for name, path in zip(files, results, strict=True)
    ]


PARTS = st.sampled_from(["a", "b", "..", "."])
NAMES = st.builds(
    lambda root, parts: root + "/".join([*parts, "f"]), st.sampled_from(["", "/"]), st.lists(PARTS)
)


@given(st.lists(NAMES, unique=True, max_size=6))
def test_different_files_have_different_results_inside_the_folder(names: list[str]) -> None:
    found = mirrored(names)
    results = {os.path.abspath(name): path for name, path in found.items()}
    assert len(set(results.values())) == len(results)
    for path in found.values():
        assert not path.is_absolute()
        assert ".." not in path.parts


def test_folder_is_written_whole(tmp_path: Path) -> None:
    output = FolderOutput(tmp_path / "out", ["a/b.mp3"])
    output.write("a/b.mp3", {"srt": b"1", "verbose_json": b"{}", "json": b"[]"})
    written = {path.name: path.read_bytes() for path in (tmp_path / "out" / "a").iterdir()}
    assert written == {"b.mp3.srt": b"1", "b.mp3.verbose.json": b"{}", "b.mp3.json": b"[]"}
    mask = os.umask(0)
    os.umask(mask)
    mode = (tmp_path / "out" / "a" / "b.mp3.srt").stat().st_mode
    assert stat.S_IMODE(mode) == 0o666 & ~mask


def test_failed_write_leaves_nothing(tmp_path: Path) -> None:
    output = FolderOutput(tmp_path, ["x"])
    (tmp_path / "x.txt").mkdir()
    with pytest.raises(OSError, match="directory"):
        output.write("x", {"txt": b"t"})
    assert [path.name for path in tmp_path.iterdir()] == ["x.txt"]


def test_stream_keeps_the_order_of_the_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout = io.TextIOWrapper(io.BytesIO())
    monkeypatch.setattr("sys.stdout", stdout)
    output = StreamOutput(["a", "b", "c"])
    output.write("c", {"txt": b"C\n"})
    assert stdout.buffer.getvalue() == b""
    output.write("a", {"txt": b"A\n"})
    assert stdout.buffer.getvalue() == b"A\n"
    output.skip("b")
    assert stdout.buffer.getvalue() == b"A\nC\n"


PROGRAM = """
from sensorium.server.outputs import StreamOutput
out = StreamOutput(["a", "b"])
errors = 0
for name in "ab":
    try:
        out.write(name, {"txt": b"text"})
    except OSError:
        errors += 1
        out.skip(name)
raise SystemExit(errors)
"""


def test_a_full_disk_fails_each_result_and_nothing_else() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-P", "-c", PROGRAM], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert (done.returncode, done.stderr) == (2, "")
