from __future__ import annotations

import io
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from sensorium.engine.config import EngineConfig
from sensorium.models.base import ModelError
from sensorium.models.speech import ChunkingStrategy, OptionError, TranscriptionOptions
from sensorium.server import transcribe
from sensorium.server.flags import ArgumentParser

from .fake_engine import SPEECH, FakeEngine
from .live_server import wait_until, wav

TEXT = "".join(said.text for said in SPEECH).strip() + "\n"


def run(engine: FakeEngine, *argv: Any) -> int:
    """The command's exit code, with this engine."""
    parser = ArgumentParser("sensorium")
    transcribe.add_parser(parser.add_subparsers())

    def start(config: EngineConfig, names: Sequence[str]) -> FakeEngine:
        if names == ["absent"]:
            raise ModelError("no model 'absent'")
        return engine

    args = parser.parse_args(["transcribe", *map(str, argv)])
    return transcribe.transcribe(args, start)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with good and bad files in it."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.wav", "b.wav", "sub/a.wav"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(wav(5.0))
    (tmp_path / "bad.mp3").write_text("not a recording")
    (tmp_path / "empty.wav").write_bytes(b"")
    return tmp_path


def test_text_on_standard_output(folder: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    engine = FakeEngine()
    assert run(engine, "a.wav") == 0
    out, err = capfdbinary.readouterr()
    assert out.decode() == TEXT
    assert err == b"", "no progress bar where there is no terminal"
    assert engine.stopped


def test_every_format_into_a_mirrored_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    formats = "txt,srt,vtt,json,verbose_json"
    code = run(
        FakeEngine(), "a.wav", "sub/a.wav", "--output", "out", "--format", formats, "--word-timestamps"
    )
    assert code == 0
    assert capsys.readouterr().out == ""
    names = sorted(str(path.relative_to("out")) for path in Path("out").rglob("*") if path.is_file())
    endings = ("json", "srt", "txt", "verbose.json", "vtt")
    assert names == [f"{stem}.{ending}" for stem in ("a.wav", "sub/a.wav") for ending in endings]
    verbose = json.loads(Path("out/a.wav.verbose.json").read_text())
    assert verbose["words"]
    assert verbose["segments"]


def test_files_that_fail_leave_the_others(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["a.wav", "bad.mp3", "missing.wav", "empty.wav", "sub", "b.wav"]
    assert run(FakeEngine(), *files, "--output", "out") == 2
    assert sorted(path.name for path in Path("out").iterdir()) == ["a.wav.txt", "b.wav.txt"]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    assert all(line.startswith("sensorium transcribe: ") for line in lines)
    assert any("missing.wav: cannot read: No such file" in line for line in lines)


def test_a_file_is_no_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine()
    assert run(engine, "a.wav", "--output", "b.wav") == 1
    assert "b.wav is not a folder" in capsys.readouterr().err
    assert not engine.runs, "told before any work is done"


def test_all_files_fail(folder: Path) -> None:
    assert run(FakeEngine(), "bad.mp3", "missing.wav") == 3


def test_output_order_is_input_order(folder: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    engine = FakeEngine()
    original = engine.multilingual.transcription

    def slow_for_long_ones(audio: Any, options: TranscriptionOptions) -> Any:
        time.sleep(0.3 if len(audio) > 16_000 else 0)
        return original(audio, options)

    engine.multilingual.transcription = slow_for_long_ones  # type: ignore[method-assign]
    (folder / "short.wav").write_bytes(wav(0.5))
    assert run(engine, "a.wav", "short.wav", "--format", "verbose_json") == 0
    durations = [json.loads(line)["duration"] for line in capfdbinary.readouterr().out.splitlines()]
    assert durations == [5.0, 0.5]
    assert len(engine.runs[0]._program.audio) == 8_000, "the short file was first in the engine"


def test_a_file_is_written_as_soon_as_it_is_done(folder: Path) -> None:
    engine = FakeEngine()
    original = engine.multilingual.transcription

    def after_the_short_one(audio: Any, options: TranscriptionOptions) -> Any:
        if len(audio) > 16_000:
            wait_until(Path("out/short.wav.txt").exists)
        return original(audio, options)

    engine.multilingual.transcription = after_the_short_one  # type: ignore[method-assign]
    (folder / "short.wav").write_bytes(wav(0.5))
    assert run(engine, "a.wav", "short.wav", "--output", "out") == 0


def test_standard_input(folder: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: Any) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(wav(2.0))))
    assert run(FakeEngine(), "-", "--format", "json") == 0
    assert json.loads(capfdbinary.readouterr().out)["usage"]["seconds"] == 2


def test_options(folder: Path) -> None:
    engine = FakeEngine()
    argv = "--language French --prompt P --hotwords H --temperature 0.4 --beam-size 3 --best-of 2 --seed 5"
    more = "--no-vad --chunking auto --clip-timestamps 1,2 --hallucination-silence-threshold 2"
    switches = "--no-temperature-fallback --no-condition-on-previous-text --task translate --word-timestamps"
    assert run(engine, "a.wav", *argv.split(), *more.split(), *switches.split()) == 0
    assert engine.multilingual.asked[0].options == TranscriptionOptions(
        task="translate",
        language="fr",
        prompt="P",
        hotwords="H",
        temperature=0.4,
        temperature_fallback=False,
        beam_size=3,
        best_of=2,
        condition_on_previous_text=False,
        word_timestamps=True,
        vad_filter=False,
        chunking=ChunkingStrategy(),
        clip_timestamps=(1.0, 2.0),
        hallucination_silence_threshold=2.0,
        seed=5,
    )
    engine = FakeEngine()
    assert run(engine, "a.wav") == 0
    assert engine.multilingual.asked[0].options == TranscriptionOptions()


@pytest.mark.parametrize(
    "argv",
    [
        ("--language", "klingon"),
        ("--format", "txt,srt"),
        ("--kv-cache-mb", "1"),
    ],
)
def test_usage(folder: Path, argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(FakeEngine(), "a.wav", *argv) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("a", "--format", "doc"),
        ("a", "--temperature", "2"),
        ("a", "--beam-size", "9"),
        ("a", "--clip-timestamps", "2,1"),
        ("a", "--max-audio-seconds", "inf"),
    ],
)
def test_usage_errors_of_the_parser(folder: Path, argv: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit, match="1"):
        run(FakeEngine(), *argv)


