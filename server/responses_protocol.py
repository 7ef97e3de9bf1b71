"""What a request for a response may say, and the chat request that it stands for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, Len
from pydantic import BeforeValidator, Field, model_validator

from . import errors
from .chat_protocol import MAX_MESSAGES, MAX_TOOLS, ChatBody, Name, check_chat
from .errors import ApiError
from .json_body import ONE_FAULT, Body, validated
from .text_protocol import MAX_LOGPROBS, MAX_TOKEN_ID

Item = dict[str, Any]
LOGPROBS = "message.output_text.logprobs"
# Fields that mean here what they mean for a chat, which checks them.
SHARED = (
    *("model", "temperature", "top_p", "parallel_tool_calls", "stream_options"),
    *("seed", "stop", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "ignore_eos", "min_tokens", "thinking_token_budget", "chat_template_kwargs"),
    *("cache_salt", "priority", "skip_special_tokens"),
)
RENAMED = {
    "messages": "input",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}


class Part(Body):
    type: Literal["input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"]
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _complete(self) -> Part:
        if (self.refusal if self.type == "refusal" else self.text) is None:
            raise ValueError("a part needs its text")
        return self


def _parts(content: Any) -> Any:
    """A plain text as a list of one part, so that errors are about the parts and not about both forms."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


Parts = Annotated[list[Part], Len(0, 4096), ONE_FAULT]
Content = Annotated[Parts, BeforeValidator(_parts, json_schema_input_type=str | Parts)]


class InputItem(Body):
    """A message, a call of a function, what it gave, or the thinking before an answer."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    id: str | None = None
    status: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Content | None = None
    call_id: Annotated[str, Len(1, 256)] | None = None
    name: Annotated[str, Len(1, 256)] | None = None
    arguments: str | None = None
    output: Content | None = None
    summary: Parts | None = None

    @model_validator(mode="after")
    def _complete(self) -> InputItem:
        needed = {
            "message": ("role", "content"),
            "function_call": ("call_id", "name", "arguments"),
            "function_call_output": ("call_id", "output"),
            "reasoning": (),
        }
        for name in needed[self.type]:
            if getattr(self, name) is None:
                raise ValueError(f"an item of type {self.type} needs {name}")
        return self


def _items(given: Any) -> Any:
    """A plain text as one message of the user."""
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


Items = Annotated[list[InputItem], Len(1, MAX_MESSAGES), ONE_FAULT]


class FunctionTool(Body):
    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenTool(Body):
    type: Literal["function"]
    name: Annotated[str, Len(1, 256)]


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")] | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _complete(self) -> TextFormat:
        if self.type == "json_schema" and (self.name is None or self.schema_ is None):
            raise ValueError("type json_schema needs name and schema")
        return self


class TextOptions(Body):
    format: TextFormat = Field(default_factory=TextFormat)
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(Body):
    """summary is accepted: the thinking itself is shown, and nothing is summed up."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesBody(Body):
    """POST /v1/responses: OpenAI's fields, and those for sampling that a chat has."""

    model: Annotated[str, Len(1, 1024)]
    input: Annotated[Items, BeforeValidator(_items, json_schema_input_type=str | Items)]
    instructions: str | None = None
    previous_response_id: Annotated[str, Len(1, 256)] | None = None
    store: bool = True
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    background: bool = False
    max_output_tokens: Annotated[int, Ge(1), Le(MAX_TOKEN_ID)] | None = None
    tools: Annotated[list[FunctionTool], Len(0, MAX_TOOLS), ONE_FAULT] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | ChosenTool = "auto"
    parallel_tool_calls: bool = True
    max_tool_calls: Annotated[int, Ge(1), Le(MAX_TOKEN_ID)] | None = None  # of the built-in tools: none here
    text: TextOptions = Field(default_factory=TextOptions)
    reasoning: Reasoning = Field(default_factory=Reasoning)
    include: Annotated[list[str], Len(0, 64), ONE_FAULT] = Field(default_factory=list)
    top_logprobs: Annotated[int, Ge(0), Le(MAX_LOGPROBS)] | None = None
    metadata: Annotated[dict[str, str], Len(0, 16)] = Field(default_factory=dict)
    # As for a chat, whose checks they get.
    temperature: Any = None
    top_p: Any = None
    seed: Any = None
    stop: Any = None
    top_k: Any = None
    min_p: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    logit_bias: Any = None
    ignore_eos: Any = None
    min_tokens: Any = None
    skip_special_tokens: Any = None
    thinking_token_budget: Any = None
    chat_template_kwargs: Any = None
    cache_salt: Any = None
    priority: Any = None
    # Read by nothing here; declared so that they are not called unknown.
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    # Known and refused: silently doing something else would be worse.
    truncation: Literal["disabled"] = "disabled"
    conversation: None = None
    prompt: None = None

    @property
    def items(self) -> list[Item]:
        return [item.model_dump(exclude_none=True) for item in self.input]


