"""Tool calls in every format: known outputs, malformed ones, and streams cut anywhere."""

from __future__ import annotations

import itertools
import json
import string
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sensorium.models.tool_formats import ToolFormat
from sensorium.models.tool_parsers import (
    TOOL_FORMATS,
    ToolParser,
    new_call_id,
    parse_tool_calls,
    tool_format_of,
)

TOOLS = frozenset({"f", "get_weather", "g.h"})
Calls = list[tuple[str, dict[str, object]]]

DEEPSEEK_TWO = (
    "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
    '{"a": "``` {"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{}\n```'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
DEEPSEEK_31 = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": [1]}<｜tool▁call▁end｜>'
    '<｜tool▁call▁begin｜>function<｜tool▁sep｜>{"b": 2}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)

GOOD: list[tuple[str, str, str, Calls]] = [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [("f", {"a": 1})]),
    (
        "qwen3",
        'Sure.\n<tool_call>{"name":"f","arguments":{}}</tool_call>\n<tool_call>{"name":"f","arguments":'
        '{"x":{"y":[{"z":"}"}]}}}</tool_call>\nDone.',
        "Sure.\n\n\nDone.",
        [("f", {}), ("f", {"x": {"y": [{"z": "}"}]}})],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"s": "a \\"</tool_call>\\" \\\\"}}</tool_call>',
        "",
        [("f", {"s": 'a "</tool_call>" \\'})],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}\n<tool_call>{"name": "f"}',
        "",
        [("f", {"a": 1}), ("f", {})],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "1\n2é"}}</to', "", [("f", {"a": "1\n2é"})]),
    (
        "hermes",
        '<tool_call>[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"a": null}}]</tool_call>',
        "",
        [("f", {}), ("g", {"a": None})],
    ),
    ("hermes", '<tool_call>oops <tool_call>{"name": "f"}</tool_call>', "<tool_call>oops", [("f", {})]),
    ("hermes", "  plain\n", "  plain\n", []),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1.5}}', "", [("f", {"a": 1.5})]),
    (
        "llama3_json",
        '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g.h", "arguments": {"k": "{;}"}}',
        "",
        [("f", {}), ("g.h", {"k": "{;}"})],
    ),
    (
        "llama3_json",
        'I call it: { "name": "f", "parameters": {"a": {"b": {}}} } now',
        "I call it:  now",
        [("f", {"a": {"b": {}}})],
    ),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": "]"}}]', "", [("f", {"a": "]"})]),
    (
        "mistral",
        'Hm[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"a": [[1]]}}] ',
        "Hm",
        [("f", {}), ("g", {"a": [[1]]})],
    ),
    ("mistral", '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g[ARGS]{"b": 2}', "", [("f", {"a": 1}), ("g", {"b": 2})]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abc123XYZ[ARGS]{"a": 1}', "", [("f", {"a": 1})]),
    (
        "pythonic",
        '[f(a=1, b="x)]", c={"k": [True, null, -2.5]}), g.h()]',
        "",
        [("f", {"a": 1, "b": "x)]", "c": {"k": [True, None, -2.5]}}), ("g.h", {})],
    ),
    ("pythonic", "See [1] and [f(x='it\\'s')] ok", "See [1] and  ok", [("f", {"x": "it's"})]),
    ("deepseek_v3", DEEPSEEK_TWO, "Let me see.", [("f", {"a": "``` {"}), ("get_weather", {})]),
    ("deepseek_v3", DEEPSEEK_31, "", [("f", {"a": [1]}), ("function", {"b": 2})]),
    (
        "hunyuan",
        'ok <tool_calls>[{"name": "f", "arguments": {"a": 1}},\n{"name": "g", "arguments": {}}]</tool_calls>',
        "ok",
        [("f", {"a": 1}), ("g", {})],
    ),
]