def test_absent_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(FakeEngine(), "a.wav", "--model", "absent") == 4
    assert capsys.readouterr().err == "sensorium transcribe: no model 'absent'\n"


def test_too_long(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(FakeEngine(), "a.wav", "--max-audio-seconds", "2") == 3
    assert "--max-audio-seconds" in capsys.readouterr().err


def test_failures_of_the_engine(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine()
    engine.fail_after = 1
    assert run(engine, "a.wav") == 3
    engine = FakeEngine()
    engine.multilingual.refuse = OptionError("prompt", "cannot be used")
    assert run(engine, "a.wav") == 3
    assert "a.wav: prompt: cannot be used" in capsys.readouterr().err
    engine = FakeEngine()
    engine.dead = True
    assert run(engine, "a.wav", "b.wav") == 4


def test_fault_of_one_file_is_reported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine()

    def broken(audio: Any, options: Any) -> Any:
        raise RuntimeError("0xdeadbeef")

    engine.multilingual.transcription = broken  # type: ignore[method-assign]
    assert run(engine, "a.wav", "bad.mp3") == 3
    assert "0xdeadbeef" not in capsys.readouterr().err


def test_interruption_stops_the_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(pace=30.0)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        wait_until(lambda: len(engine.runs) == 2)
        raise KeyboardInterrupt

    monkeypatch.setattr("sensorium.server.batch.wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(engine, "a.wav", "b.wav", "--output", "out")
    assert all(run.aborted_at for run in engine.runs)
    assert engine.stopped