def check_response(body: ResponsesBody) -> None:
    """Checks what parameters say together. Raises ApiError 400."""
    if body.stream_options is not None and not body.stream:
        raise errors.invalid("stream_options", "stream_options goes with stream=true only.")
    if body.background and body.stream:
        raise errors.invalid("background", "A response in the background cannot be streamed.")
    if body.background and not body.store:
        raise errors.invalid("background", "A response in the background needs store=true.")
    if body.top_logprobs is not None and LOGPROBS not in body.include:
        raise errors.invalid("top_logprobs", f'top_logprobs needs include=["{LOGPROBS}"].')


def chat_of(body: ResponsesBody, items: Iterable[Item]) -> ChatBody:
    """The chat request of a response's whole conversation. Raises ApiError 400."""
    wanted: dict[str, Any] = {
        **{name: getattr(body, name) for name in SHARED},
        "messages": messages_of(items, body.instructions),
        "stream": body.stream,
        "max_completion_tokens": body.max_output_tokens,
        "tools": [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in body.tools
        ],
        "reasoning_effort": body.reasoning.effort,
        "response_format": _response_format(body.text.format),
        "logprobs": LOGPROBS in body.include,
        "top_logprobs": body.top_logprobs,
        "verbosity": body.text.verbosity,
        "tool_choice": body.tool_choice,
    }
    if isinstance(body.tool_choice, ChosenTool):
        wanted["tool_choice"] = {"type": "function", "function": {"name": body.tool_choice.name}}
    with named_as_here():
        chat = validated(ChatBody, {name: value for name, value in wanted.items() if value is not None})
        check_chat(chat)
    return chat


@contextmanager
def named_as_here() -> Iterator[None]:
    """Lets errors about a chat's parameters name the parameters of the response that they come from."""
    try:
        yield
    except ApiError as error:
        first = (error.param or "").partition(".")[0].partition("[")[0]
        error.param = RENAMED.get(first, error.param)
        raise


def _response_format(form: TextFormat) -> dict[str, Any] | None:
    if form.type != "json_schema":
        return None if form.type == "text" else {"type": form.type}
    named = {"name": form.name, "schema": form.schema_, "description": form.description}
    schema = {**named, "strict": form.strict}
    given = {key: value for key, value in schema.items() if value is not None}
    return {"type": "json_schema", "json_schema": given}


def messages_of(items: Iterable[Item], instructions: str | None) -> list[dict[str, Any]]:
    """A chat's messages: one of the assistant holds its thinking, its text and its calls."""
    found: list[dict[str, Any]] = []
    if instructions:
        found.append({"role": "system", "content": instructions})
    for item in items:
        last = found[-1] if found and found[-1]["role"] == "assistant" else None
        if item["type"] == "reasoning":
            if thought := _thought(item):
                found.append({"role": "assistant", "reasoning_content": thought})
        elif item["type"] == "function_call":
            if last is None:
                last = {"role": "assistant"}
                found.append(last)
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            last.setdefault("tool_calls", []).append(call)
        elif item["type"] == "function_call_output":
            content = _content(item["output"])
            found.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
        elif (
            item["role"] == "assistant" and last is not None and last.keys() <= {"role", "reasoning_content"}
        ):
            last["content"] = _content(item["content"])
        else:
            found.append({"role": item["role"], "content": _content(item["content"])})
    return found


def _content(content: list[Item]) -> str | list[Item]:
    if not content:
        return ""
    return [
        {"type": "refusal", "refusal": part["refusal"]}
        if part["type"] == "refusal"
        else {"type": "text", "text": part["text"]}
        for part in content
    ]


def _thought(item: Item) -> str:
    return "".join(part.get("text") or "" for part in item.get("content") or item.get("summary") or ())
