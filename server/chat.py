"""POST /v1/chat/completions and /v1/chat/completions/render."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ..models.base import GenerationOutput
from . import errors, sse
from .chat_choice import ChatChoice
from .chat_protocol import ChatBody, check_chat
from .chat_requests import ChatPlan, chat_plan, rendered, tool_format
from .context import Context, context_of
from .disconnect import unless_gone
from .generation import Generation, Work, guarded, header, in_worker, receive, start, usage, usage_of
from .json_body import body_schema, parse
from .logprobs import ranked_prompt

logger = logging.getLogger(__name__)
router = APIRouter(tags=["chat"])
PATH = "/v1/chat/completions"
RENDER = PATH + "/render"


@dataclass(frozen=True)
class ChatWork(Work):
    body: ChatBody
    plan: ChatPlan

    def choices(self) -> list[ChatChoice]:
        return [self.plan.choice(self.body, index) for index in range(self.body.n)]


@router.post(PATH, **body_schema(ChatBody, PATH))
async def chat_completions(request: Request) -> Response:
    context = context_of(request)
    with ExitStack() as resources:
        work, generation = await start(request, context, _prepare, resources)
        if work.body.stream:
            events = guarded(_chunks(work, generation))
            return sse.EventStream(events, resources.pop_all(), context.config.stream_stall_seconds)
        return errors.json_response(await unless_gone(request.receive, _answer(work, generation)))


@router.post(RENDER, **body_schema(ChatBody, RENDER))
async def render_chat(request: Request) -> Response:
    """The prompt that the same request would be answered to."""
    with ExitStack() as resources:
        return errors.json_response(
            await receive(request, context_of(request), in_worker(_render), resources)
        )


async def _prepare(context: Context, raw: bytes) -> ChatWork:
    """Raises ApiError."""
    body = await context.text_workers.call(_read, raw)
    model = context.names.resolve(body.model)
    tool_format(body, model)
    grammar = await context.grammars.wanted(body, model)
    plan = await context.text_workers.call(chat_plan, body, model, grammar)
    logger.info(
        "task=chat model=%s prompt_tokens=%d max_tokens=%d n=%d stream=%s",
        *(model.name, len(plan.prompt.token_ids), plan.request.params.max_tokens, body.n, body.stream),
    )
    return ChatWork(model, body.model, (plan.request,), body.priority, body, plan)


def _read(raw: bytes) -> ChatBody:
    body = parse(ChatBody, raw)
    check_chat(body)
    return body


def _render(context: Context, raw: bytes) -> dict[str, Any]:
    """In a worker thread. Raises ApiError."""
    body = _read(raw)
    model = context.names.resolve(body.model)
    prompt = rendered(body, model)
    return {
        "object": "chat.completion.prompt",
        "model": body.model,
        "prompt": prompt.text,
        "prompt_token_ids": list(prompt.token_ids),
        "count": len(prompt.token_ids),
        "max_model_len": model.max_model_len,
    }


async def _answer(work: ChatWork, generation: Generation) -> dict[str, Any]:
    choices = work.choices()
    async for delta in generation.deltas():
        choices[delta.sequence].push(delta)
    outputs = await generation.outputs()
    answer = {
        **header("chatcmpl", "chat.completion", work),
        "choices": [choice.whole() for choice in choices],
        "usage": _usage(work, outputs, choices),
    }
    if work.body.prompt_logprobs is not None:
        tokenizer, ids = work.plan.processor.tokenizer, work.plan.request.inputs.prompt_token_ids
        top = work.body.prompt_logprobs
        answer["prompt_logprobs"] = ranked_prompt(tokenizer, ids, outputs[0].probe, top)
    return answer


def _usage(work: ChatWork, outputs: list[GenerationOutput], choices: list[ChatChoice]) -> dict[str, Any]:
    return usage_of(work, outputs, sum(choice.reasoning_tokens for choice in choices))


async def _chunks(work: ChatWork, generation: Generation) -> AsyncIterator[dict[str, Any]]:
    """The stream's events."""
    body, head, choices = work.body, header("chatcmpl", "chat.completion.chunk", work), work.choices()
    async for delta in generation.deltas():
        for choice in choices[delta.sequence].push(delta):
            event = {**head, "choices": [choice]}
            if body.includes_usage:
                sampled = sum(c.num_tokens for c in choices)
                event["usage"] = usage(work.num_prompt_tokens, sampled) if body.counts_all_along else None
            yield event
    outputs = await generation.outputs()
    if body.includes_usage:
        yield {**head, "choices": [], "usage": _usage(work, outputs, choices)}
