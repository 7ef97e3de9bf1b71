"""Messages and tools of a chat request, checked and brought into the form that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .speech import OptionError

ROLES = ("system", "developer", "user", "assistant", "tool")
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
PART_SEPARATOR = "\n"  # between the text parts of one message, as other servers join them
KEPT = ("name", "tool_call_id")

Message = dict[str, Any]


def template_messages(
    messages: Sequence[Mapping[str, Any]], model: str, roles: Sequence[str] = ROLES
) -> list[Message]:
    """OpenAI's messages as templates take them.

    Content becomes one string, the arguments of earlier tool calls an object, the thinking of earlier answers
    `reasoning_content`. A role that the template does not know (`roles`) is written as the nearest one it
    does: developer as system. Raises OptionError, whose param names the place.
    """
    if not messages:
        raise OptionError("messages", "messages must hold at least one message")
    return [_message(message, f"messages[{index}]", model, roles) for index, message in enumerate(messages)]


def _message(message: Mapping[str, Any], where: str, model: str, roles: Sequence[str]) -> Message:
    role = message.get("role")
    if role not in ROLES:
        raise OptionError(f"{where}.role", f"{where}.role must be one of {', '.join(ROLES)}")
    calls = message.get("tool_calls") or ()
    thinking = message.get("reasoning_content") or message.get("reasoning")
    if role != "assistant" and (calls or thinking):
        raise OptionError(where, f"{where}: only messages of the assistant have tool_calls or reasoning")
    content = message.get("content")
    if content is None:
        content = message.get("refusal")
    if content is None and not (calls or thinking):
        raise OptionError(f"{where}.content", f"{where}.content must be text")
    result: Message = {"role": role if role in roles or role != "developer" else "system"}
    result["content"] = _text(content, f"{where}.content", model)
    result |= {key: message[key] for key in KEPT if message.get(key) is not None}
    if thinking:
        result["reasoning_content"] = str(thinking)
    if calls:
        result["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)
        ]
    return result


def _text(content: Any, where: str, model: str) -> str:
    """The text of a message's content: a string, a list of text parts, or None for an empty one."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list | tuple):
        raise OptionError(where, f"{where} must be text or a list of parts")
    texts = []
    for index, part in enumerate(content):
        place = f"{where}[{index}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in TEXT_PARTS:
            raise OptionError(place, f"{place}: the model {model} takes text only, no part of type {kind!r}")
        text = part.get(TEXT_PARTS[kind])
        if not isinstance(text, str):
            raise OptionError(f"{place}.{TEXT_PARTS[kind]}", f"{place} has no text")
        texts.append(text)
    return PART_SEPARATOR.join(texts)


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise OptionError(f"{where}.function", f"{where}.function must have a name")
    place = f"{where}.function.arguments"
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise OptionError(place, f"{place} must be the text of a JSON object") from None
    if not isinstance(arguments, Mapping | None):
        raise OptionError(place, f"{place} must be the text of a JSON object")
    result = {"type": "function", "function": {"name": function["name"], "arguments": dict(arguments or {})}}
    return {"id": call["id"], **result} if isinstance(call.get("id"), str) else result


CALL_EXAMPLE: tuple[Message, ...] = (
    {"role": "user", "content": "a"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
        ],
    },
)


def with_text_arguments(messages: Sequence[Message]) -> list[Message]:
    """The same messages with the arguments of tool calls as JSON text, which some templates want."""

    def changed(call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        text = json.dumps(function["arguments"], ensure_ascii=False)
        return {**call, "function": {**function, "arguments": text}}

    return [
        {**m, "tool_calls": [changed(call) for call in m["tool_calls"]]} if "tool_calls" in m else m
        for m in messages
    ]


TOOL_INSTRUCTIONS = (
    "You may call functions to answer. Their signatures are within <tools></tools>:\n<tools>\n{tools}\n</tools>\n"
    "For each call write a JSON object with the function's name and arguments within <tool_call></tool_call>:\n"
    '<tool_call>\n{{"name": "…", "arguments": {{…}}}}\n</tool_call>'
)


def with_described_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Messages for a template that knows of no tools: they are told in words, in the form of Hermes 2.

    The tools go into the system message; earlier calls and their results become text.
    """
    result = []
    for message in messages:
        text = message["content"]
        calls = message.get("tool_calls", ())
        for call in calls:
            text += f"\n<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
        if message["role"] == "tool":
            result.append({"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"})
        else:
            kept = {key: value for key, value in message.items() if key != "tool_calls"}
            result.append({**kept, "content": text.strip() if calls else text})
    if tools:
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        told = TOOL_INSTRUCTIONS.format(tools=listed)
        if result[0]["role"] == "system":
            result[0] = {**result[0], "content": f"{result[0]['content']}\n\n{told}"}
        else:
            result.insert(0, {"role": "system", "content": told})
    return result
