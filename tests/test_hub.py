"""Hub repositories, fetched by huggingface_hub from a server on this machine that speaks the hub's API."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save
from sensorium.models import hub
from sensorium.models.base import ModelError
from sensorium.models.hub import HubName, choose, parse

COMMIT, OLD_COMMIT = "c" * 40, "b" * 40
CT2 = struct.pack("<IH", 6, 12) + b"WhisperSpec\0" + b"\3\0\0\0" + b"\0" * 200
PICKLE = b"\x80\x02ctorch._utils\n" + b"x" * 200
SIDE = {"config.json": b"{}", "tokenizer.json": b"[]", "vocabulary.txt": b"a"}
OTHER = {"README.md": b"#", "modeling_x.py": b"raise SystemExit", "pytorch_model.bin": PICKLE, "x.pt": PICKLE}
WEIGHTS = save({"a": torch.ones(3)})


def shard_names(count: int) -> list[str]:
    return [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]


class Hub(ThreadingHTTPServer):
    """`repos`: repository → file → content. `fetched` counts the bytes sent of each file."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.refs = {"main": COMMIT, COMMIT: COMMIT, "v1": OLD_COMMIT, OLD_COMMIT: OLD_COMMIT}
        self.fetched: Counter[str] = Counter()
        self.tokens: set[str | None] = set()
        self.gated: set[str] = set()
        self.failing = False
        self.cut: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class HubHandler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.handle_request()

    def do_GET(self) -> None:
        self.handle_request()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.handle_request(json.loads(body) if body.startswith(b"{") else {})

    def handle_request(self, body: dict[str, Any] | None = None) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        self.server.tokens.add(self.headers.get("Authorization"))
        api = parts[:2] == ["api", "models"]
        owner, name, action, revision, *rest = [*(parts[2:] if api else parts), "", "", ""][:64]
        files = self.server.repos.get(f"{owner}/{name}")
        commit = self.server.refs.get(revision or "main")
        if self.server.failing:
            self.reply(503)
        elif files is None:
            self.reply(404, {"X-Error-Code": "RepoNotFound"})
        elif f"{owner}/{name}" in self.server.gated:
            self.reply(403, {"X-Error-Code": "GatedRepo"})
        elif commit is None:
            self.reply(404, {"X-Error-Code": "RevisionNotFound"})
        elif api and action in ("", "revision"):
            siblings = [{"rfilename": file} for file in files]
            self.reply_json({"id": f"{owner}/{name}", "sha": commit, "siblings": siblings})
        elif api and action in ("tree", "paths-info"):
            wanted = (body or {}).get("paths")
            entries = [self.entry(f, data) for f, data in files.items() if wanted is None or f in wanted]
            self.reply_json(entries)
        elif action == "resolve":
            self.reply_file(commit, "/".join(part for part in rest if part), files)
        else:
            self.reply(404)

    @staticmethod
    def entry(file: str, data: bytes) -> dict[str, Any]:
        return {"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}

    def reply_file(self, commit: str, file: str, files: dict[str, bytes]) -> None:
        if file not in files:
            self.reply(404, {"X-Error-Code": "EntryNotFound"})
            return
        data, status = files[file], 200
        headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'}
        span = self.headers.get("Range")
        if span and self.command == "GET":
            first, last = span.removeprefix("bytes=").split("-")
            end = min(int(last) + 1 if last else len(data), len(data))
            headers["Content-Range"] = f"bytes {first}-{end - 1}/{len(data)}"
            data, status = data[int(first) : end], 206
        if self.command == "GET":
            self.server.fetched[file] += len(data)
        if file in self.server.cut and self.command == "GET":
            headers["Content-Length"] = str(len(data))
            data = data[: len(data) // 2]
        self.reply(status, headers, data)

    def reply_json(self, value: object) -> None:
        self.reply(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def reply(self, status: int, headers: dict[str, str] | None = None, body: bytes = b"") -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the standard error of tests is for the tests."""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_safetensors(server: Hub) -> None:
    server.repos["o/r"] = {"model.safetensors": WEIGHTS, "model.fp32.safetensors": b"x", **SIDE, **OTHER}
    folder = hub.fetch(HubName("o/r", None), None)
    assert names(folder) == {"model.safetensors", *SIDE}
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert set(server.fetched) == {"model.safetensors", *SIDE}


def index_of(shards: list[str]) -> bytes:
    return json.dumps({"weight_map": {f"t{i}": shard for i, shard in enumerate(shards)}}).encode()


def test_shards(server: Hub) -> None:
    shards = {name: save({f"t{i}": torch.full((2,), float(i))}) for i, name in enumerate(shard_names(2))}
    index = {"model.safetensors.index.json": index_of(list(shards))}
    variant = {"model.fp32-00001-of-00001.safetensors": b"x", "pytorch_model.bin.index.json": b"{ }"}
    server.repos["o/r"] = {**shards, **index, **variant, **SIDE, **OTHER}
    assert names(hub.fetch(HubName("o/r", None), None)) == {*shards, *index, *SIDE}


def test_ctranslate2(server: Hub) -> None:
    server.repos["o/r"] = {"model.bin": CT2, **SIDE, **OTHER}
    assert names(hub.fetch(HubName("o/r", None), None)) == {"model.bin", *SIDE}
    assert not any(name in server.fetched for name in OTHER)


def test_pickle_named_model_bin_is_not_fetched(server: Hub) -> None:
    server.repos["o/r"] = {"model.bin": PICKLE * 100, **SIDE}
    with pytest.raises(ModelError, match=r"^model\.bin of o/r is not a CTranslate2 model$"):
        hub.fetch(HubName("o/r", None), None)
    assert server.fetched["model.bin"] <= 64


def test_pickles_alone(server: Hub) -> None:
    server.repos["o/r"] = {**SIDE, **OTHER}
    with pytest.raises(ModelError, match="no weights that can be read"):
        hub.fetch(HubName("o/r", None), None)
    assert not server.fetched


def test_gguf(server: Hub) -> None:
    server.repos["o/r"] = {"r-Q4_K_M.gguf": b"GGUF4", "r-Q8_0.gguf": b"GGUF8", "mmproj-r-Q8_0.gguf": b"GGUFm"}
    assert hub.fetch(HubName("o/r", "q8_0"), None).read_bytes() == b"GGUF8"
    assert hub.fetch(HubName("o/r", None), None).read_bytes() == b"GGUF4"
    with pytest.raises(ModelError, match=r"^o/r:Q2_K does not name one GGUF file; .* has: r-Q4_K_M, r-Q8_0$"):
        hub.fetch(HubName("o/r", "Q2_K"), None)
    assert set(server.fetched) == {"r-Q8_0.gguf", "r-Q4_K_M.gguf"}


def test_choice_among_gguf_files() -> None:
    parts = [f"Q5_K_M/r-Q5_K_M-0000{i}-of-00002.gguf" for i in (1, 2)]
    assert choose([*reversed(parts), "r-IQ5_K_M.gguf"], HubName("o/r", "Q5_K_M")) == parts
    assert choose(["only.gguf", "a.json"], HubName("o/r", None)) == ["only.gguf"]
    assert choose(["m.gguf", "model.safetensors"], HubName("o/r", None)) == ["model.safetensors"]
    for listing in (["a.gguf", "b.gguf"], ["a-Q8_0.gguf", "b-Q8_0.gguf"]):
        with pytest.raises(ModelError, match="does not name one GGUF file"):
            choose(listing, HubName("o/r", None))


def test_revision(server: Hub) -> None:
    server.repos["o/r"] = {"model.safetensors": WEIGHTS, **SIDE}
    assert hub.fetch(HubName("o/r", None), "v1").name == OLD_COMMIT
    assert hub.fetch(HubName("o/r", None), None).name == COMMIT
    with pytest.raises(ModelError, match=r"^o/r has no revision 'v9'$"):
        hub.fetch(HubName("o/r", None), "v9")


def test_refusals(server: Hub) -> None:
    with pytest.raises(ModelError, match=r"^the hub has no model o/nothing, or HF_TOKEN may not read it$"):
        hub.fetch(HubName("o/nothing", None), None)
    server.repos["o/gated"] = {}
    server.gated.add("o/gated")
    with pytest.raises(ModelError, match=r"^o/gated is gated: accept its terms on the hub and set HF_TOKEN$"):
        hub.fetch(HubName("o/gated", None), None)


def test_without_connection_the_cache_serves(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    server.repos["o/r"] = {"model.safetensors": WEIGHTS, **SIDE}
    name = HubName("o/r", None)
    folder = hub.fetch(name, None)
    server.fetched.clear()
    assert hub.fetch(name, None) == folder
    assert not server.fetched
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert hub.fetch(name, None) == folder
    assert hub.fetch(name, COMMIT) == folder
    for absent, revision in ((name, "v1"), (HubName("o/other", None), None)):
        with pytest.raises(ModelError, match=r"is not downloaded and the hub cannot be reached$"):
            hub.fetch(absent, revision)


def test_download_that_breaks_off(server: Hub) -> None:
    data = save({"a": torch.arange(50_000)})
    server.repos["o/r"] = {"model.safetensors": data, **SIDE}
    server.cut = {"model.safetensors"}
    with pytest.raises(ModelError, match=r"o/r .*\(\w+\)") as caught:
        hub.fetch(HubName("o/r", None), None)
    assert "\n" not in str(caught.value)
    assert hub.find_cached(HubName("o/r", None), None) is None
    server.cut = set()
    assert (hub.fetch(HubName("o/r", None), None) / "model.safetensors").read_bytes() == data


def test_offline_asks_nobody(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    server.repos["o/r"] = {"model.safetensors": WEIGHTS, **SIDE}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"is not downloaded and the hub cannot be reached$"):
        hub.fetch(HubName("o/r", None), None)
    assert not server.tokens


def test_incomplete_snapshot_is_not_served(server: Hub) -> None:
    shards = {name: save({f"t{i}": torch.ones(1) * i}) for i, name in enumerate(shard_names(2))}
    server.repos["o/r"] = {**shards, "model.safetensors.index.json": index_of(list(shards)), **SIDE}
    name = HubName("o/r", None)
    folder = hub.fetch(name, None)
    assert hub.find_cached(name, None) == folder
    (folder / next(iter(shards))).unlink()
    assert hub.find_cached(name, None) is None
    assert hub.list_cached() == []
    assert hub.find_cached(HubName("o/r", None), "v1") is None
    assert names(hub.fetch(name, None)) == set(server.repos["o/r"])  # the missing one is fetched again


def test_list_and_remove(server: Hub, tmp_path: Path) -> None:
    assert hub.list_cached() == []
    with pytest.raises(ModelError, match="o/r is not downloaded"):
        hub.remove(HubName("o/r", None))
    for repo in ("o/r", "o/a"):
        server.repos[repo] = {"model.safetensors": WEIGHTS, **SIDE}
        hub.fetch(HubName(repo, None), None)
    listed = hub.list_cached()
    assert [repo.repo_id for repo in listed] == ["o/a", "o/r"]
    assert listed[0].size == len(WEIGHTS) + sum(map(len, SIDE.values()))
    with pytest.raises(ModelError, match="removed as a whole"):
        hub.remove(HubName("o/r", "Q8_0"))
    hub.remove(HubName("o/r", None))
    assert [repo.repo_id for repo in hub.list_cached()] == ["o/a"]


def test_failing_hub(server: Hub) -> None:
    server.repos["o/r"] = {"model.safetensors": WEIGHTS, **SIDE}
    folder = hub.fetch(HubName("o/r", None), None)
    server.failing = True
    assert hub.fetch(HubName("o/r", None), None) == folder
    with pytest.raises(ModelError, match="the hub cannot be reached"):
        hub.fetch(HubName("o/x", None), None)


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("openai/whisper-large-v3", HubName("openai/whisper-large-v3", None)),
        ("o/r.x-GGUF:Q4_K_M", HubName("o/r.x-GGUF", "Q4_K_M")),
        *(
            (name, None)
            for name in ("", "r", "/o/r", "o/r/s", "../r", "o/..", "./r", "o/r:", "o/r:a/b", "o r/x", "o/r\n")
        ),
    ],
)
def test_names(name: str, parsed: HubName | None) -> None:
    assert parse(name) == parsed


def test_environment_of_the_hub_library(server: Hub, tmp_path: Path) -> None:
    """HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE in a process of their own, through the store."""
    server.repos["o/r"] = {"model.safetensors": WEIGHTS, **SIDE}
    code = "from sensorium.models import store; print(store.resolve('o/r'))"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    environment |= {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "hf_secret"}
    for offline in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-P", "-c", code],
            env=environment | {"HF_HUB_OFFLINE": offline},
            capture_output=True,
            text=True,
            check=True,
        )
        folder = Path(done.stdout.strip())
        assert folder.is_relative_to(tmp_path / "home")
        assert names(folder) == {"model.safetensors", *SIDE}
        assert ("Bearer hf_secret" in server.tokens) == bool(server.tokens) == (offline == "0")
        server.tokens.clear()
