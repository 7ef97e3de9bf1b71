"""Fixtures that many tests share: real recordings, real models, and a package index on this machine."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from sensorium.models import store

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def media() -> Path:
    """The folder of real recordings, images and documents (SENSORIUM_MEDIA, relative to the repository)."""
    folder = (ROOT / os.environ.get("SENSORIUM_MEDIA", "../shared/media")).resolve()
    if not (folder / "audio").is_dir():
        pytest.fail("the test media are absent: set SENSORIUM_MEDIA to their folder", pytrace=False)
    return folder


@pytest.fixture(scope="session")
def whisper_base_dir() -> Path:
    """Whisper base, multilingual, from its offline pack in the real model cache."""
    return store.resolve("whisper-base")


@pytest.fixture(scope="session")
def whisper_tiny_en_dir() -> Path:
    """Whisper tiny.en from its offline pack in the real model cache."""
    return store.resolve("whisper-tiny.en")


class PackageIndex(ThreadingHTTPServer):
    """Serves `files` as a page of links for pip and counts what is fetched.

    A file named in `stalled` is sent by half, then `stalling` is set and nothing more comes.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), PackageIndexHandler)
        self.files: dict[str, bytes] = {}
        self.fetched: Counter[str] = Counter()
        self.stalled: set[str] = set()
        self.stalling = threading.Event()
        self.closing = threading.Event()

    @property
    def environment(self) -> dict[str, str]:
        """Variables that make pip look here and nowhere else."""
        url = f"http://127.0.0.1:{self.server_address[1]}/"
        return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": url, "PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "0"}


class PackageIndexHandler(BaseHTTPRequestHandler):
    server: PackageIndex

    def do_GET(self) -> None:
        name = self.path.strip("/")
        if name and name not in self.server.files:
            self.send_error(404)
            return
        links = "".join(f'<a href="{file}">{file}</a>' for file in self.server.files)
        body = self.server.files[name] if name else f"<!DOCTYPE html><html><body>{links}".encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/octet-stream" if name else "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if name in self.server.stalled:
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self.server.stalling.set()
            self.server.closing.wait()
            return
        self.server.fetched[name] += 1
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the standard error of tests is for the tests."""


@pytest.fixture
def package_index(monkeypatch: pytest.MonkeyPatch) -> Iterator[PackageIndex]:
    """An empty package index that pip uses for the length of a test."""
    index = PackageIndex()
    thread = threading.Thread(target=index.serve_forever, args=(0.05,))
    thread.start()
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in index.environment.items():
        monkeypatch.setenv(name, value)
    yield index
    index.closing.set()
    index.shutdown()
    index.server_close()
    thread.join()
