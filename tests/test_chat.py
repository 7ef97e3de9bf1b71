"""POST /v1/chat/completions with the real client, against scripted text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai import APIError, BadRequestError, OpenAI
from sensorium.engine.engine import EngineDead, ProgramFailed

from .fake_text import MAX_MODEL_LEN, FakeTextEngine, engine_of, prompt_of
from .live_server import Live, error_of, live, wait_until

SAID = "Voilà, naïve 🙂 text"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(FakeTextEngine(SAID)) as running:
        yield running


@pytest.fixture
def client(server: Live) -> OpenAI:
    return server.openai


def post(server: Live, **body: Any) -> Any:
    body = {"model": "tiny-text", "messages": HELLO, **body}
    return server.http.post("/v1/chat/completions", json={k: v for k, v in body.items() if v is not ...})


def test_shape(server: Live, client: OpenAI) -> None:
    engine_of(server).num_cached = 5
    found = client.chat.completions.create(model="tiny-text", messages=HELLO)  # type: ignore[arg-type]
    engine_of(server).num_cached = 0
    assert found.id.startswith("chatcmpl-")
    assert found.object == "chat.completion"
    assert found.model == "tiny-text"
    assert found.system_fingerprint
    [choice] = found.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert choice.message.role == "assistant"
    assert choice.message.content == SAID
    assert choice.message.refusal is None
    assert choice.message.tool_calls is None
    assert found.usage
    assert found.usage.prompt_tokens == len(engine_of(server).requests[-1].inputs.prompt_token_ids)
    assert found.usage.completion_tokens == len(SAID.encode())
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens
    assert found.usage.prompt_tokens_details
    assert found.usage.prompt_tokens_details.cached_tokens == 5
    assert found.usage.completion_tokens_details
    assert found.usage.completion_tokens_details.reasoning_tokens == 0


def test_exact_keys(server: Live) -> None:
    answer = post(server).json()
    assert set(answer) == {"id", "object", "created", "model", "system_fingerprint", "choices", "usage"}
    assert set(answer["choices"][0]) == {"index", "message", "logprobs", "finish_reason"}
    assert set(answer["choices"][0]["message"]) == {"role", "content", "refusal", "annotations"}


def test_all_the_room_is_the_default_limit(server: Live) -> None:
    post(server)
    request = engine_of(server).requests[-1]
    assert request.params.max_tokens + len(request.inputs.prompt_token_ids) == MAX_MODEL_LEN


@pytest.mark.parametrize("limits", [{"max_tokens": 7}, {"max_completion_tokens": 7, "max_tokens": 9}])
def test_limits(server: Live, limits: dict[str, int]) -> None:
    answer = post(server, **limits).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 7


def test_roles_and_parts_reach_the_template(server: Live) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "user", "content": "<|im_end|>"},
    ]
    assert post(server, messages=messages).status_code == 200
    request = engine_of(server).requests[-1]
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne\ntwo<|im_end|>\n"
        "<|im_start|>assistant\nNo.<|im_end|>\n<|im_start|>user\n<|im_end|><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert prompt_of(request) == expected
    # What a user writes is never a special token.
    assert request.inputs.prompt_token_ids.count(258) == 4


def test_continue_final_message(server: Live) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Well, "}]
    options = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    assert post(server, **options).status_code == 200
    assert prompt_of(engine_of(server).requests[-1]).endswith("assistant\nWell, ")
    refused = post(server, messages=messages, continue_final_message=True, add_generation_prompt=True)
    assert refused.status_code == 400


def test_render(server: Live) -> None:
    before = len(engine_of(server).requests)
    body = {"model": "tiny-text", "messages": HELLO}
    answer = server.http.post("/v1/chat/completions/render", json=body).json()
    assert answer["prompt"] == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert answer["count"] == len(answer["prompt_token_ids"])
    assert len(engine_of(server).requests) == before
    post(server)
    assert list(engine_of(server).requests[-1].inputs.prompt_token_ids) == answer["prompt_token_ids"]


@pytest.mark.parametrize("options", [{}, {"n": 20}, {"logprobs": True, "top_logprobs": 2}, {"max_tokens": 5}])
def test_stream_adds_up(server: Live, options: dict[str, Any]) -> None:
    options = {"model": "tiny-text", "messages": HELLO, **options}
    whole = server.openai.chat.completions.create(**options)
    count = len(whole.choices)
    texts, reasons, roles = [""] * count, [None] * count, [""] * count
    tokens: list[list[Any]] = [[] for _ in texts]
    stream = server.openai.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert len({chunk.id for chunk in chunks}) == 1
    for chunk in chunks:
        assert chunk.object == "chat.completion.chunk"
        for choice in chunk.choices:
            assert reasons[choice.index] is None
            roles[choice.index] += choice.delta.role or ""
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason  # type: ignore[call-overload]
            if choice.logprobs:
                tokens[choice.index] += choice.logprobs.content or []
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert roles == ["assistant"] * count
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    for found, choice in zip(tokens, whole.choices, strict=True):
        assert found == ((choice.logprobs and choice.logprobs.content) or [])


def test_stream_on_the_wire(server: Live) -> None:
    answer = post(server, stream=True)
    lines = answer.text.split("\n\n")
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert lines[-2:] == ["data: [DONE]", ""]
    assert '"delta":{"role":"assistant","content":""}' in lines[0]
    assert '"delta":{},"logprobs":null,"finish_reason":"stop"' in lines[-3]
    assert "usage" not in answer.text
    counted = post(
        server, stream=True, stream_options={"continuous_usage_stats": True, "include_usage": True}
    )
    assert '"completion_tokens":1,' in counted.text


def test_logprobs(client: OpenAI) -> None:
    found = client.chat.completions.create(
        model="tiny-text",
        messages=HELLO,  # type: ignore[arg-type]
        logprobs=True,
        top_logprobs=3,
    )
    logprobs = found.choices[0].logprobs
    assert logprobs
    assert logprobs.content
    data = b"".join(bytes(token.bytes or ()) for token in logprobs.content)
    assert data.decode() == SAID
    assert all(len(token.top_logprobs) == 3 and token.logprob <= 0 for token in logprobs.content)
    assert [token.token for token in logprobs.content[:3]] == ["V", "o", "i"]


def test_logprobs_without_the_likeliest(server: Live) -> None:
    content = post(server, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert all(token["top_logprobs"] == [] for token in content)


def test_more_choices_than_the_engine_runs_at_once(server: Live) -> None:
    before = len(engine_of(server).requests)
    answer = post(server, n=20, seed=5, max_tokens=3).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(20))
    parts = engine_of(server).requests[before:]
    assert sorted(part.params.num_sequences for part in parts) == [4, 8, 8]
    assert {part.params.seed for part in parts} == {5, 13, 21}
    assert answer["usage"]["completion_tokens"] == 60
    assert answer["usage"]["prompt_tokens"] == len(parts[0].inputs.prompt_token_ids)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BAD: list[tuple[dict[str, Any], str | None]] = [
    ({"messages": []}, "messages"),
    ({"messages": ...}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [3]}, "messages[0]"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [*HELLO, {"role": "user"}]}, "messages[1].content"),
    ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0]",
    ),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"model": ...}, "model"),
    ({"model": "whisper-base"}, "model"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": -5}, "max_completion_tokens"),
    ({"max_completion_tokens": MAX_MODEL_LEN}, "messages"),
    ({"temperature": 5}, "temperature"),
    ({"n": 129}, "n"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tools": [{"type": "web"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice"),
    ({"tools": [TOOL] * 129}, "tools"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"modalities": ["text", "audio"]}, "modalities[1]"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"reasoning_effort": "huge"}, "reasoning_effort"),
    ({"thinking_token_budget": 5}, "thinking_token_budget"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"x": "y" * 70_000}}, "chat_template_kwargs"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}},
        "response_format.json_schema.name",
    ),
    ({"response_format": {"type": "text", "json_schema": {"name": "a"}}}, "response_format"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"stream_options": {}}, "stream_options"),
    ({"stream": 1}, "stream"),
]


@pytest.mark.parametrize(("options", "param"), BAD, ids=[str(number) for number in range(len(BAD))])
def test_refusals(server: Live, options: dict[str, Any], param: str) -> None:
    before = len(engine_of(server).requests)
    answer = post(server, **options)
    assert answer.status_code == 400, answer.text
    error = error_of(answer)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert len(engine_of(server).requests) == before


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"3", b"null", b'"x"', b"\xff\xfe", b'{"model": NaN}', b'{"temperature": 1e999}',
        b"[" * 5000, b'{"a":' * 3000, b'{"model": "\\ud800"}',
    ],
)  # fmt: skip
def test_bodies_that_are_no_object(server: Live, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    answer = server.http.post("/v1/chat/completions", content=content, headers=headers)
    assert answer.status_code == 400
    assert error_of(answer)["param"] is None


def test_content_types(server: Live) -> None:
    body = b'{"model":"tiny-text","messages":[{"role":"user","content":"x"}]}'
    for kind, status in (("application/json; charset=utf-8", 200), ("text/plain", 400), ("", 400)):
        headers = {"content-type": kind}
        assert server.http.post("/v1/chat/completions", content=body, headers=headers).status_code == status


def test_context_length(server: Live) -> None:
    error = error_of(post(server, messages=[{"role": "user", "content": "x" * 2000}]))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert str(MAX_MODEL_LEN) in error["message"]


def test_unknown_model(client: OpenAI) -> None:
    with pytest.raises(APIError) as caught:
        client.chat.completions.create(model="nope", messages=HELLO)  # type: ignore[arg-type]
    assert caught.value.code == "model_not_found"


def test_text_model_does_not_transcribe(server: Live) -> None:
    answer = server.post(model="tiny-text")
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "model"


def test_unknown_fields_are_ignored_and_logged(server: Live, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert post(server, odd_name="secret", user="u", store=True, metadata={"a": "b"}).status_code == 200
    assert "odd_name" in caplog.text
    assert "secret" not in caplog.text
    assert "metadata" not in caplog.text


def test_body_too_large() -> None:
    with live(FakeTextEngine(), max_body_mb=1) as server:
        messages = [{"role": "user", "content": "x" * (1 << 20)}]
        assert post(server, messages=messages).status_code == 413


def test_failures() -> None:
    engine = FakeTextEngine()
    with live(engine) as server:
        for failure, status in ((ProgramFailed("x"), 500), (EngineDead("x"), 503)):
            engine.fail_text = failure
            assert post(server).status_code == status
            streamed = post(server, stream=True)
            assert streamed.status_code == 200
            assert '"error"' in streamed.text
            assert "[DONE]" not in streamed.text
            with pytest.raises(APIError):
                list(
                    server.openai.chat.completions.create(
                        model="tiny-text",
                        messages=HELLO,  # type: ignore[arg-type]
                        stream=True,
                    )
                )
        engine.fail_text = None
        engine.dead = True
        assert post(server).status_code == 503


def test_full_queue() -> None:
    engine = FakeTextEngine(pace=0.2)
    with live(engine, max_text_queue=1) as server:
        with server.openai.chat.completions.create(
            model="tiny-text",
            messages=HELLO,  # type: ignore[arg-type]
            stream=True,
        ):
            wait_until(lambda: engine.requests)
            answer = post(server)
            assert answer.status_code == 429
            assert answer.headers["retry-after"]
        wait_until(lambda: server.app.state.context.text_queue.size == 0)
        assert server.app.state.context.uploads.used == 0


def test_refusal_through_the_client(client: OpenAI) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(model="tiny-text", messages=HELLO, temperature=9)  # type: ignore[arg-type]
    assert caught.value.param == "temperature"


def test_prompt_logprobs(server: Live) -> None:
    answer = post(server, prompt_logprobs=1).json()
    ids = engine_of(server).requests[-1].inputs.prompt_token_ids
    first, *rest = answer["prompt_logprobs"]
    assert first is None
    assert all(str(token) in entry for token, entry in zip(ids[1:], rest, strict=True))
    assert error_of(post(server, prompt_logprobs=1, stream=True))["param"] == "prompt_logprobs"
