"""Runs the HTTP application over a real socket, and speaks raw bytes to it."""

from __future__ import annotations

import io
import json
import socket
import threading
import time
import wave
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import uvicorn
from fastapi import FastAPI
from openai import OpenAI
from sensorium.server.app import create_app
from sensorium.server.config import ServerConfig
from sensorium.server.serve import bind

from .fake_engine import FakeEngine

BOUNDARY = b"boundary-of-the-test"


def wav(seconds: float, rate: int = 16_000) -> bytes:
    """A quiet tone as a 16-bit WAV file."""
    time_axis = np.arange(int(seconds * rate)) / rate
    samples = (np.sin(time_axis * 440 * 2 * np.pi) * 3000).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes(samples.tobytes())
    return file.getvalue()


class Live:
    """A server under test: its engine, its address and clients for it."""

    def __init__(self, engine: FakeEngine, app: FastAPI, port: int) -> None:
        self.engine = engine
        self.app = app
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=20)
        self.openai = OpenAI(base_url=f"{self.url}/v1", api_key="sk-test", max_retries=0, timeout=20)

    def post(
        self, path: str = "transcriptions", file: bytes | None = None, name: str = "a.wav", **form: Any
    ) -> httpx.Response:
        """A form sent by httpx; keyword arguments are its fields, a list repeats one."""
        form.setdefault("model", "whisper-base")
        data = {key: value for key, value in form.items() if value is not None}
        files = {"file": (name, wav(5.0) if file is None else file)}
        return self.http.post(f"/v1/audio/{path}", data=data, files=files)

    def raw(self, request: bytes) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the answer to these bytes; the connection is closed."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=20) as connection:
            connection.sendall(request)
            received = b""
            while chunk := connection.recv(65536):
                received += chunk
        head, _, body = received.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        return int(first.split()[1]), headers, body

    def raw_form(self, *parts: bytes, boundary: bytes = BOUNDARY) -> tuple[int, Any]:
        """Status and JSON of the answer to a form made of these parts (headers, blank line, content)."""
        status, _, body = self.raw(form_request(multipart(*parts, boundary=boundary), boundary=boundary))
        return status, json.loads(body)


def multipart(*parts: bytes, boundary: bytes = BOUNDARY) -> bytes:
    return (
        b"".join(b"--" + boundary + b"\r\n" + part + b"\r\n" for part in parts) + b"--" + boundary + b"--\r\n"
    )


def form_request(body: bytes, boundary: bytes = BOUNDARY, headers: Sequence[bytes] = ()) -> bytes:
    lines = [
        b"POST /v1/audio/transcriptions HTTP/1.1",
        b"Host: localhost",
        b"Connection: close",
        b"Content-Type: multipart/form-data; boundary=" + boundary,
        b"Content-Length: %d" % len(body),
        *headers,
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


@contextmanager
def live(engine: FakeEngine | None = None, **config: Any) -> Iterator[Live]:
    """A server on a free port, stopped at the end."""
    engine = engine or FakeEngine()
    app = create_app(engine, ServerConfig(**config))  # type: ignore[arg-type]
    listener = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, ws="none"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield Live(engine, app, listener.getsockname()[1])
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10)
        listener.close()


def wait_until(condition: Any, seconds: float = 10.0) -> float:
    """Waits for the condition and returns how long that took."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            raise AssertionError("the condition never came true")
        time.sleep(0.01)
    return time.monotonic() - began


def error_of(response: httpx.Response) -> Mapping[str, Any]:
    """The error object, which must have exactly the four keys."""
    error = response.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    return error