MALFORMED = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "cut'),
    ("hermes", "<tool_call>" + "[" * 5000),
    ("hermes", "<tool_call>"),
    ("hermes", "<tool_cal"),
    ("llama3_json", '{"name": "unknown", "parameters": {}}'),
    ("llama3_json", '{"name": "f", "surname": {}}'),
    ("llama3_json", "int main() { return 0; } {"),
    ("llama3_json", '{"outer": {"name": "f", "parameters": {}}}'),
    ("llama3_json", "<|python_tag|>search.call(query='x')"),
    ("mistral", '[TOOL_CALLS][{"name": "f" "arguments": {}}]'),
    ("mistral", "[TOOL_CALLS]two words{}"),
    ("mistral", "[TOOL_CALLS]f[ARG]{}"),
    ("pythonic", "[f(1)]"),
    ("pythonic", "[f(a=open('x'))]"),
    ("pythonic", "[f(a=b'x')]"),
    ("pythonic", "[f(a={1: 2})]"),
    ("pythonic", "[f(a=1), 2]"),
    ("pythonic", "[f(a=1, a=2)]"),
    ("pythonic", "[f(**{})]"),
    ("pythonic", "[f()()]"),
    ("pythonic", "[unknown(a=1)]"),
    ("pythonic", "[f(a=" + "(" * 5000),
    ("pythonic", "[f(a=1}]"),
    (
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n{}<｜tool▁call▁end｜>",
    ),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>f"),
    ("hunyuan", '<tool_calls>[{"name": "f", "arguments": {}'),
]


def fixed_id(form: ToolFormat) -> str:
    return "id"


def stream(text: str, form: ToolFormat, cuts: Sequence[int]) -> tuple[str, list[tuple[str, str, str]]]:
    """What a client puts together of the deltas of a text cut at these places."""
    parser = ToolParser(form, TOOLS, fixed_id)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    deltas = [parser.feed(text[a:b]) for a, b in itertools.pairwise(edges)] + [parser.finish()]
    calls: dict[int, list[str]] = {}
    for delta in (call for part in deltas for call in part.calls):
        if delta.index not in calls:
            assert delta.index == len(calls)
            assert delta.id is not None
            assert delta.name is not None
            calls[delta.index] = [delta.id, delta.name, ""]
        calls[delta.index][2] += delta.arguments
    return "".join(part.content for part in deltas), [(a, b, c) for a, b, c in calls.values()]


def whole(text: str, form: ToolFormat) -> tuple[str, list[tuple[str, str, str]]]:
    content, calls = parse_tool_calls(text, form, TOOLS, fixed_id)
    return content, [(call.id, call.name, call.arguments) for call in calls]


@pytest.mark.parametrize(("name", "text", "content", "calls"), GOOD)
def test_known_outputs(name: str, text: str, content: str, calls: Calls) -> None:
    form = TOOL_FORMATS[name]
    found_content, found = whole(text, form)
    assert found_content == content
    assert [(called, json.loads(arguments)) for _, called, arguments in found] == calls
    assert stream(text, form, range(len(text))) == (found_content, found)


@pytest.mark.parametrize(("name", "text"), MALFORMED)
def test_malformed_calls_are_content(name: str, text: str) -> None:
    form = TOOL_FORMATS[name]
    assert whole(text, form) == (text, [])
    assert stream(text, form, range(len(text))) == (text, [])


@settings(max_examples=150)
@given(st.sampled_from([*GOOD, *MALFORMED]), st.lists(st.integers(0, 200), max_size=10))
def test_known_outputs_cut_anywhere(case: tuple[str, ...], cuts: list[int]) -> None:
    form = TOOL_FORMATS[case[0]]
    assert stream(case[1], form, cuts) == whole(case[1], form)


FRAGMENTS = {
    "hermes": ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": {}}', "<tool", '{"'],
    "llama3_json": ["<|python_tag|>", '{"name": "f", "parameters": {}}', ";", "{", '"', "<|"],
    "mistral": ["[TOOL_CALLS]", "f", "[ARGS]", "[CALL_ID]", "{}", '[{"name": "f"}', "]", "[TOOL"],
    "pythonic": ["[f(", "a=1", ")]", "[", "g.h()", ", ", "'", "("],
    "deepseek_v3": [
        *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>", "f\n", "f"),
        *("```json\n{}\n```", "{}", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<｜tool"),
    ],
    "hunyuan": ["<tool_calls>", "[", '{"name": "f"}', ",", "]", "</tool_calls>", "<tool_calls"],
}


@settings(max_examples=300)
@given(st.data(), st.sampled_from(sorted(FRAGMENTS)))
def test_fragments_cut_anywhere(data: st.DataObject, name: str) -> None:
    form = TOOL_FORMATS[name]
    text = "".join(data.draw(st.lists(st.sampled_from([*FRAGMENTS[name], " ", "\n", "x"]), max_size=14)))
    result = whole(text, form)
    assert stream(text, form, data.draw(st.lists(st.integers(0, len(text)), max_size=8))) == result
    assert stream(text, form, range(len(text))) == result
    for _, called, arguments in result[1]:
        assert called
        assert isinstance(json.loads(arguments), dict)
    if not result[1]:
        assert result[0] == text


plain_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | plain_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(plain_text, inner, max_size=3),
    max_leaves=8,
)
names = st.text(string.ascii_lowercase, min_size=1, max_size=5).map(lambda name: f"k_{name}")


