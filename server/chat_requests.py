"""From a checked chat request to the engine's: the prompt, what is looked for in the output, what is forced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..engine.engine import LoadedModel
from ..models.base import GenerationRequest, Grammar, LogitsProcessor
from ..models.reasoning import GrammarAfterThinking, ReasoningParser, ThinkingBudget
from ..models.text import ChatPrompt, TextProcessor
from ..models.tool_formats import ToolFormat
from ..models.tool_parsers import ToolParser
from ..processors.inputs import MultiModalInputs
from . import errors
from .chat_choice import ChatChoice, ForcedCalls
from .chat_protocol import ChatBody
from .prompts import render
from .sampling import checked_prompt, option_errors, prompt_probe, sampling_options, text_processor


@dataclass(frozen=True)
class ChatPlan:
    """tools: the format in which calls are written, None where no call is looked for."""

    processor: TextProcessor
    prompt: ChatPrompt
    request: GenerationRequest
    tools: ToolFormat | None

    def choice(self, body: ChatBody, index: int) -> ChatChoice:
        """What reads the output of one sequence."""
        form = self.processor.reasoning_format
        tools: ToolParser | ForcedCalls | None = None
        if self.tools is not None and body.forces_calls:
            tools = ForcedCalls(self.tools, body.forced_tool)
        elif self.tools is not None:
            tools = ToolParser(self.tools, [tool.function.name for tool in body.tools])
        return ChatChoice(
            index,
            self.processor.tokenizer,
            reasoning=None if form is None else ReasoningParser(form, self.prompt.thinking),
            tools=tools,
            logprobs=body.logprobs,
            parallel=body.parallel_tool_calls,
            shows_reasoning=body.include_reasoning,
        )


def template_arguments(body: ChatBody) -> dict[str, Any]:
    """Variables of the template that follow from OpenAI's fields."""
    if body.reasoning_effort is None:
        return {}
    return {"reasoning_effort": body.reasoning_effort, "enable_thinking": body.reasoning_effort != "none"}


def rendered(body: ChatBody, model: LoadedModel) -> ChatPrompt:
    """The prompt of a request. Raises ApiError 400."""
    shown = body.model_copy(update={"tools": []}) if body.tool_choice == "none" else body
    return render(shown, model, **template_arguments(body))


def chat_plan(body: ChatBody, model: LoadedModel, grammar: Grammar | None) -> ChatPlan:
    """Raises ApiError 400."""
    processor = text_processor(model)
    tools = tool_format(body, model)
    prompt = rendered(body, model)
    ids = checked_prompt(prompt.token_ids, body.truncate_prompt_tokens, model, "messages")
    marks = processor.thinking_marks(prompt.thinking)
    last: tuple[LogitsProcessor, ...] = ()
    if body.thinking_token_budget is not None:
        if marks is None:
            message = f"The model {errors.shown(model.name)} does not think before it answers."
            raise errors.invalid("thinking_token_budget", message, "unsupported_value")
        last = (ThinkingBudget(body.thinking_token_budget, marks),)
    if grammar is not None and marks is not None:
        grammar = GrammarAfterThinking(grammar, marks)
    options = sampling_options(
        body,
        max_tokens=body.token_limit[1],
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        skip_special_tokens=body.skip_special_tokens and not (tools is not None and tools.special_tokens),
    )
    with option_errors():
        params = processor.sampling(
            options,
            ids,
            model.max_model_len,
            last=last,
            grammar=grammar,
            probe=prompt_probe(ids, body.prompt_logprobs),
        )
    inputs = MultiModalInputs(ids)
    request = GenerationRequest(0, inputs, params, stream=True, cache_salt=body.cache_salt or "")
    return ChatPlan(processor, prompt, request, tools)


def tool_format(body: ChatBody, model: LoadedModel) -> ToolFormat | None:
    """How calls will be written, None where none is looked for. Raises ApiError 400."""
    if not body.tools or body.tool_choice == "none":
        return None
    found = text_processor(model).tool_format
    if found is None:
        message = f"The tool calls of the model {errors.shown(model.name)} cannot be read by this server."
        raise errors.invalid("tools", message, "unsupported_value")
    return found
