"""Clients that leave a stream, or leave it unread: their work stops."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

import pytest

from .fake_text import FakeTextEngine
from .live_server import Live, live, wait_until

ENDLESS = "many words " * 40
PATHS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 400},
    "/v1/responses": {"input": "Hi"},
}


@pytest.fixture
def engine() -> FakeTextEngine:
    return FakeTextEngine(ENDLESS, pace=0.02)


@pytest.fixture
def server(engine: FakeTextEngine) -> Iterator[Live]:
    with live(engine) as running:
        yield running


def request(path: str, **more: object) -> bytes:
    body = json.dumps({"model": "tiny-text", **PATHS[path], **more}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + body


def connect(server: Live) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [True, False])
def test_client_that_leaves(server: Live, engine: FakeTextEngine, path: str, stream: bool) -> None:
    with connect(server) as connection:
        connection.sendall(request(path, stream=stream))
        if stream:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        wait_until(lambda: engine.sampled > 2)
    assert wait_until(lambda: engine.text_runs[-1].done) < 1
    assert engine.sampled < len(ENDLESS) / 2
    wait_until(lambda: server.app.state.context.text_queue.size == 0)


def test_client_that_leaves_before_its_prompt_is_ready(server: Live, engine: FakeTextEngine) -> None:
    with connect(server) as connection:
        connection.sendall(request("/v1/completions")[:-10])
        time.sleep(0.1)
    wait_until(lambda: server.app.state.context.uploads.used == 0)
    assert not engine.requests


def test_client_that_stops_reading() -> None:
    # Log-probabilities make the events long, so that the buffers on the way are soon full.
    engine = FakeTextEngine(ENDLESS, pace=0.0005)
    with live(engine, stream_stall_seconds=0.4) as server:
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", server.port))
            more = {"stream": True, "logprobs": True, "top_logprobs": 20, "n": 60}
            connection.sendall(request("/v1/chat/completions", **more))
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
            wait_until(lambda: engine.text_runs[-1].done, 20)
            assert engine.sampled < 60 * len(ENDLESS)
            # Without a reader, and without its leaving, everything is given back.
            wait_until(lambda: server.app.state.context.text_queue.size == 0)
        assert server.http.get("/health").status_code == 200


def test_slow_reader_gets_everything(engine: FakeTextEngine) -> None:
    engine.pace = 0.001
    with live(engine, stream_stall_seconds=0.5) as server, connect(server) as connection:
        connection.sendall(request("/v1/chat/completions", stream=True))
        received = b""
        while b"[DONE]" not in received:
            received += connection.recv(4096)
            time.sleep(0.01)
    assert engine.sampled == len(ENDLESS)
