"""Tool calls found in a model's output, whole or as it arrives."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from .tool_formats import (
    DEEPSEEK_V3,
    HERMES,
    HUNYUAN,
    LLAMA3_JSON,
    MISTRAL,
    PYTHONIC,
    Cursor,
    Malformed,
    Reading,
    ToolFormat,
)

ID_CHARACTERS = string.ascii_letters + string.digits

TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {
        **{form.name: form for form in (HERMES, LLAMA3_JSON, MISTRAL, PYTHONIC, DEEPSEEK_V3, HUNYUAN)},
        "qwen3": HERMES,
    }
)


def tool_format_of(chat_template: str | None) -> ToolFormat | None:
    """The format that a chat template teaches or writes, None if it knows of no tools."""
    if chat_template is None or "tools" not in chat_template:
        return None
    marks = (
        ("[TOOL_CALLS]", MISTRAL),
        ("<｜tool▁call", DEEPSEEK_V3),
        ("<tool_calls>", HUNYUAN),
        ("<function=", None),  # Qwen3-Coder's XML, which is none of ours
        ("<tool_call>", HERMES),
        ("[func_name1(", PYTHONIC),
        ("<|python_tag|>", LLAMA3_JSON),
        ("<|start_header_id|>", LLAMA3_JSON),
        ("<|header_start|>", LLAMA3_JSON),
    )
    return next((form for mark, form in marks if mark in chat_template), None)


@dataclass(frozen=True)
class ToolCall:
    """A call in OpenAI's terms. arguments: a JSON object as text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of the call number `index`: id and name come with its first piece, arguments add up."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class ToolDelta:
    """What a piece of output added to the plain content and to the calls."""

    content: str = ""
    calls: tuple[ToolCallDelta, ...] = ()


def new_call_id(form: ToolFormat) -> str:
    """A fresh id of a call, in the form that the format's templates accept."""
    if form.id_length is not None:
        return "".join(secrets.choice(ID_CHARACTERS) for _ in range(form.id_length))
    return f"call_{secrets.token_hex(12)}"


class ToolParser:
    """Divides one sequence's text into content and tool calls; the cuts of the text do not matter.

    A call comes out once it is complete, since only then is it certain to be one; what is malformed is
    content as it stands. White space around calls is content only between two pieces of text.
    """

    def __init__(
        self,
        form: ToolFormat,
        tools: Collection[str] | None = None,
        make_id: Callable[[ToolFormat], str] = new_call_id,
    ) -> None:
        """tools: names of the tools on offer; formats without marks take only calls of these for calls."""
        self._form = form
        self._tools = tools
        self._make_id = make_id
        self._first = frozenset(opener[0] for opener in form.openers)
        self._held = ""  # may become an opener
        self._cursor: Cursor | None = None
        self._block: Reading[None] | None = None
        self._content: list[str] = []
        self._space = ""
        self._has_content = False
        self._deltas: list[ToolCallDelta] = []
        self.num_calls = 0

    def feed(self, text: str) -> ToolDelta:
        for char in text:
            self._put(char)
        return self._collect()

    def finish(self) -> ToolDelta:
        """The end of the output: an unfinished call is content."""
        while self._block is not None:
            self._advance("")
        held, self._held = self._held, ""
        self._say(held)
        if not self.num_calls and self._space:
            self._content.append(self._space)
        self._space = ""
        return self._collect()

    def _collect(self) -> ToolDelta:
        delta = ToolDelta("".join(self._content), tuple(self._deltas))
        self._content.clear()
        self._deltas.clear()
        return delta

    def _put(self, char: str) -> None:
        if self._block is not None:
            self._advance(char)
            return
        if not self._held and char not in self._first:
            self._say(char)
            return
        self._held += char
        while self._held and not any(opener.startswith(self._held) for opener in self._form.openers):
            self._say(self._held[0])
            self._held = self._held[1:]
        if self._held in self._form.openers:
            self._cursor = Cursor(self._held, self._tools)
            self._block = self._form.read(self._cursor, self._held)
            self._held = ""
            next(self._block)

    def _advance(self, char: str) -> None:
        """Gives a block its next character, and text its due if the block ends there."""
        block, cursor = self._block, self._cursor
        assert block is not None
        assert cursor is not None
        over = True
        try:
            block.send(char)
            over = False
        except (StopIteration, Malformed):
            self._block = self._cursor = None
        for call in cursor.calls:
            call_id = call.id or self._make_id(self._form)
            self._deltas.append(ToolCallDelta(self.num_calls, call.arguments, call_id, call.name))
            self.num_calls += 1
        cursor.calls.clear()
        if not over:
            return
        if cursor.has_committed:
            for left in cursor.raw:  # may hold the beginning of another block
                self._put(left)
        else:
            self._say("".join(cursor.raw))
        if cursor.unread:
            self._put(cursor.unread)

    def _say(self, text: str) -> None:
        for char in text:
            if char.isspace():
                self._space += char
                continue
            if self._has_content or not self.num_calls:
                self._content.append(self._space)
            self._content.append(char)
            self._space = ""
            self._has_content = True


def parse_tool_calls(
    text: str,
    form: ToolFormat,
    tools: Collection[str] | None = None,
    make_id: Callable[[ToolFormat], str] = new_call_id,
) -> tuple[str, tuple[ToolCall, ...]]:
    """(content, calls) of a whole output."""
    parser = ToolParser(form, tools, make_id)
    parts = [parser.feed(text), parser.finish()]
    calls = tuple(
        ToolCall(delta.id or "", delta.name or "", delta.arguments) for part in parts for delta in part.calls
    )
    return "".join(part.content for part in parts), calls
