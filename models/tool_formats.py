"""How families write tool calls: a reader for each format, fed one character at a time.

A reader is a generator that gets the characters after the text that opened it ("" is the end of the output).
It commits every call as soon as it is complete and raises Malformed where the text is no call after all. Since
characters come one by one, the result cannot depend on how the output was cut.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
Reading = Generator[None, str, T]

MAX_DEPTH = 200  # of nested brackets
MAX_NAME = 256  # characters
JSON_PLAIN = frozenset(" \t\r\n:,+-.0123456789eEtrufalsn")  # what JSON holds outside strings and brackets
CLOSING = {"{": "}", "[": "]", "(": ")"}

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


class Malformed(ValueError):
    """The text only looked like a tool call."""


@dataclass(frozen=True)
class RawCall:
    """A call as the model wrote it. arguments: a JSON object as text. id: only where the format has one."""

    name: str
    arguments: str
    id: str | None = None


class Cursor:
    """The characters of one block.

    tools: names that are known, None if any name will do. calls: what was committed and not yet collected.
    raw: characters read since the block began or since the last commit; still plain text if all else fails.
    """

    def __init__(self, opener: str, tools: Collection[str] | None) -> None:
        self.tools = tools
        self.raw = [opener]
        self.calls: list[RawCall] = []
        self.has_committed = False
        self.unread: str | None = None

    def peek(self) -> Reading[str]:
        """The next character, "" at the end of the output."""
        if self.unread is None:
            self.unread = yield
        return self.unread

    def take(self) -> Reading[str]:
        char = yield from self.peek()
        if not char:
            raise Malformed
        self.raw.append(char)
        self.unread = None
        return char

    def skip_space(self) -> Reading[str]:
        """Reads white space; returns the next character."""
        while (char := (yield from self.peek())).isspace():
            yield from self.take()
        return char

    def expect(self, text: str) -> Reading[None]:
        for wanted in text:
            if (yield from self.peek()) != wanted:
                raise Malformed
            yield from self.take()

    def until(self, mark: str) -> Reading[str]:
        """A name on one line, up to a mark, which is read too."""
        found = ""
        while not found.endswith(mark):
            found += yield from self.take()
            if len(found) > MAX_NAME or "\n" in found[: -len(mark)]:
                raise Malformed
        return found.removesuffix(mark)

    def close(self, mark: str) -> Reading[None]:
        """Reads and forgets a closing mark after white space; the end of the output may cut it off."""
        yield from self.skip_space()
        for wanted in mark:
            char = yield from self.peek()
            if not char:
                break
            if char != wanted:
                raise Malformed
            yield from self.take()
        self.raw.clear()

    def commit(self, *calls: RawCall) -> None:
        self.calls += calls
        self.has_committed = True
        self.raw.clear()


def json_text(cursor: Cursor, opened: str = "") -> Reading[str]:
    """One JSON object or array up to its last bracket. opened: its first bracket, if that was read already."""
    text = [opened]
    stack = [CLOSING[opened]] if opened else []
    if not opened and (yield from cursor.peek()) not in ("{", "["):
        raise Malformed
    while True:
        char = yield from cursor.take()
        text.append(char)
        if char in "{[":
            stack.append(CLOSING[char])
            if len(stack) > MAX_DEPTH:
                raise Malformed
        elif char in "}]":
            if stack.pop() != char:
                raise Malformed
            if not stack:
                return "".join(text)
        elif char == '"':
            text.append((yield from _string(cursor, char)))
        elif char not in JSON_PLAIN:
            raise Malformed


def _string(cursor: Cursor, quote: str) -> Reading[str]:
    """The rest of a string, with its closing quote."""
    text = []
    while True:
        char = yield from cursor.take()
        text.append(char)
        if char == quote:
            return "".join(text)
        if char == "\\":
            text.append((yield from cursor.take()))


def parse_json(text: str) -> Any:
    """Raises Malformed. Raw line breaks inside strings are let through, since models write them."""

    def reject(constant: str) -> None:
        raise Malformed(constant)  # NaN and Infinity are no JSON

    try:
        return json.loads(text, strict=False, parse_constant=reject)
    except (ValueError, RecursionError):
        raise Malformed from None


def make_call(name: object, arguments: object, id: str | None = None) -> RawCall:
    """A call from decoded values; arguments may be an object, its JSON text, or None for no arguments."""
    if isinstance(arguments, str):
        arguments = parse_json(arguments)
    arguments = {} if arguments is None else arguments
    if not isinstance(name, str) or not name or len(name) > MAX_NAME or not isinstance(arguments, dict):
        raise Malformed
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (name + text).encode()  # half a surrogate pair is no text
    except (TypeError, ValueError, RecursionError):
        raise Malformed from None
    return RawCall(name, text, id)


def call_of(value: object) -> RawCall:
    """A call from {"name": …, "arguments" or "parameters": …}."""
    if not isinstance(value, dict):
        raise Malformed
    return make_call(value.get("name"), value.get("arguments", value.get("parameters")))


def _json_calls(cursor: Cursor) -> Reading[None]:
    """One call object, or an array of them; each is committed at its last bracket."""
    if (yield from cursor.skip_space()) != "[":
        cursor.commit(call_of(parse_json((yield from json_text(cursor)))))
        return
    yield from cursor.take()
    while True:
        yield from cursor.skip_space()
        cursor.commit(call_of(parse_json((yield from json_text(cursor)))))
        char = yield from cursor.skip_space()
        if char == ",":
            yield from cursor.take()
        else:
            yield from cursor.close("]")
            return


def read_hermes(cursor: Cursor, opener: str) -> Reading[None]:
    """<tool_call>{"name": …, "arguments": {…}}</tool_call>, one pair of marks a call (Hermes 2, Qwen)."""
    yield from _json_calls(cursor)
    yield from cursor.close("</tool_call>")


def read_hunyuan(cursor: Cursor, opener: str) -> Reading[None]:
    """<tool_calls>[{"name": …, "arguments": {…}}, …]</tool_calls> (HunYuan)."""
    yield from _json_calls(cursor)
    yield from cursor.close("</tool_calls>")


def read_llama3(cursor: Cursor, opener: str) -> Reading[None]:
    """{"name": …, "parameters": {…}}, also after <|python_tag|>, more after ";" (Llama 3)."""
    if opener != "{":
        yield from cursor.skip_space()
        yield from cursor.expect("{")
    if (yield from cursor.skip_space()) != '"':
        raise Malformed  # a brace in text or in a program
    value = parse_json((yield from json_text(cursor, "{")))
    if not isinstance(value, dict) or not {"parameters", "arguments"} & value.keys():
        raise Malformed
    call = call_of(value)
    _check_known(cursor, call)
    cursor.commit(call)
    if (yield from cursor.skip_space()) == ";":
        yield from cursor.take()
        cursor.raw.clear()


def _check_known(cursor: Cursor, call: RawCall) -> None:
    """Formats without marks of their own: what calls no known tool is ordinary text."""
    if cursor.tools is not None and call.name not in cursor.tools:
        raise Malformed


def read_mistral(cursor: Cursor, opener: str) -> Reading[None]:
    """[TOOL_CALLS] with a JSON array, or with name{…}, name[ARGS]{…}, name[CALL_ID]id[ARGS]{…} (Mistral)."""
    if (yield from cursor.skip_space()) in ("[", "{"):
        yield from _json_calls(cursor)
        return
    name, call_id = "", None
    while (char := (yield from cursor.peek())).isalnum() or char in ("_", "-", "."):
        name += yield from cursor.take()
        if len(name) > MAX_NAME:
            raise Malformed
    if (yield from cursor.skip_space()) == "[":
        yield from cursor.take()
        if (yield from cursor.peek()) == "C":
            yield from cursor.expect("CALL_ID]")
            call_id = (yield from cursor.until("[ARGS]")).strip()
        else:
            yield from cursor.expect("ARGS]")
        yield from cursor.skip_space()
    cursor.commit(make_call(name, parse_json((yield from json_text(cursor))), call_id or None))


def read_deepseek(cursor: Cursor, opener: str) -> Reading[None]:
    """Calls between DeepSeek's marks: function<sep>name and fenced JSON (V3, R1), or name<sep>JSON (V3.1)."""
    if opener == CALLS_BEGIN:
        yield from cursor.skip_space()
        yield from cursor.expect(CALL_BEGIN)
    while True:
        name = (yield from cursor.until(CALL_SEP)).strip()
        fenced = name == "function" and (yield from cursor.skip_space()) != "{"
        if fenced:
            name = (yield from cursor.until("\n")).strip()
            yield from cursor.skip_space()
            yield from cursor.expect("```json")
        yield from cursor.skip_space()
        cursor.commit(make_call(name, parse_json((yield from json_text(cursor)))))
        if fenced:
            yield from cursor.close("```")
        yield from cursor.close(CALL_END)
        if (yield from cursor.skip_space()) != CALL_BEGIN[0]:
            return
        # The next call and the end of all calls begin alike.
        yield from cursor.expect("<｜tool▁call")
        if (yield from cursor.peek()) == "s":
            yield from cursor.close("s▁end｜>")
            return
        yield from cursor.expect("▁begin｜>")


