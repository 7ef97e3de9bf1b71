"""One choice of a chat completion as it grows: thinking, answer and tool calls told apart.

Streams and whole answers are made by the same object, so that a stream's deltas add up to the whole answer.
"""

from __future__ import annotations

from typing import Any

import orjson

from ..models.base import TextTokenizer, TokenDelta, TokenLogprob
from ..models.reasoning import ReasoningDelta, ReasoningParser
from ..models.tool_formats import ToolFormat
from ..models.tool_parsers import ToolCallDelta, ToolDelta, ToolParser, new_call_id
from .logprobs import chat_logprobs


class ChatChoice:
    """reasoning, tools: None where the model does not think, or where no call is looked for.

    logprobs: whether they were asked for. parallel: whether more than one call is let through.
    """

    def __init__(
        self,
        index: int,
        tokenizer: TextTokenizer,
        *,
        reasoning: ReasoningParser | None = None,
        tools: ToolParser | ForcedCalls | None = None,
        logprobs: bool = False,
        parallel: bool = True,
        shows_reasoning: bool = True,
    ) -> None:
        self._index = index
        self._tokenizer = tokenizer
        self._reasoning = reasoning
        self._tools = tools
        self._parallel = parallel
        self._shows_reasoning = shows_reasoning
        self._logprobs: list[TokenLogprob] | None = [] if logprobs else None
        self._unsent: list[TokenLogprob] = []
        self._begun = False
        self._thought = ""
        self._content = ""
        self._calls: list[dict[str, Any]] = []
        self._finish_reason: str | None = None
        self._before_content = 0
        self.num_tokens = 0

    @property
    def reasoning_tokens(self) -> int:
        """Tokens up to the end of the thinking, its marks included."""
        return self._before_content if self._thought else 0

    def push(self, delta: TokenDelta) -> list[dict[str, Any]]:
        """The choices of the chunks to send now, in order."""
        self.num_tokens += len(delta.token_ids)
        if not self._content and not self._calls:
            self._before_content += len(delta.token_ids)
        if self._logprobs is not None:
            self._logprobs += delta.logprobs or ()
            self._unsent += delta.logprobs or ()
        parts = self._feed(delta.text)
        if delta.finish_reason is not None:
            parts += self._finish()
        chunks = (
            [] if self._begun else [self._chunk({"role": "assistant", "content": ""}, with_logprobs=False)]
        )
        self._begun = True
        chunks += [self._chunk(part) for part in parts]
        if delta.finish_reason is not None:
            called = self._calls and delta.finish_reason == "stop"
            self._finish_reason = "tool_calls" if called else delta.finish_reason
            chunks.append(self._chunk({}))
        return chunks

    def whole(self) -> dict[str, Any]:
        """The choice of an answer that is not streamed."""
        message: dict[str, Any] = {
            "role": "assistant",
            "content": self._content if self._content or not self._calls else None,
            "refusal": None,
            "annotations": [],
        }
        if self._thought and self._shows_reasoning:
            message["reasoning_content"] = self._thought
        if self._calls:
            message["tool_calls"] = self._calls
        logprobs = None if self._logprobs is None else chat_logprobs(self._tokenizer, self._logprobs)
        finish_reason = self._finish_reason or "stop"
        return {
            "index": self._index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }

    def _chunk(self, delta: dict[str, Any], with_logprobs: bool = True) -> dict[str, Any]:
        logprobs = None
        if with_logprobs and self._unsent:
            logprobs = chat_logprobs(self._tokenizer, self._unsent)
            self._unsent = []
        last = self._finish_reason if not delta else None
        return {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": last}

    def _feed(self, text: str) -> list[dict[str, Any]]:
        if not text:
            return []
        if self._reasoning is None:
            return self._feed_content(text)
        return self._divided(self._reasoning.feed(text))

    def _finish(self) -> list[dict[str, Any]]:
        parts = self._divided(self._reasoning.finish()) if self._reasoning is not None else []
        return parts + (self._called(self._tools.finish()) if self._tools is not None else [])

    def _divided(self, delta: ReasoningDelta) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        if delta.reasoning:
            self._thought += delta.reasoning
            if self._shows_reasoning:
                parts.append({"reasoning_content": delta.reasoning})
        return parts + (self._feed_content(delta.content) if delta.content else [])

    def _feed_content(self, text: str) -> list[dict[str, Any]]:
        return self._called(self._tools.feed(text)) if self._tools is not None else self._said(text)

    def _said(self, text: str) -> list[dict[str, Any]]:
        self._content += text
        return [{"content": text}] if text else []

    def _called(self, delta: ToolDelta) -> list[dict[str, Any]]:
        parts = self._said(delta.content)
        for call in delta.calls:
            if call.index and not self._parallel:
                continue
            function: dict[str, Any] = {"arguments": call.arguments}
            piece: dict[str, Any] = {"index": call.index, "function": function}
            if call.name is not None:
                function["name"] = call.name
                piece |= {"id": call.id, "type": "function"}
                self._calls.append(
                    {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}}
                )
            self._calls[call.index]["function"]["arguments"] += call.arguments
            parts.append({"tool_calls": [piece]})
        return parts


class ForcedCalls:
    """Reads calls that a grammar has forced: a JSON list of them, or one tool's arguments alone.

    It stands in a ToolParser's place. The list is read when it is whole; what was cut off by the token limit
    is no call.
    """

    def __init__(self, form: ToolFormat, name: str | None) -> None:
        """name: of the one tool, None for a list of {"name": …, "parameters": …}."""
        self._form = form
        self._name = name
        self._text = ""
        self._begun = False

    def feed(self, text: str) -> ToolDelta:
        if self._name is None:
            self._text += text
            return ToolDelta()
        if self._begun:
            return ToolDelta(calls=(ToolCallDelta(0, text),))
        self._begun = True
        return ToolDelta(calls=(ToolCallDelta(0, text, new_call_id(self._form), self._name),))

    def finish(self) -> ToolDelta:
        if self._name is not None:
            return ToolDelta()
        try:
            found = orjson.loads(self._text)
        except orjson.JSONDecodeError:
            return ToolDelta(content=self._text)
        return ToolDelta(
            calls=tuple(
                ToolCallDelta(
                    *(index, orjson.dumps(call["parameters"]).decode(), new_call_id(self._form), call["name"])
                )
                for index, call in enumerate(found)
            )
        )
