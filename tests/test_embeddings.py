"""POST /v1/embeddings with the real client, against pooled states that a test knows."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import OpenAI
from sensorium.engine.config import EngineConfig
from sensorium.engine.engine import Engine

from .fake_text import HIDDEN, FakeTextEngine, engine_of, pooled_state, prompt_of
from .live_server import Live, error_of, live
from .tiny_text import LLAMA, random_weights, write_tiny_text


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(FakeTextEngine()) as running:
        yield running


@pytest.fixture
def client(server: Live) -> OpenAI:
    return server.openai


def post(server: Live, **body: Any) -> Any:
    return server.http.post("/v1/embeddings", json={"model": "tiny-text", "input": "Hi", **body})


def vector(answer: Any, index: int = 0) -> np.ndarray:
    return np.array(answer.json()["data"][index]["embedding"], np.float32)


def test_shape(server: Live, client: OpenAI) -> None:
    found = client.embeddings.create(model="tiny-text", input="Hello")
    assert (found.object, found.model) == ("list", "tiny-text")
    assert (found.usage.prompt_tokens, found.usage.total_tokens) == (5, 5)
    [item] = found.data
    assert (item.object, item.index, len(item.embedding)) == ("embedding", 0, HIDDEN)
    state = pooled_state(engine_of(server).requests[-1]).numpy()
    np.testing.assert_allclose(item.embedding, state / np.linalg.norm(state), rtol=1e-5)
    assert np.linalg.norm(item.embedding) == pytest.approx(1, abs=1e-6)


def test_base64_is_the_same_numbers(server: Live) -> None:
    plain = vector(post(server))
    sent = post(server, encoding_format="base64").json()["data"][0]["embedding"]
    assert np.array_equal(np.frombuffer(base64.b64decode(sent), "<f4"), plain)


@pytest.mark.parametrize(
    ("given", "texts"),
    [("a b", ["a b"]), (["a", "b c"], ["a", "b c"]), ([104, 105], ["hi"]), ([[104], [105, 33]], ["h", "i!"])],
)
def test_inputs(server: Live, given: Any, texts: list[str]) -> None:
    before = len(engine_of(server).requests)
    answer = post(server, input=given)
    requests = engine_of(server).requests[before:]
    assert sorted(prompt_of(request) for request in requests) == sorted(texts)
    assert [item["index"] for item in answer.json()["data"]] == list(range(len(texts)))
    for index, text in enumerate(texts):
        assert np.array_equal(vector(answer, index), vector(post(server, input=text)))
    assert answer.json()["usage"]["prompt_tokens"] == sum(map(len, texts))


def test_dimensions(server: Live, client: OpenAI) -> None:
    whole = vector(post(server))
    found = client.embeddings.create(model="tiny-text", input="Hi", dimensions=5).data[0].embedding
    np.testing.assert_allclose(found, whole[:5] / np.linalg.norm(whole[:5]), rtol=1e-5)
    assert np.array_equal(vector(post(server, dimensions=HIDDEN)), whole)


def test_pooling(server: Live) -> None:
    last = vector(post(server))
    assert engine_of(server).requests[-1].params.pooling == "last"
    assert engine_of(server).requests[-1].params.max_tokens == 0
    mean = vector(post(server, pooling="mean"))
    assert engine_of(server).requests[-1].params.pooling == "mean"
    assert not np.allclose(last, mean)


def test_truncation_is_the_clients_wish(server: Live) -> None:
    assert error_of(post(server, input="x" * 1000))["code"] == "context_length_exceeded"
    assert post(server, input="x" * 1000, truncate_prompt_tokens=3).status_code == 200
    assert prompt_of(engine_of(server).requests[-1]) == "xxx"


def test_a_state_without_direction_is_an_error_of_the_server(server: Live) -> None:
    assert post(server, input="zero").status_code == 500


def test_the_real_engine(tmp_path: Path) -> None:
    path = write_tiny_text(tmp_path / "first", random_weights(LLAMA))
    engine = Engine(EngineConfig(kv_cache_mb=8, slab_mb=1, threads=1))
    loaded = engine.load("first", path)
    engine.start()
    texts = ["x" * 40 + "a", "x" * 40 + "b", "short"]
    try:
        with live(engine) as server:  # type: ignore[arg-type]
            for pooling in ("last", "mean"):
                found = [
                    [vector(post(server, model="first", input=text, pooling=pooling)) for text in texts]
                    for _ in range(2)  # the second time out of the prefix cache
                ]
                together = post(server, model="first", input=texts, pooling=pooling)
                for index in range(len(texts)):
                    np.testing.assert_allclose(found[0][index], found[1][index], atol=1e-5)
                    np.testing.assert_allclose(found[0][index], vector(together, index), atol=1e-5)
                assert not np.allclose(found[0][0], found[0][1], atol=1e-3)
    finally:
        engine.shutdown(drain=False)
    assert loaded.processor.info.config["hidden_size"] == len(found[0][0])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": [10**6]}, "input"),
        ({"input": None}, "input"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": HIDDEN + 1}, "dimensions"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"pooling": "max"}, "pooling"),
        ({"model": "whisper-base"}, "model"),
        ({"model": "chatty"}, "model"),
    ],
)
def test_refusals(server: Live, body: dict[str, Any], param: str) -> None:
    before = len(engine_of(server).requests)
    answer = post(server, **body)
    assert answer.status_code == 400, answer.text
    assert error_of(answer)["param"] == param
    assert len(engine_of(server).requests) == before


def test_unknown_model(server: Live) -> None:
    assert post(server, model="nope").status_code == 404
