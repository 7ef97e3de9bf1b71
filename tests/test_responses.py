"""The Responses API with the real client, whole and streamed, against scripted text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError, OpenAI
from sensorium.engine.engine import ProgramFailed, RequestRefused

from .fake_text import ChatML, FakeTextEngine, prompt_of
from .live_server import Live, error_of, live, wait_until

SAID = "Voilà, naïve 🙂 text"
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Tells the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich 🙂"}}\n</tool_call>'
THOUGHT = "<think>\nLet me see.\n</think>\n\nIt is so."


@pytest.fixture(scope="module")
def engine() -> FakeTextEngine:
    engine = FakeTextEngine()
    engine.add_text("thinker", template=ChatML(thinks=True))
    return engine


@pytest.fixture(scope="module")
def server(engine: FakeTextEngine) -> Iterator[Live]:
    with live(engine) as running:
        yield running


@pytest.fixture(autouse=True)
def _reset(engine: FakeTextEngine) -> None:
    engine.said, engine.fail_text, engine.pace = SAID, None, 0.0


@pytest.fixture
def client(server: Live) -> OpenAI:
    return server.openai


def post(server: Live, **body: Any) -> Any:
    body = {"model": "tiny-text", "input": "Hello", **body}
    return server.http.post("/v1/responses", json={k: v for k, v in body.items() if v is not ...})


def events_of(server: Live, **body: Any) -> list[dict[str, Any]]:
    answer = post(server, stream=True, **body)
    assert answer.status_code == 200, answer.text
    events = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def kinds_of(events: list[dict[str, Any]]) -> list[str]:
    """The kinds of events in order, repeated ones once."""
    kinds = [event["type"].removeprefix("response.") for event in events]
    return [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]


def plain(response: dict[str, Any]) -> str:
    """A response without what is new in each."""
    text = json.dumps(response, sort_keys=True)
    items = [item[key] for item in response["output"] for key in ("id", "call_id") if key in item]
    for name in (response["id"], *items):
        text = text.replace(name, "id")
    return "".join(part for part in text.split(", ") if "_at" not in part)


def test_shape(client: OpenAI, engine: FakeTextEngine) -> None:
    found = client.responses.create(model="tiny-text", input="Hello", instructions="Be brief.")
    assert found.id.startswith("resp_")
    assert (found.object, found.status, found.model) == ("response", "completed", "tiny-text")
    assert found.output_text == SAID
    [item] = found.output
    assert item.type == "message"
    assert (item.role, item.status, item.content[0].type) == ("assistant", "completed", "output_text")
    assert (found.error, found.incomplete_details, found.instructions) == (None, None, "Be brief.")
    assert found.usage
    prompt = engine.requests[-1].inputs.prompt_token_ids
    assert found.usage.input_tokens == len(prompt)
    assert found.usage.output_tokens == len(SAID.encode())
    assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens
    assert found.usage.output_tokens_details.reasoning_tokens == 0
    assert prompt_of(engine.requests[-1]).startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user"
    )


def test_stream_through_the_client(client: OpenAI) -> None:
    text, last = "", None
    for event in client.responses.create(model="tiny-text", input="Hello", stream=True):
        last = event
        if event.type == "response.output_text.delta":
            text += event.delta
    assert text == SAID
    assert last
    assert last.type == "response.completed"
    assert last.response.output_text == SAID
    with client.responses.stream(model="tiny-text", input="Hello") as stream:
        assert stream.get_final_response().output_text == SAID


def test_order_of_events(server: Live) -> None:
    events = events_of(server)
    assert kinds_of(events) == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    first, added = events[0]["response"], events[2]["item"]
    assert (first["status"], first["output"], first["usage"]) == ("in_progress", [], None)
    assert (added["status"], added["content"]) == ("in_progress", [])
    assert events[3]["part"] == {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    assert events[-2]["item"] == events[-1]["response"]["output"][0]


@pytest.mark.parametrize(
    ("said", "options"),
    [
        (SAID, {}),
        (SAID, {"max_output_tokens": 4}),
        ("", {}),
        ("  ", {}),
        (f"Well.\n{CALL}\n{CALL}", {"tools": [WEATHER]}),
        ('{"city": "Bern"}', {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "weather"}}),
        (THOUGHT, {"model": "thinker"}),
        (SAID, {"include": ["message.output_text.logprobs"], "top_logprobs": 2}),
    ],
)
def test_streams_add_up(server: Live, engine: FakeTextEngine, said: str, options: dict[str, Any]) -> None:
    engine.said = said
    whole = post(server, **options)
    assert whole.status_code == 200, whole.text
    events = events_of(server, **options)
    final = events[-1]["response"]
    assert plain(final) == plain(whole.json())
    assert final["output"]
    texts: dict[int, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            texts[event["output_index"]] = texts.get(event["output_index"], "") + event["delta"]
    for index, item in enumerate(final["output"]):
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert texts.get(index, "") == text
        done = [event for event in events if event["type"] == "response.output_item.done"]
        assert done[index]["item"] == item


def test_cut_off(client: OpenAI) -> None:
    found = client.responses.create(model="tiny-text", input="Hello", max_output_tokens=4)
    assert found.status == "incomplete"
    assert found.incomplete_details
    assert found.incomplete_details.reason == "max_output_tokens"
    assert found.output[0].status == "incomplete"  # type: ignore[union-attr]


def test_tools(client: OpenAI, server: Live, engine: FakeTextEngine) -> None:
    engine.said = CALL
    found = client.responses.create(model="tiny-text", input="Weather?", tools=[WEATHER])  # type: ignore[list-item]
    [call] = found.output
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Zürich 🙂"})
    kinds = kinds_of(events_of(server, tools=[WEATHER]))
    assert kinds[2:-1] == [
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done"),
        "output_item.done",
    ]
    engine.said = SAID
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "22 degrees"}
    client.responses.create(
        model="tiny-text",
        previous_response_id=found.id,
        input=[result],  # type: ignore[list-item]
        tools=[WEATHER],  # type: ignore[list-item]
    )
    prompt = prompt_of(engine.requests[-1])
    for part in ("Weather?", "<tool_call>", "Zürich", "<|im_start|>tool\n22 degrees"):
        assert part in prompt
    # The same, said by the client itself.
    history = [{"role": "user", "content": "Weather?"}, call.model_dump(exclude_none=True), result]
    client.responses.create(model="tiny-text", input=history, tools=[WEATHER])  # type: ignore[arg-type, list-item]
    assert prompt_of(engine.requests[-1]) == prompt


def test_reasoning(client: OpenAI, server: Live, engine: FakeTextEngine) -> None:
    engine.said = THOUGHT
    found = client.responses.create(model="thinker", input="Why?", reasoning={"effort": "high"})
    thinking, message = found.output
    assert thinking.type == "reasoning"
    assert thinking.content
    assert thinking.content[0].text == "Let me see."
    assert (message.type, found.output_text) == ("message", "It is so.")
    assert found.usage
    assert found.usage.output_tokens_details.reasoning_tokens > 0
    kinds = kinds_of(events_of(server, model="thinker"))
    assert kinds[2:8] == [
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
    ]


def test_structure(server: Live, engine: FakeTextEngine) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    assert post(server, text={"format": form}).json()["text"]["format"] == form
    assert engine.requests[-1].params.grammar is not None
    assert post(server, text={"format": {"type": "json_object"}}).status_code == 200
    assert engine.requests[-1].params.grammar is not None
    bad = {**form, "schema": {"type": "nonsense"}}
    assert error_of(post(server, text={"format": bad}))["param"] == "text.format"


def test_logprobs(client: OpenAI) -> None:
    found = client.responses.create(
        model="tiny-text", input="Hi", include=["message.output_text.logprobs"], top_logprobs=2
    )
    logprobs = found.output[0].content[0].logprobs  # type: ignore[union-attr, index]
    assert logprobs
    assert len(logprobs) == len(SAID.encode())
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs)


def test_conversation(client: OpenAI, engine: FakeTextEngine) -> None:
    first = client.responses.create(model="tiny-text", input="One", instructions="Only now.")
    second = client.responses.create(model="tiny-text", input="Two", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    client.responses.create(
        model="tiny-text",
        previous_response_id=second.id,
        input=[{"role": "user", "content": [{"type": "input_text", "text": "Three"}]}],
    )
    turns = [f"<|im_start|>user\n{text}<|im_end|>\n" for text in ("One", "Two", "Three")]
    answer = f"<|im_start|>assistant\n{SAID}<|im_end|>\n"
    assert prompt_of(engine.requests[-1]) == answer.join(turns) + "<|im_start|>assistant\n"


def test_stored_responses(client: OpenAI, server: Live) -> None:
    made = client.responses.create(model="tiny-text", input="Hello", metadata={"a": "b"})
    assert client.responses.retrieve(made.id) == made
    streamed = events_of(server)[-1]["response"]
    assert client.responses.retrieve(streamed["id"]).output_text == SAID
    client.responses.delete(made.id)
    with pytest.raises(NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(NotFoundError):
        client.responses.delete(made.id)
    with pytest.raises(BadRequestError) as caught:
        client.responses.create(model="tiny-text", input="x", previous_response_id=made.id)
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "previous_response_not_found")
    unkept = client.responses.create(model="tiny-text", input="Hello", store=False)
    assert unkept.output_text == SAID
    with pytest.raises(NotFoundError):
        client.responses.retrieve(unkept.id)
    with pytest.raises(BadRequestError):
        client.responses.cancel(streamed["id"])
    assert server.http.get(f"/v1/responses/{streamed['id']}?stream=true").status_code == 400


def test_background(client: OpenAI, server: Live, engine: FakeTextEngine) -> None:
    engine.pace = 0.01
    made = client.responses.create(model="tiny-text", input="Hello", background=True)
    assert (made.status, made.background, made.output) == ("in_progress", True, [])
    with pytest.raises(BadRequestError):
        client.responses.create(model="tiny-text", input="x", previous_response_id=made.id)
    wait_until(lambda: client.responses.retrieve(made.id).status == "completed")
    assert client.responses.retrieve(made.id).output_text == SAID
    assert client.responses.cancel(made.id).status == "completed"
    engine.said = "endless " * 40
    for stop in (client.responses.cancel, client.responses.delete):
        made = client.responses.create(model="tiny-text", input="Hello", background=True)
        stop(made.id)
        assert wait_until(lambda: engine.text_runs[-1].done) < 1
        wait_until(lambda: server.app.state.context.text_queue.size == 0)
    assert not server.app.state.context.responses.tasks
    with pytest.raises(NotFoundError):
        client.responses.retrieve(made.id)


def test_cancelled_response_says_so(client: OpenAI, engine: FakeTextEngine) -> None:
    engine.pace = 0.02
    made = client.responses.create(model="tiny-text", input="Hello", background=True)
    assert client.responses.cancel(made.id).status == "cancelled"
    assert client.responses.retrieve(made.id).status == "cancelled"


def test_failures(client: OpenAI, server: Live, engine: FakeTextEngine) -> None:
    engine.fail_text = ProgramFailed("a secret")
    assert post(server).status_code == 500
    last = events_of(server)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "server_error"
    assert "secret" not in json.dumps(last)
    made = client.responses.create(model="tiny-text", input="Hello", background=True)
    wait_until(lambda: client.responses.retrieve(made.id).status == "failed")
    engine.fail_text = RequestRefused("too large")
    assert post(server).status_code == 400
    assert events_of(server)[-1]["response"]["error"]["code"] == "invalid_prompt"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": ...}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "message", "role": "user"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "x"}, "tools": [WEATHER]}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "input"),
        ({"temperature": 3}, "temperature"),
        ({"top_k": "x"}, "top_k"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"background": True, "stream": True}, "background"),
        ({"background": True, "store": False}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "x"}, "conversation"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"previous_response_id": "x"}, "previous_response_id"),
        ({"model": "whisper-base"}, "model"),
        ({"input": "x" * 2000}, "input"),
        ({"input": [{"role": "user", "content": "impossible"}]}, "input"),
    ],
)
def test_refusals(server: Live, engine: FakeTextEngine, body: dict[str, Any], param: str) -> None:
    before = len(engine.requests)
    answer = post(server, **body)
    assert answer.status_code == 400, answer.text
    assert error_of(answer)["param"] == param
    assert len(engine.requests) == before
