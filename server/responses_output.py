"""A response as it grows: its items, and the events that tell of them.

Streams and whole answers are made by the same object, so that a stream's events add up to the whole answer.
"""

from __future__ import annotations

import copy
import time
import uuid
from collections.abc import Iterable
from typing import Any

from .errors import ApiError

Event = dict[str, Any]


class GrowingResponse:
    """Takes the choices that chat_choice.ChatChoice gives, and returns the events to send, in order."""

    def __init__(self, head: dict[str, Any]) -> None:
        """head: the response's fields but for those that change."""
        self.id: str = head["id"]
        self.items: list[dict[str, Any]] = []
        self._head = head
        self._changing: dict[str, Any] = {"status": "in_progress", "completed_at": None, "error": None}
        self._changing |= {"incomplete_details": None, "usage": None}
        self._number = 0
        self._open: dict[str, Any] | None = None
        self._pieces: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._blank = ""  # white space that begins a text, if a text follows
        self._cut_off = False

    def response(self) -> dict[str, Any]:
        return {**self._head, **self._changing, "output": copy.deepcopy(self.items)}

    @property
    def status(self) -> str:
        return str(self._changing["status"])

    def begin(self) -> list[Event]:
        return [self._told("response.created"), self._told("response.in_progress")]

    def push(self, choices: Iterable[dict[str, Any]]) -> list[Event]:
        events: list[Event] = []
        for choice in choices:
            delta, logprobs = choice["delta"], (choice["logprobs"] or {}).get("content") or []
            if delta.get("reasoning_content"):
                events += self._thinks(delta["reasoning_content"])
            if delta.get("content"):
                events += self._says(delta["content"], logprobs)
            for call in delta.get("tool_calls", ()):
                events += self._calls(call)
            self._cut_off = self._cut_off or choice["finish_reason"] == "length"
        return events

    def end(self, usage: dict[str, Any]) -> list[Event]:
        """usage: of a chat."""
        events: list[Event] = []
        if not self.items:
            events += self._open_message()
            events += (
                self._grow("response.output_text.delta", self._blank, logprobs=[]) if self._blank else []
            )
        events += self._close("incomplete" if self._cut_off else "completed")
        self._changing["usage"] = _usage(usage)
        if self._cut_off:
            self._changing |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
            return [*events, self._told("response.incomplete")]
        self._changing |= {"status": "completed", "completed_at": int(time.time())}
        return [*events, self._told("response.completed")]

    def fail(self, error: ApiError) -> list[Event]:
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        events = self._close("incomplete")
        self._changing |= {"status": "failed", "error": {"code": code, "message": error.message}}
        return [*events, self._told("response.failed")]

    def cancel(self) -> None:
        self._close("incomplete")
        self._changing["status"] = "cancelled"

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event

    def _told(self, kind: str) -> Event:
        return self._event(kind, response=self.response())

    # -- items ----------------------------------------------------------------------------------------

    def _thinks(self, text: str) -> list[Event]:
        events: list[Event] = []
        if self._open is None or self._open["type"] != "reasoning":
            item = {"id": _new_id("rs"), "type": "reasoning", "summary": [], "content": []}
            events = self._start(item, {"type": "reasoning_text", "text": ""})
        return events + self._grow("response.reasoning_text.delta", text)

    def _says(self, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        self._logprobs += logprobs
        if self._open is not None and self._open["type"] == "message":
            return self._grow("response.output_text.delta", text, logprobs=logprobs)
        self._blank += text
        if not self._blank.strip():
            return []
        events = self._open_message()
        text, self._blank = self._blank, ""
        return events + self._grow("response.output_text.delta", text, logprobs=logprobs)

    def _open_message(self) -> list[Event]:
        item = {"id": _new_id("msg"), "type": "message", "role": "assistant", "content": []}
        return self._start(item, {"type": "output_text", "text": "", "annotations": [], "logprobs": []})

    def _calls(self, call: dict[str, Any]) -> list[Event]:
        events: list[Event] = []
        if "id" in call:
            named = {"call_id": call["id"], "name": call["function"]["name"], "arguments": ""}
            events = self._start({"id": _new_id("fc"), "type": "function_call", **named}, None)
        arguments = call["function"]["arguments"]
        return events + (self._grow("response.function_call_arguments.delta", arguments) if arguments else [])

    def _start(self, item: dict[str, Any], part: dict[str, Any] | None) -> list[Event]:
        events = self._close("completed")
        self._open = {**item, "status": "in_progress"}
        self.items.append(self._open)
        place = {"output_index": len(self.items) - 1}
        events.append(self._event("response.output_item.added", **place, item=copy.deepcopy(self._open)))
        if part is not None:
            self._open["content"] = [part]
            added = self._event("response.content_part.added", **self._place(), part=copy.deepcopy(part))
            events.append(added)
        return events

    def _place(self) -> dict[str, Any]:
        """Where the open item's text is."""
        assert self._open is not None
        place = {"item_id": self._open["id"], "output_index": len(self.items) - 1}
        return place if self._open["type"] == "function_call" else {**place, "content_index": 0}

    def _grow(self, kind: str, text: str, **more: Any) -> list[Event]:
        self._pieces.append(text)
        return [self._event(kind, **self._place(), delta=text, **more)]

    def _close(self, status: str) -> list[Event]:
        """Ends the open item, if there is one."""
        item = self._open
        if item is None:
            return []
        text, self._pieces = "".join(self._pieces), []
        events, place = [], self._place()
        if item["type"] == "function_call":
            item["arguments"] = text
            done = {"name": item["name"], "arguments": text}
            events.append(self._event("response.function_call_arguments.done", **place, **done))
        else:
            (part,) = item["content"]
            part["text"] = text
            kind, more = "response.reasoning_text.done", {}
            if item["type"] == "message":
                part["logprobs"], self._logprobs = self._logprobs, []
                kind, more = "response.output_text.done", {"logprobs": part["logprobs"]}
            events.append(self._event(kind, **place, text=text, **more))
            events.append(self._event("response.content_part.done", **place, part=part))
        item["status"] = status
        self._open = None
        place = {"output_index": len(self.items) - 1}
        return [*events, self._event("response.output_item.done", **place, item=item)]


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """A chat's token counts in the shape of a response's."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": usage["total_tokens"],
    }
