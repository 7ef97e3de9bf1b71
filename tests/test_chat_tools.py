"""Tool calls, thinking and structured answers of chat completions, streamed and whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI
from sensorium.engine.engine import ProgramFailed
from sensorium.engine.structured import GrammarError
from sensorium.models.reasoning import GrammarAfterThinking, ThinkingBudget

from .fake_text import ChatML, FakeTextEngine
from .live_server import Live, error_of, live

HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich 🙂"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def engine() -> FakeTextEngine:
    engine = FakeTextEngine(CALLS)
    engine.add_text("thinker", template=ChatML(thinks=True))
    engine.add_text("base", template=None)
    return engine


@pytest.fixture(scope="module")
def server(engine: FakeTextEngine) -> Iterator[Live]:
    with live(engine) as running:
        yield running


@pytest.fixture
def client(server: Live) -> OpenAI:
    return server.openai


def post(server: Live, **body: Any) -> Any:
    return server.http.post("/v1/chat/completions", json={"model": "tiny-text", "messages": HELLO, **body})


def both(server: Live, **body: Any) -> dict[str, Any]:
    """The answer's choice, which the stream's deltas have to add up to."""
    [choice] = post(server, **body).json()["choices"]
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    reason = None
    for line in post(server, **body, stream=True).text.split("\n\n")[:-2]:
        [part] = json.loads(line.removeprefix("data: "))["choices"]
        delta, reason = part["delta"], part["finish_reason"]
        for key in ("content", "reasoning_content"):
            message[key] += delta.get(key) or ""
        for piece in delta.get("tool_calls", []):
            if piece["index"] == len(message["tool_calls"]):
                call = {"id": piece["id"], "type": piece["type"]}
                message["tool_calls"].append({**call, "function": {"name": "", "arguments": ""}})
            for key, text in piece["function"].items():
                message["tool_calls"][piece["index"]]["function"][key] += text
    assert reason == choice["finish_reason"]
    whole = choice["message"]
    assert message["content"] == (whole["content"] or "")
    assert message["reasoning_content"] == whole.get("reasoning_content", "")
    calls = [[call["function"] for call in found.get("tool_calls", [])] for found in (message, whole)]
    assert calls[0] == calls[1]
    return choice  # type: ignore[no-any-return]


def test_calls(server: Live, engine: FakeTextEngine) -> None:
    engine.said = CALLS
    choice = both(server, tools=[WEATHER, TIME])
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    first, second = choice["message"]["tool_calls"]
    assert set(first) == {"id", "type", "function"}
    assert json.loads(first["function"]["arguments"]) == {"city": "Zürich 🙂"}
    assert (second["function"]["name"], second["function"]["arguments"]) == ("time", "{}")
    assert first["id"] != second["id"]


def test_calls_through_the_client_and_back(client: OpenAI, engine: FakeTextEngine) -> None:
    engine.said = CALLS
    options: dict[str, Any] = {"model": "tiny-text", "tools": [WEATHER, TIME]}
    found = client.chat.completions.create(messages=HELLO, **options)  # type: ignore[arg-type]
    message = found.choices[0].message
    assert message.tool_calls
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    turns = [*HELLO, message.model_dump(exclude_none=True), result]
    client.chat.completions.create(messages=turns, **options)  # type: ignore[arg-type]
    template = engine.model("tiny-text").processor.chat_template  # type: ignore[attr-defined]
    shown = template.rendered[-1]
    assert shown["tools"][0] == WEATHER
    assert shown["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"city": "Zürich 🙂"}
    assert shown["messages"][2]["content"] == "rain"


def test_one_call_at_a_time(server: Live, engine: FakeTextEngine) -> None:
    engine.said = CALLS
    choice = both(server, tools=[WEATHER, TIME], parallel_tool_calls=False)
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"]


@pytest.mark.parametrize("options", [{}, {"tools": [WEATHER], "tool_choice": "none"}])
def test_without_tools_text_is_text(server: Live, engine: FakeTextEngine, options: dict[str, Any]) -> None:
    engine.said = CALLS
    choice = both(server, **options)
    assert choice["message"]["content"] == CALLS
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"
    template = engine.model("tiny-text").processor.chat_template  # type: ignore[attr-defined]
    assert not template.rendered[-1]["tools"]


def test_no_call_is_made(server: Live, engine: FakeTextEngine) -> None:
    engine.said = "No <tool_ need."
    choice = both(server, tools=[WEATHER])
    assert (choice["message"]["content"], choice["finish_reason"]) == ("No <tool_ need.", "stop")


def test_named_tool(server: Live, engine: FakeTextEngine) -> None:
    engine.said = '{"city": "Bern"}'
    forced = {"type": "function", "function": {"name": "weather"}}
    choice = both(server, tools=[WEATHER, TIME], tool_choice=forced)
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Bern"}'}
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    assert allows(engine, '{"city": "Bern"}')
    assert not allows(engine, '{"town": "Bern"}')


def test_required_tool(server: Live, engine: FakeTextEngine) -> None:
    engine.said = '[{"name": "time", "parameters": {}}, {"name": "weather", "parameters": {"city": "Bern"}}]'
    choice = both(server, tools=[WEATHER, TIME], tool_choice="required")
    names = [call["function"]["name"] for call in choice["message"]["tool_calls"]]
    assert names == ["time", "weather"]
    assert choice["finish_reason"] == "tool_calls"
    assert allows(engine, engine.said)
    assert not allows(engine, "[]")
    refused = post(server, tools=[WEATHER], tool_choice="required", response_format={"type": "json_object"})
    assert error_of(refused)["param"] == "tool_choice"


def allows(engine: FakeTextEngine, text: str) -> bool:
    """Whether the last request's grammar lets the model write this."""
    grammar = engine.requests[-1].params.grammar
    assert grammar is not None
    matcher = grammar.matcher()
    return all(matcher.accept(byte) for byte in text.encode()) and matcher.accept(258)