def read_pythonic(cursor: Cursor, opener: str) -> Reading[None]:
    """[name(key=value, …), …] with Python literals (Llama 3.2 and 4, ToolACE)."""
    name = ""
    yield from cursor.skip_space()
    while (char := (yield from cursor.peek())).isidentifier() or char == "." or (name and char.isdigit()):
        name += yield from cursor.take()
    if not name or len(name) > MAX_NAME or (yield from cursor.skip_space()) != "(":
        raise Malformed  # a bracket in text
    stack = ["]"]
    while stack:
        char = yield from cursor.take()
        if char in CLOSING:
            stack.append(CLOSING[char])
        elif char in ")]}":
            if stack.pop() != char:
                raise Malformed
        elif char in "\"'":
            yield from _string(cursor, char)
        if len(stack) > MAX_DEPTH:
            raise Malformed
    calls = python_calls("".join(cursor.raw))
    for call in calls:
        _check_known(cursor, call)
    cursor.commit(*calls)


def python_calls(text: str) -> list[RawCall]:
    """Calls of a Python list display. Nothing is evaluated but literals. Raises Malformed."""
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # MemoryError: the parser's own stack
        raise Malformed from None
    if not isinstance(tree, ast.List):
        raise Malformed
    calls = []
    for node in tree.elts:
        if not isinstance(node, ast.Call) or node.args:
            raise Malformed
        name = ast.unparse(node.func)
        if not all(part.isidentifier() for part in name.split(".")):
            raise Malformed
        arguments = {}
        for keyword in node.keywords:
            if keyword.arg is None or keyword.arg in arguments:
                raise Malformed
            try:
                arguments[keyword.arg] = ast.literal_eval(_json_names(keyword.value))
            except (ValueError, TypeError, RecursionError):
                raise Malformed from None
        if not all(isinstance(key, str) for value in arguments.values() for key in _keys(value)):
            raise Malformed
        calls.append(make_call(name, arguments))
    return calls