def write(name: str, calls: Sequence[dict[str, object]]) -> str:
    """The calls of f with these arguments as a model of the family writes them."""
    objects = [json.dumps({"name": "f", "arguments": arguments}) for arguments in calls]
    if name == "hermes":
        return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects)
    if name == "llama3_json":
        return "; ".join(objects).replace('"arguments": ', '"parameters": ', 1)
    if name == "mistral":
        return f"[TOOL_CALLS][{', '.join(objects)}]"
    if name == "hunyuan":
        return f"<tool_calls>[{', '.join(objects)}]</tool_calls>"
    if name == "pythonic":
        written = (", ".join(f"{key}={value!r}" for key, value in args.items()) for args in calls)
        return f"[{', '.join(f'f({arguments})' for arguments in written)}]"
    body = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{json.dumps(arguments)}\n```<｜tool▁call▁end｜>"
        for arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{body}<｜tool▁calls▁end｜>"


@settings(max_examples=200)
@given(
    st.sampled_from(sorted(FRAGMENTS)),
    st.lists(st.dictionaries(names, values, max_size=3), min_size=1, max_size=3),
    st.lists(st.integers(0, 300), max_size=10),
)
def test_any_arguments_come_back(name: str, calls: list[dict[str, object]], cuts: list[int]) -> None:
    text = f"Before. {write(name, calls)}"
    content, found = stream(text, TOOL_FORMATS[name], cuts)
    assert content == "Before."
    assert [json.loads(arguments) for _, _, arguments in found] == calls


def test_a_call_comes_out_at_its_last_bracket() -> None:
    parser = ToolParser(TOOL_FORMATS["hermes"])
    assert parser.feed("Hi <tool_call>").content == "Hi"
    assert not parser.feed('{"name": "f", "arguments": {}').calls
    assert parser.feed("}").calls[0].name == "f"
    assert parser.feed("</tool_call>\n<tool_call>").calls == ()
    assert parser.feed('{"name": "g"}').calls[0].index == 1
    assert parser.num_calls == 2


def test_ids() -> None:
    assert new_call_id(TOOL_FORMATS["hermes"]).startswith("call_")
    assert len(new_call_id(TOOL_FORMATS["mistral"])) == 9
    _, calls = parse_tool_calls("[TOOL_CALLS]f[CALL_ID]abc123XYZ[ARGS]{}", TOOL_FORMATS["mistral"])
    assert calls[0].id == "abc123XYZ"
    _, calls = parse_tool_calls(GOOD[1][1], TOOL_FORMATS["qwen3"])
    assert calls[0].id != calls[1].id


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ tools }} <tool_call>", "hermes"),
        ("{{ tools }} [TOOL_CALLS]", "mistral"),
        ("{{ tools }} <｜tool▁call▁begin｜>", "deepseek_v3"),
        ("{{ tools }} <tool_calls>", "hunyuan"),
        ("{{ tools }} <|start_header_id|> <|python_tag|>", "llama3_json"),
        ("{{ tools }} <|start_header_id|> [func_name1(x=1)]", "pythonic"),
        ("{{ tools }} <tool_call><function=x>", None),
        ("<tool_call>", None),
        (None, None),
    ],
)
def test_the_format_is_found_in_the_template(template: str | None, name: str | None) -> None:
    found = tool_format_of(template)
    assert (found.name if found else None) == name


def test_time_grows_with_the_text_alone() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"code": "' + "x" * 200_000 + '"}}'
    started = time.monotonic()
    content, calls = parse_tool_calls(text, TOOL_FORMATS["hermes"])
    assert time.monotonic() - started < 10
    assert (content, len(calls)) == ("", 1)
