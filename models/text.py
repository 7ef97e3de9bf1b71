"""Text models: generation as a program over the engine, prompts from messages, and what reads their output."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..processors.chat_template import ChatTemplate, TemplateError
from ..processors.text import TextTokenizer
from .base import (
    GenerationOutput,
    GenerationRequest,
    Grammar,
    LogitsProbe,
    LogitsProcessor,
    ModelInfo,
    SamplingParams,
)
from .messages import (
    CALL_EXAMPLE,
    ROLES,
    Message,
    template_messages,
    with_described_tools,
    with_text_arguments,
)
from .reasoning import Thinking, ThinkingMarks, reasoning_format_of
from .speech import OptionError
from .text_sampling import SamplingDefaults, SamplingOptions, end_ids, sampling_params
from .tool_formats import HERMES
from .tool_parsers import tool_format_of

RESERVED = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "tokenizer", "self"}
)


class GenerationProgram:
    """Runs requests side by side; the result is their outputs in the requests' order.

    Keys must be distinct. What a request streams is published by the engine itself.
    """

    def __init__(self, requests: Iterable[GenerationRequest]) -> None:
        self._requests = list(requests)
        self._outputs: dict[Any, GenerationOutput] = {}

    def start(self) -> list[GenerationRequest]:
        return self._requests

    def accept(self, output: GenerationOutput) -> list[GenerationRequest]:
        self._outputs[output.key] = output
        return []

    def take_events(self) -> list[Any]:
        return []

    def result(self) -> list[GenerationOutput]:
        return [self._outputs[request.key] for request in self._requests]


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered conversation.

    prefill: the text of the assistant's message that the output continues, if it does. thinking: what the
    prompt says of the output's thinking; "closed" for models that do not think.
    """

    text: str
    token_ids: tuple[int, ...]
    prefill: str | None = None
    thinking: Thinking = "closed"


class TextProcessor:
    """The ModelProcessor of every text family; immutable, so one serves all threads.

    Attributes
    ----------
    stop_ids: ids that end a generation, the text's own end first.
    defaults: what holds where a user says nothing of sampling.
    reasoning_format: how the model marks its thinking, None if it does not think.
    tool_format: how it writes tool calls, None if it cannot be taught to. Models whose template knows of no
        tools are told about them in words.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        tokenizer: TextTokenizer,
        chat_template: ChatTemplate | None,
        name: str,
        generation_config: Mapping[str, Any] | None = None,
    ) -> None:
        """config, generation_config: of the checkpoint. chat_template: None for a model that cannot chat."""
        self.tokenizer = tokenizer
        self.chat_template = chat_template if chat_template is not None and chat_template.exists else None
        capabilities = {"completion", "embedding"} | ({"chat"} if self.chat_template else set())
        self.info = ModelInfo(str(config.get("model_type")), frozenset(capabilities), config)
        self.stop_ids = end_ids(tokenizer)
        self.defaults = SamplingDefaults.from_generation_config(generation_config or {})
        self._sources = "\n".join(self.chat_template.sources.values()) if self.chat_template else ""
        self._knows_tools = "tools" in self._sources
        self.reasoning_format = reasoning_format_of(self._sources)
        told = HERMES if self.chat_template else None
        self.tool_format = tool_format_of(self._sources) if self._knows_tools else told
        self._name = name

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        arguments: Mapping[str, Any] | None = None,
    ) -> ChatPrompt:
        """Renders messages and tools in OpenAI's form.

        continue_final_message: the output goes on where the last message, the assistant's, ends.
        arguments: further variables of the template (enable_thinking). Raises OptionError.
        """
        for name in RESERVED.intersection(arguments or ()):
            raise OptionError("chat_template_kwargs", f"{name} is no variable for chat_template_kwargs")
        template = self.chat_template
        if template is None:
            raise OptionError("messages", f"the model {self._name} has no chat template: use completions")
        roles = [role for role in ROLES if role != "developer" or "developer" in self._sources]
        turns = template_messages(messages, self._name, roles)
        if not self._knows_tools:
            turns, tools = with_described_tools(turns, tools), ()
        elif self._wants_text_arguments:
            turns = with_text_arguments(turns)
        prefill = None
        if continue_final_message:
            if turns[-1]["role"] != "assistant":
                raise OptionError(
                    "continue_final_message", "only a message of the assistant can be continued"
                )
            prefill = turns[-1]["content"]
        options: dict[str, Any] = {
            **(arguments or {}),
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            "continue_final_message": continue_final_message,
        }
        try:
            ids = template.render_ids(self.tokenizer, turns, tools or None, **options)
            text = template.render(turns, tools or None, **options)
        except TemplateError as error:
            raise OptionError("messages", str(error)) from error
        thinking: Thinking = "closed"
        if self.reasoning_format is not None:
            thinking = self.reasoning_format.thinking_after(text, prefill)
        return ChatPrompt(text, tuple(ids), prefill, thinking)

    def sampling(
        self,
        options: SamplingOptions,
        prompt: Sequence[int],
        max_model_len: int,
        *,
        what: str = "messages",
        last: Iterable[LogitsProcessor] = (),
        grammar: Grammar | None = None,
        probe: LogitsProbe | None = None,
    ) -> SamplingParams:
        """`text_sampling.sampling_params` with the model's defaults. Raises OptionError, ContextLengthError."""
        return sampling_params(
            options,
            self.defaults,
            self.tokenizer,
            prompt,
            max_model_len,
            what=what,
            last=last,
            grammar=grammar,
            probe=probe,
        )

    def thinking_marks(self, thinking: Thinking) -> ThinkingMarks | None:
        """What budgets and grammars need of the thinking, None for a model that does not think."""
        form = self.reasoning_format
        return None if form is None else ThinkingMarks.of(form, self.tokenizer, thinking)

    @cached_property
    def _wants_text_arguments(self) -> bool:
        """Whether the template takes arguments of earlier calls as text alone (DeepSeek), found by trying."""
        return not self._renders(CALL_EXAMPLE) and self._renders(with_text_arguments(CALL_EXAMPLE))

    def _renders(self, turns: Sequence[Message]) -> bool:
        assert self.chat_template is not None
        try:
            self.chat_template.render(turns, None, add_generation_prompt=False)
        except TemplateError:
            return False
        return True
