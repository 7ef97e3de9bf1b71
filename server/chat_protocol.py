"""What a chat completion request may say: messages, tools, and the form of the answer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from annotated_types import Ge, Le, Len
from pydantic import Field

from . import errors
from .json_body import ONE_FAULT, Body
from .text_protocol import MAX_LOGPROBS, Count, SamplingBody, check_sampling

MAX_TOOLS = 128  # as with OpenAI
MAX_MESSAGES = 1 << 16
MAX_TEMPLATE_ARGUMENTS_BYTES = 65_536
RESERVED_ARGUMENTS = frozenset(
    ("self", "messages", "tools", "add_generation_prompt", "continue_final_message")
)
Role = Literal["system", "developer", "user", "assistant", "tool"]
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class ContentPart(Body):
    """type text or refusal; the other kinds carry media."""

    type: Annotated[str, Len(1, 64)]
    text: str | None = None
    refusal: str | None = None


class CalledFunction(Body):
    name: Annotated[str, Len(1, 256)]
    arguments: str = "{}"


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    role: Role
    content: str | Annotated[list[ContentPart], Len(1, 4096), ONE_FAULT] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Annotated[list[ToolCall], Len(0, 1024), ONE_FAULT] | None = None
    tool_call_id: str | None = None


class Function(Body):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: Annotated[str, Len(1, 256)]


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


Messages = Annotated[list[Message], Len(1, MAX_MESSAGES), ONE_FAULT]


class TemplateOptions(Body):
    """What shapes the rendered prompt beside the messages."""

    tools: Annotated[list[Tool], Len(0, MAX_TOOLS), ONE_FAULT] = Field(default_factory=list)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class TemplateFields(TemplateOptions):
    messages: Messages


class ChatBody(SamplingBody, TemplateFields):
    """POST /v1/chat/completions."""

    max_completion_tokens: Annotated[Count | None, Field(description="As max_tokens, and before it.")] = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Ge(0), Le(MAX_LOGPROBS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    include_reasoning: bool = True
    thinking_token_budget: Count | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    prediction: dict[str, Any] | None = None
    # Known and refused unless they ask for what there is.
    modalities: list[Literal["text"]] | None = None
    audio: None = None
    web_search_options: None = None
    functions: None = None
    function_call: None = None

    @property
    def token_limit(self) -> tuple[str, int | None]:
        """The most tokens to sample, and the parameter that said so."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @property
    def forces_calls(self) -> bool:
        return self.tool_choice not in ("none", "auto")

    @property
    def forced_tool(self) -> str | None:
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None


def check_chat(body: ChatBody) -> None:
    """Checks what parameters say together. Raises ApiError 400."""
    check_template(body)
    check_sampling(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise errors.invalid("top_logprobs", "top_logprobs needs logprobs=true.")
    if body.token_limit[1] == 0:
        raise errors.invalid(body.token_limit[0], f"{body.token_limit[0]} must be at least 1.")
    names = [tool.function.name for tool in body.tools]
    if body.tool_choice not in ("none", "auto") and not names:
        raise errors.invalid("tool_choice", "tool_choice needs tools.")
    if body.forced_tool is not None and body.forced_tool not in names:
        raise errors.invalid("tool_choice", f"tool_choice names {errors.shown(body.forced_tool)}, no tool.")


def check_template(body: TemplateFields) -> None:
    """Raises ApiError 400."""
    for index, message in enumerate(body.messages):
        if message.role == "tool" and not message.tool_call_id:
            param = f"messages[{index}].tool_call_id"
            raise errors.invalid(param, f"{param} is missing.", "missing_required_parameter")
    names = [tool.function.name for tool in body.tools]
    if len(set(names)) < len(names):
        raise errors.invalid("tools", "Two tools have the same name.")
    if body.continue_final_message and body.add_generation_prompt:
        reason = "continue_final_message and add_generation_prompt exclude each other."
        raise errors.invalid("continue_final_message", reason)
    taken = sorted(RESERVED_ARGUMENTS & body.chat_template_kwargs.keys())
    if taken:
        raise errors.invalid("chat_template_kwargs", f"chat_template_kwargs must not set {taken[0]}.")
    if len(orjson.dumps(body.chat_template_kwargs)) > MAX_TEMPLATE_ARGUMENTS_BYTES:
        raise errors.invalid("chat_template_kwargs", "chat_template_kwargs is too large.")
