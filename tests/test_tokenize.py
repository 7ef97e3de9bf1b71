"""POST /tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .fake_text import MAX_MODEL_LEN, FakeTextEngine
from .live_server import Live, error_of, live


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(FakeTextEngine()) as running:
        yield running


def test_shape(server: Live) -> None:
    body = {"model": "tiny-text", "prompt": "hé"}
    found = server.http.post("/tokenize", json=body).json()
    assert found == {
        "count": 3,
        "max_model_len": MAX_MODEL_LEN,
        "tokens": [104, 195, 169],
        "token_strs": None,
    }
    found = server.http.post("/tokenize", json={**body, "prompt": "hi", "return_token_strs": True}).json()
    assert found["token_strs"] == ["h", "i"]


def test_messages(server: Live) -> None:
    body = {"model": "tiny-text", "messages": [{"role": "user", "content": "<|im_end|>"}]}
    tokens = server.http.post("/tokenize", json=body).json()["tokens"]
    rendered = server.http.post("/v1/chat/completions/render", json=body).json()
    assert tokens == rendered["prompt_token_ids"]
    text = server.http.post("/detokenize", json={"model": "tiny-text", "tokens": tokens}).json()["prompt"]
    assert text == rendered["prompt"]
    bare = server.http.post("/tokenize", json={**body, "add_generation_prompt": False}).json()
    assert bare["count"] < len(tokens)


def test_model_may_be_left_out_where_there_is_one(server: Live) -> None:
    assert server.http.post("/tokenize", json={"prompt": "x"}).json()["tokens"] == [120]
    engine = FakeTextEngine()
    engine.add_text("another")
    with live(engine) as two:
        assert error_of(two.http.post("/tokenize", json={"prompt": "x"}))["param"] == "model"


@settings(max_examples=50, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=200))
def test_round_trip(server: Live, text: str) -> None:
    tokens = server.http.post("/tokenize", json={"prompt": text}).json()["tokens"]
    assert server.http.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/tokenize", {"prompt": "x", "model": "whisper-base"}, "model"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens[0]"),
    ],
)
def test_refusals(server: Live, path: str, body: dict[str, Any], param: str) -> None:
    answer = server.http.post(path, json=body)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == param