def test_thinking(server: Live, engine: FakeTextEngine) -> None:
    engine.said = "<think>\nHm, naïve…\n</think>\n\n" + CALLS
    choice = both(server, model="thinker", tools=[WEATHER, TIME])
    assert choice["message"]["reasoning_content"] == "Hm, naïve…"
    assert choice["message"]["content"] == "Let me see."
    assert len(choice["message"]["tool_calls"]) == 2
    usage = post(server, model="thinker").json()["usage"]
    thought = usage["completion_tokens_details"]["reasoning_tokens"]
    assert len("<think>\nHm, naïve…\n</think>") - 2 < thought < usage["completion_tokens"]
    hidden = both(server, model="thinker", include_reasoning=False)["message"]
    assert "reasoning_content" not in hidden


def test_thinking_budget(server: Live, engine: FakeTextEngine) -> None:
    engine.said = "<think>Hm</think>Yes"
    assert post(server, model="thinker", thinking_token_budget=5).status_code == 200
    last = engine.requests[-1].params.logits_processors[-1]
    assert isinstance(last, ThinkingBudget)
    assert last.budget == 5


def test_template_arguments(server: Live, engine: FakeTextEngine) -> None:
    post(server, reasoning_effort="none", chat_template_kwargs={"mood": "calm"})
    template = engine.model("tiny-text").processor.chat_template  # type: ignore[attr-defined]
    shown = template.rendered[-1]
    assert (shown["enable_thinking"], shown["mood"]) == (False, "calm")
    for name in ("messages", "tools", "add_generation_prompt", "self"):
        refused = post(server, chat_template_kwargs={name: 1})
        assert error_of(refused)["param"] == "chat_template_kwargs"


def test_template_that_refuses(server: Live) -> None:
    refused = post(server, messages=[{"role": "user", "content": "impossible"}])
    assert refused.status_code == 400
    assert error_of(refused)["param"] == "messages"
    assert "alternate" in error_of(refused)["message"]


def test_model_without_a_template(server: Live) -> None:
    refused = post(server, model="base")
    assert refused.status_code == 400
    assert "chat template" in error_of(refused)["message"]
    answer = server.http.post("/v1/completions", json={"model": "base", "prompt": "x"})
    assert answer.status_code == 200


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("options", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, '{"x": [1]}', "[1]"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            '{"a": 3}',
            '{"a": "3"}',
        ),
        ({"structured_outputs": {"regex": "[ab]+"}}, "abba", "abc"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes", "maybe"),
        ({"structured_outputs": {"grammar": 'root ::= "x" "y"'}}, "xy", "x"),
        ({"structured_outputs": {"json": SCHEMA}}, '{"a": 3}', "3"),
    ],
)
def test_structured_answers(
    server: Live, engine: FakeTextEngine, options: dict[str, Any], good: str, bad: str
) -> None:
    engine.said = good
    assert post(server, **options).json()["choices"][0]["message"]["content"] == good
    assert allows(engine, good)
    assert not allows(engine, bad)
    answer = server.http.post("/v1/completions", json={"model": "tiny-text", "prompt": "x", **options})
    assert answer.status_code == 200
    assert allows(engine, good)


def test_grammar_waits_for_the_thinking(server: Live, engine: FakeTextEngine) -> None:
    engine.said = '<think>Hm</think>{"a": 1}'
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    choice = both(server, model="thinker", response_format=form)
    assert choice["message"]["content"] == '{"a": 1}'
    assert isinstance(engine.requests[-1].params.grammar, GrammarAfterThinking)


def test_plain_text_needs_no_grammar(server: Live, engine: FakeTextEngine) -> None:
    assert post(server, response_format={"type": "text"}).status_code == 200
    assert engine.requests[-1].params.grammar is None


@pytest.mark.parametrize(
    ("options", "param"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "x"}}}},
            "response_format",
        ),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "root ::= "}}, "structured_outputs"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 3}}}],
          "tool_choice": "required"}, "tools"),
    ],
)  # fmt: skip
def test_grammars_that_cannot_be(server: Live, options: dict[str, Any], param: str) -> None:
    refused = post(server, **options)
    assert refused.status_code == 400
    assert error_of(refused)["param"] == param


def test_grammar_that_fails_on_the_way(server: Live, engine: FakeTextEngine) -> None:
    failure = ProgramFailed("failed")
    failure.__cause__ = GrammarError("the grammar allows no further token")
    engine.said, engine.fail_text = "text", failure
    refused = post(server, response_format={"type": "json_object"})
    engine.fail_text = None
    assert refused.status_code == 400
    assert error_of(refused)["param"] == "response_format"