class _JsonNames(ast.NodeTransformer):
    """Reads JSON's true, false and null, which models mix in, as Python's."""

    VALUES: Mapping[str, bool | None] = {"true": True, "false": False, "null": None}

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(self.VALUES[node.id]) if node.id in self.VALUES else node


def _json_names(node: ast.expr) -> ast.expr:
    changed: ast.expr = _JsonNames().visit(node)
    return changed


def _keys(value: object) -> list[object]:
    """All keys of all objects within a value."""
    if isinstance(value, dict):
        return [*value, *(key for inner in value.values() for key in _keys(inner))]
    if isinstance(value, list | tuple):
        return [key for inner in value for key in _keys(inner)]
    return []


@dataclass(frozen=True)
class ToolFormat:
    """A format: the texts that may open a block, and its reader.

    special_tokens: its marks are special tokens, which have to be kept in the text. id_length: of the ids
    that its chat templates accept, None for any.
    """

    name: str
    openers: tuple[str, ...]
    read: Callable[[Cursor, str], Reading[None]]
    special_tokens: bool = False
    id_length: int | None = None


HERMES = ToolFormat("hermes", ("<tool_call>",), read_hermes)
LLAMA3_JSON = ToolFormat("llama3_json", ("<|python_tag|>", "{"), read_llama3, special_tokens=True)
MISTRAL = ToolFormat("mistral", ("[TOOL_CALLS]",), read_mistral, special_tokens=True, id_length=9)
PYTHONIC = ToolFormat("pythonic", ("[",), read_pythonic)
DEEPSEEK_V3 = ToolFormat("deepseek_v3", (CALLS_BEGIN, CALL_BEGIN), read_deepseek, special_tokens=True)
HUNYUAN = ToolFormat("hunyuan", ("<tool_calls>",), read_hunyuan, special_tokens=True)
