"""`sensorium serve` and the command line around it, as processes of their own."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from sensorium.server import __main__, logs, serve

from .live_server import form_request, multipart, wait_until, wav

ROOT = Path(__file__).resolve().parent.parent
# The command with an engine that needs no weights. argv: seconds between its segments, then the command's.
PROGRAM = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from sensorium.server import __main__, serve
from tests.fake_engine import FakeEngine
serve.start_engine = lambda config, names: FakeEngine(pace=float(sys.argv[1]))
sys.exit(__main__.main(sys.argv[2:]))
"""
FORM = multipart(
    b'Content-Disposition: form-data; name="file"\r\n\r\n' + wav(2.0),
    b'Content-Disposition: form-data; name="model"\r\n\r\nwhisper-1',
)


def command(*argv: str, seconds: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "sensorium.server", *argv],
        capture_output=True,
        text=True,
        timeout=seconds,
    )


@contextmanager
def serving(pace: float, *argv: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The process, once it says that it is ready, and its port."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", PROGRAM, str(pace), "serve", "--port", "0", *argv],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        ready = re.search(r"ready on http://127.0.0.1:(\d+) models=whisper-base,", line)
        assert ready, line
        yield process, int(ready[1])
    finally:
        process.kill()
        process.wait()


def test_sigterm_lets_requests_finish() -> None:
    with serving(0.5) as (process, port):
        idle = httpx.Client(base_url=f"http://127.0.0.1:{port}")
        assert idle.get("/health").status_code == 200
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            connection.sendall(form_request(FORM))
            time.sleep(0.5)
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: not accepts(port))
            answer = b""
            while chunk := connection.recv(65536):
                answer += chunk
        assert b" 200 OK" in answer
        assert b"fellow Americans" in answer
        assert process.wait(10) == 0


def accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


def test_draining_has_an_end() -> None:
    with (
        serving(60, "--drain-seconds", "1") as (process, port),
        socket.create_connection(("127.0.0.1", port), timeout=20) as connection,
    ):
        connection.sendall(form_request(FORM))
        time.sleep(0.5)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
        assert process.wait(10) == 0
        assert time.monotonic() - began < 5
        assert b" 503 " in answer, "who waited until the end is told so"
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "engine_unavailable"
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


def test_interrupt() -> None:
    with serving(0) as (process, _):
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130


def test_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = command("serve", "--port", str(port))
    assert done.returncode == 4
    assert done.stderr == f"sensorium serve: cannot listen on 127.0.0.1:{port}: Address already in use\n"


def test_listener_answers_without_nagles_delay() -> None:
    with serve.bind("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("nonsense",),
        ("serve", "--port", "x"),
        ("serve", "--max-queue", "0"),
        ("transcribe",),
    ],
)
def test_usage_errors(argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(*argv) == 1
    assert "error" in capsys.readouterr().err or argv[:1] == ("serve",)


def main(*argv: str) -> int:
    """The exit code of the command line, within this process."""
    try:
        return __main__.main(argv)
    except SystemExit as ended:
        return int(ended.code or 0)


@pytest.mark.parametrize("name", ["/no/such/model", "no-such-alias"])
@pytest.mark.parametrize("argv", [("serve", "--port", "0"), ("transcribe", "x.wav")])
def test_absent_model(
    argv: tuple[str, ...], name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logs, "configure", lambda level: None)
    assert main(*argv, "--model", name) == 4
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert name in lines[0]


def test_closed_streams_do_no_harm() -> None:
    script = f"exec {sys.executable} -P -m sensorium.server transcribe - --model /no/such <&- >&- 2>&-"
    assert subprocess.run(["bash", "-c", script], timeout=60).returncode == 4


def test_version_is_quick() -> None:
    began = time.monotonic()
    done = command("--version")
    assert re.fullmatch(r"sensorium \d+\.\d+\S*\n", done.stdout)
    assert time.monotonic() - began < 3, "torch must not be imported for this"
