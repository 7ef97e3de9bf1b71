"""Whatever a client sends as JSON is answered or refused; the server is never at fault."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sensorium.server.chat_protocol import ChatBody
from sensorium.server.completions_protocol import CompletionBody
from sensorium.server.embeddings import EmbeddingsBody
from sensorium.server.json_body import Body
from sensorium.server.responses_protocol import ResponsesBody
from sensorium.server.tokenize import DetokenizeBody, TokenizeBody

from .fake_text import FakeTextEngine
from .live_server import Live, error_of, live

MESSAGES = [{"role": "user", "content": "Hi"}]
VALID: dict[str, tuple[type[Body], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatBody, {"messages": MESSAGES}),
    "/v1/chat/completions/render": (ChatBody, {"messages": MESSAGES}),
    "/v1/completions": (CompletionBody, {"prompt": "Hi"}),
    "/v1/responses": (ResponsesBody, {"input": "Hi"}),
    "/v1/embeddings": (EmbeddingsBody, {"input": "Hi"}),
    "/tokenize": (TokenizeBody, {"prompt": "Hi"}),
    "/detokenize": (DetokenizeBody, {"tokens": [1]}),
}
# Grammars have tests of their own: compiling one takes long.
SLOW = {"response_format", "structured_outputs", "tools", "text"}

WORDS = st.sampled_from(
    ["", "a", "text", "user", "tool", "none", "auto", "\0", "<|im_end|>", "\ud7ff", "{{ x }}", "type", "role"]
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**66), 2**66)
    | st.integers(-3, 300)
    | st.floats(allow_nan=False, allow_infinity=False)
    | WORDS
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
)
KEYS = WORDS | st.sampled_from(
    ["content", "name", "function", "arguments", "include_usage", "1", "tool_calls"]
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=8
)


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(FakeTextEngine("some text")) as running:
        yield running


@pytest.mark.parametrize("path", VALID)
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_value_of_any_field(server: Live, path: str, data: st.DataObject) -> None:
    kind, valid = VALID[path]
    names = sorted(kind.model_fields.keys() - SLOW)
    changes = data.draw(st.dictionaries(st.sampled_from(names), VALUES, min_size=1, max_size=3))
    body = {"model": "tiny-text", **valid, **changes}
    answer = server.http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code in (200, 400, 404), (changes, answer.text)
    if answer.status_code != 200:
        error = error_of(answer)
        assert error["message"]
        assert error["param"] is None or len(error["param"]) <= 200


@settings(max_examples=60, deadline=None)
@given(VALUES)
def test_any_json(server: Live, body: Any) -> None:
    for path in VALID:
        answer = server.http.post(
            path, content=json.dumps(body), headers={"content-type": "application/json"}
        )
        assert answer.status_code == 400
        assert error_of(answer)["type"] == "invalid_request_error"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.fixed_dictionaries({"role": WORDS, "content": VALUES}, optional={"name": VALUES}), max_size=3)
)
def test_any_messages(server: Live, messages: list[Any]) -> None:
    body = {"model": "tiny-text", "messages": messages}
    answer = server.http.post("/v1/chat/completions", json=body)
    assert answer.status_code in (200, 400)
    assert answer.status_code == 200 or error_of(answer)["param"].startswith("messages")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["type", "role", "content", "call_id", "name", "arguments", "output", "summary"]),
            VALUES
            | st.sampled_from(["message", "function_call", "function_call_output", "reasoning", "assistant"])
            | st.just([{"type": "output_text", "text": "x"}]),
            max_size=5,
        ),
        max_size=3,
    )
)
def test_any_items(server: Live, items: list[Any]) -> None:
    answer = server.http.post("/v1/responses", json={"model": "tiny-text", "input": items})
    assert answer.status_code in (200, 400)
    assert answer.status_code == 200 or error_of(answer)["param"].startswith("input")


def test_the_engine_is_well_afterwards(server: Live) -> None:
    assert server.http.post("/v1/completions", json={"model": "tiny-text", "prompt": "x"}).status_code == 200
    context = server.app.state.context
    assert (context.text_queue.size, context.uploads.used) == (0, 0)
