"""Models that come and go while others are served."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sensorium.engine.config import EngineConfig
from sensorium.engine.engine import Engine

from .fake_engine import FakeEngine
from .fake_text import FakeTextEngine
from .live_server import Live, error_of, live, wait_until
from .tiny_text import LLAMA, random_weights, write_tiny_text


@pytest.fixture
def server() -> Iterator[Live]:
    with live(allow_model_management=True, served_model_name=("speech=whisper-base",)) as running:
        yield running


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "another"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def post(server: Live, what: str, model: Any) -> Any:
    return server.http.post(f"/v1/models/{what}", json={"model": model})


def listed(server: Live) -> list[str]:
    return [model["id"] for model in server.http.get("/v1/models").json()["data"]]


@pytest.mark.parametrize("what", ["load", "unload"])
def test_only_where_it_is_allowed(what: str) -> None:
    with live() as server:
        answer = post(server, what, "whisper-base")
        assert answer.status_code == 403
        assert "--allow-model-management" in error_of(answer)["message"]
        assert "whisper-base" in listed(server)


def test_a_model_comes_and_goes(server: Live, files: Path) -> None:
    answer = post(server, "load", str(files))
    assert answer.status_code == 200
    assert answer.json() == server.http.get("/v1/models/another").json()
    assert answer.json()["id"] == "another"
    assert server.post(model="another").status_code == 200
    assert post(server, "unload", "another").json() == {"id": "another", "object": "model", "deleted": True}
    assert "another" not in listed(server)
    assert server.post(model="another").status_code == 404
    assert post(server, "unload", "another").status_code == 404


def test_aliases_follow_the_models(server: Live) -> None:
    assert server.post(model="whisper-1").status_code == 200
    assert len(server.engine.multilingual.asked) == 1
    assert post(server, "unload", "speech").json()["id"] == "whisper-base"
    assert listed(server) == ["org/whisper-tiny.en", "chatty", "whisper-1"]
    assert server.post(model="speech").status_code == 404
    assert server.post(model="whisper-1").status_code == 200
    assert len(server.engine.english.asked) == 1
    post(server, "unload", "org/whisper-tiny.en")
    assert listed(server) == ["chatty"]


def test_errors_name_no_folders(server: Live, files: Path, tmp_path: Path) -> None:
    (tmp_path / "damaged").mkdir()
    answer = post(server, "load", str(tmp_path / "damaged"))
    assert answer.status_code == 400
    assert error_of(answer)["message"] == "damaged/config.json is not there at all"
    answer = post(server, "load", "no such model")
    assert answer.status_code == 404
    assert error_of(answer)["param"] == "model"
    assert post(server, "load", str(files)).status_code == 200
    assert "already" in error_of(post(server, "load", str(files)))["message"]
    for wrong in ("", None, 3, "x" * 2000):
        assert post(server, "load", wrong).status_code == 400


def test_an_alias_is_no_name_for_another(server: Live, files: Path) -> None:
    renamed = files.rename(files.with_name("speech"))
    assert error_of(post(server, "load", str(renamed)))["param"] == "model"
    assert "whisper-base" in listed(server)


def test_nothing_is_loaded_into_a_dead_engine(files: Path) -> None:
    engine = FakeEngine()
    with live(engine, allow_model_management=True) as server:
        engine.dead = True
        assert post(server, "load", str(files)).status_code == 503


def test_work_on_a_model_that_goes() -> None:
    engine = FakeTextEngine("many words " * 30, pace=0.02)
    with live(engine, allow_model_management=True) as server, ThreadPoolExecutor(1) as threads:
        body = {"model": "tiny-text", "messages": [{"role": "user", "content": "Hi"}]}
        answer = threads.submit(server.http.post, "/v1/chat/completions", json=body)
        wait_until(lambda: engine.sampled > 2)
        assert post(server, "unload", "tiny-text").status_code == 200
        assert error_of(answer.result())["code"] == "model_not_found"
        assert answer.result().status_code == 404


def test_the_real_engine(tmp_path: Path) -> None:
    engine = Engine(EngineConfig(kv_cache_mb=8, slab_mb=1, threads=1))
    engine.start()
    first = write_tiny_text(tmp_path / "first", random_weights(LLAMA))
    try:
        with live(engine, allow_model_management=True) as server:  # type: ignore[arg-type]
            ask = {"model": "first", "prompt": "Hello", "max_tokens": 4, "temperature": 0}
            assert server.http.post("/v1/completions", json=ask).status_code == 404
            texts = []
            for _ in range(2):
                assert post(server, "load", str(first)).status_code == 200
                answer = server.http.post("/v1/completions", json=ask).json()
                texts.append(answer["choices"][0]["text"])
                found = server.http.post("/v1/embeddings", json={"model": "first", "input": ["a", "b"]})
                assert [len(item["embedding"]) for item in found.json()["data"]] == [LLAMA["hidden_size"]] * 2
                said = server.openai.responses.create(model="first", input="Hi", max_output_tokens=4)
                assert said.usage
                assert said.usage.output_tokens <= 4
                ranked = server.http.post("/v1/completions", json={**ask, "prompt_logprobs": 2}).json()
                first_token, *others = ranked["choices"][0]["prompt_logprobs"]
                assert first_token is None
                assert [len(entry) in (2, 3) for entry in others] == [True] * 4
                assert post(server, "unload", "first").status_code == 200
                assert server.http.post("/v1/completions", json=ask).status_code == 404
            assert texts[0] == texts[1]
            (first / "model.safetensors").unlink()
            error = error_of(post(server, "load", str(first)))
            assert str(tmp_path) not in error["message"]
    finally:
        engine.shutdown(drain=False)
