"""`sensorium bench speech`: one round's work, what is measured, the command; one test measures truly."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sensorium.processors.audio import log_mel_spectrogram
from sensorium.processors.media import decode_audio
from sensorium.server import bench_speech
from sensorium.server.__main__ import main
from sensorium.server.bench_faster_whisper import FasterWhisperRunner, windows
from sensorium.server.bench_rounds import BenchFailed
from sensorium.server.bench_task import LOWEST_BIT, Recording, SpeechTask, vary

from .fake_bench import FakeWorkers

RATE = 16_000


# -- the work of one round --------------------------------------------------------------------------------


def tone(seconds: float, name: str = "tone") -> Recording:
    samples = np.sin(np.arange(int(seconds * RATE)) / 10).astype(np.float32) * 0.5
    return Recording(name, samples, "la la")


def test_clients_are_under_way_together_and_outputs_keep_their_order() -> None:
    barrier = threading.Barrier(3)

    def transcribe(samples: np.ndarray) -> str:
        barrier.wait(5)
        return f"{len(samples)}"

    task = SpeechTask(tuple(tone(1 + n / 10) for n in range(6)), RATE, 3)
    found = task.measure(1, transcribe)
    assert found.outputs == tuple(str(len(one.samples)) for one in task.recordings)
    assert found.amount == pytest.approx(sum(len(one.samples) for one in task.recordings) / RATE)
    assert found.peak_rss > 10 * 2**20


def test_waiting_takes_time_but_no_cpu_time() -> None:
    def wait(samples: np.ndarray) -> str:
        time.sleep(0.1)
        return ""

    found = SpeechTask((tone(1), tone(1)), RATE, 1).measure(1, wait)
    assert found.seconds >= 0.2
    assert 0 < found.cpu_seconds < 0.1


def test_the_warm_up_takes_short_recordings() -> None:
    long, short, other = tone(40), tone(5), tone(10)

    def count(samples: np.ndarray) -> str:
        return str(len(samples) // RATE)

    assert SpeechTask((long, short, other), RATE, 1).measure(0, count).outputs == ("5", "10")
    assert SpeechTask((long,), RATE, 1).measure(0, count).outputs == ("40",)


def test_rounds_differ_by_a_bit_and_share_no_cached_window(media: Path) -> None:
    samples = decode_audio(media / "audio" / "num123_mono_8bit_44k.wav").samples
    rounds = [vary(samples, RATE, number) for number in range(4)]
    for varied in rounds:
        difference = np.abs(varied - samples)
        assert 0 < np.count_nonzero(difference) <= len(samples) // RATE + 1
        assert difference.max() == LOWEST_BIT
        assert varied.min() >= -1
        assert varied.max() < 1
    assert len({log_mel_spectrogram(varied, 80).numpy().tobytes() for varied in rounds}) == 4


def test_windows_cover_a_recording() -> None:
    assert windows(30.0) == [{"start": 0.0, "end": 30.0}]
    assert windows(61.5) == [
        {"start": 0.0, "end": 30.0},
        {"start": 30.0, "end": 60.0},
        {"start": 60.0, "end": 61.5},
    ]


def test_a_peers_process_has_no_torch_in_it() -> None:
    code = "import sys, sensorium.server.bench_faster_whisper as m; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0


# -- the command ------------------------------------------------------------------------------------------


def test_what_is_measured(tmp_path: Path) -> None:
    made = bench_speech.make_variants(tmp_path, (tone(3),), (1, 8), threads=2, against=True)
    assert [(one.work, one.name) for one in made] == [
        ("speech, 1 client", "sensorium"),
        ("speech, 1 client", "faster-whisper int8, sequential"),
        ("speech, 1 client", "faster-whisper float32, sequential"),
        ("speech, 8 clients", "sensorium"),
        ("speech, 8 clients", "faster-whisper int8, sequential"),
        ("speech, 8 clients", "faster-whisper int8, batched 8"),
        ("speech, 8 clients", "faster-whisper float32, sequential"),
        ("speech, 8 clients", "faster-whisper float32, batched 8"),
    ]
    assert [one.name for one in made if one.ours] == ["sensorium"] * 2
    peers = [one.runner for one in made if isinstance(one.runner, FasterWhisperRunner)]
    assert [peer.workers * peer.threads_per_worker for peer in peers] == [2] * 6


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> FakeWorkers:
    fakes = FakeWorkers()
    monkeypatch.setattr(bench_speech, "start_worker", fakes.start)
    return fakes


def test_the_command_shows_and_writes_what_it_found(
    media: Path,
    tmp_path: Path,
    workers: FakeWorkers,
    whisper_base_dir: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    jfk, path = media / "audio" / "jfk.mp3", tmp_path / "result.json"
    code = main(
        ["bench", "speech", str(jfk), "--clients", "2", "--lengths", "11,22", "--quick", "--json", str(path)]
    )
    assert code == 0
    rows = json.loads(path.read_text())["rows"]
    assert {row["name"] for row in rows} == {"speech, 2 clients"}
    assert [row["ratio"] for row in rows] == [pytest.approx(30 / 21)] * 4
    assert json.loads(path.read_text())["settings"]["speech"]["file_seconds"] == [22.5, 11.0]
    out = capsys.readouterr().out
    assert "faster-whisper int8, batched 8" in out
    assert str(media) not in out + path.read_text()
    assert len(workers.diary) == 5 * 4  # come, warm up, one round, go


def test_ours_alone(media: Path, workers: FakeWorkers, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(media / "audio" / "f5_ref_en.wav")
    assert main(["bench", "speech", file, "--against", "none", "--quick"]) == 0
    assert "against" not in capsys.readouterr().out
    assert len(workers.diary) == 2 * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "set SENSORIUM_MEDIA"),
        (["absent.wav"], "absent.wav: cannot read: No such file or directory"),
        (["{text}"], "note.wav: "),
        (["{speech}", "--json", "no/such/folder/x.json"], "is no folder"),
        (["{speech}", "--model", "{hub}"], "use --against none"),
    ],
)
def test_usage_errors(
    arguments: list[str],
    message: str,
    media: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    workers: FakeWorkers,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("SENSORIUM_MEDIA", raising=False)
    (tmp_path / "note.wav").write_text("not sound")
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "config.json").write_text('{"model_type": "whisper"}')
    (tmp_path / "hub" / "model.safetensors").write_bytes(b"")
    places = {"text": tmp_path / "note.wav", "hub": tmp_path / "hub", "speech": media / "audio" / "jfk.mp3"}
    assert main(["bench", "speech", *(one.format(**places) for one in arguments)]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert workers.diary == []


def test_without_faster_whisper_there_is_a_hint(
    media: Path,
    monkeypatch: pytest.MonkeyPatch,
    workers: FakeWorkers,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(bench_speech, "find_spec", lambda name: None)
    file = str(media / "audio" / "jfk.mp3")
    assert main(["bench", "speech", file, "--quick"]) == 1
    assert "sensorium[bench]" in capsys.readouterr().err
    assert main(["bench", "speech", file, "--quick", "--against", "none"]) == 0


def test_an_unknown_model_and_a_failing_variant(
    media: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(media / "audio" / "jfk.mp3")
    assert main(["bench", "speech", file, "--model", "no-such-model"]) == 4

    def fail(*_: Any) -> Any:
        raise BenchFailed("w: a: it broke")

    monkeypatch.setattr(bench_speech, "run_rounds", fail)
    assert main(["bench", "speech", file, "--against", "none"]) == 3
    assert capsys.readouterr().err.splitlines()[-1] == "sensorium bench: w: a: it broke"


@pytest.mark.slow
def test_the_real_thing(media: Path, tmp_path: Path, whisper_base_dir: Path) -> None:
    """One short recording through every variant, each in its process: all hear the same words."""
    path, file = tmp_path / "result.json", media / "audio" / "f5_ref_en.wav"
    assert main(["bench", "speech", str(file), "--quick", "--lengths", "5", "--json", str(path)]) == 0
    body = json.loads(path.read_text())
    assert len(body["rows"]) == 6
    for row in body["rows"]:
        assert row["ratio"] == pytest.approx(row["ours"] / row["theirs"])
    for figure in body["figures"]:
        assert figure["word_error_rate"] == 0
        assert 0 < figure["peak_rss_mib"] < 8192
