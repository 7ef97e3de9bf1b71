"""POST /v1/responses, and GET, DELETE and cancel of a response that was stored."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from . import errors, sse
from .chat_protocol import ChatBody
from .chat_requests import ChatPlan, chat_plan, tool_format
from .context import Context, context_of
from .disconnect import unless_gone
from .errors import ApiError
from .generation import Generation, Work, engine_errors, start, usage_of
from .json_body import body_schema, parse
from .responses_output import Event, GrowingResponse
from .responses_protocol import Item, ResponsesBody, chat_of, check_response, named_as_here

logger = logging.getLogger(__name__)
router = APIRouter(tags=["responses"])
PATH = "/v1/responses"


@dataclass(frozen=True)
class ResponseWork(Work):
    """items: the whole conversation, this request's input included. chat: what it stands for."""

    body: ResponsesBody
    items: tuple[Item, ...]
    chat: ChatBody
    plan: ChatPlan


@router.post(PATH, **body_schema(ResponsesBody, PATH))
async def create_response(request: Request) -> Response:
    context = context_of(request)
    with ExitStack() as resources:
        work, generation = await start(request, context, _prepare, resources)
        making = _Making(context, work, generation)
        if work.body.stream:
            return sse.EventStream(making.sent(), resources.pop_all(), context.config.stream_stall_seconds)
        if work.body.background:
            return errors.json_response(making.in_background(resources.pop_all()))
        return errors.json_response(await unless_gone(request.receive, making.whole()))


@router.get(PATH + "/{name}")
async def get_response(name: str, request: Request) -> Response:
    if request.query_params.get("stream", "false") != "false":
        raise errors.invalid("stream", "A stored response cannot be streamed.", "unsupported_value")
    return errors.json_response(context_of(request).responses.get(name).response)


@router.delete(PATH + "/{name}")
async def delete_response(name: str, request: Request) -> Response:
    context_of(request).responses.delete(name)
    return errors.json_response({"id": name, "object": "response", "deleted": True})


@router.post(PATH + "/{name}/cancel")
async def cancel_response(name: str, request: Request) -> Response:
    responses = context_of(request).responses
    found = responses.get(name).response
    if not found["background"]:
        raise errors.invalid(None, "Only a response that was made with background=true can be cancelled.")
    task = responses.tasks.get(name)
    if task is not None:
        task.cancel()
        await asyncio.wait({task})
    return errors.json_response(responses.get(name).response)


async def _prepare(context: Context, raw: bytes) -> ResponseWork:
    """Raises ApiError."""
    body = await context.text_workers.call(_read, raw)
    before = context.responses.before(body.previous_response_id)
    items, chat = await context.text_workers.call(_conversation, body, before)
    model = context.names.resolve(body.model)
    with named_as_here():
        tool_format(chat, model)
        grammar = await context.grammars.wanted(chat, model)
        plan = await context.text_workers.call(chat_plan, chat, model, grammar)
    logger.info(
        "task=response model=%s prompt_tokens=%d max_tokens=%d stream=%s background=%s",
        *(model.name, len(plan.prompt.token_ids), plan.request.params.max_tokens),
        *(body.stream, body.background),
    )
    return ResponseWork(model, body.model, (plan.request,), chat.priority, body, items, chat, plan)


def _read(raw: bytes) -> ResponsesBody:
    body = parse(ResponsesBody, raw)
    check_response(body)
    return body


def _conversation(body: ResponsesBody, before: tuple[Item, ...]) -> tuple[tuple[Item, ...], ChatBody]:
    items = (*before, *body.items)
    return items, chat_of(body, items)


class _Making:
    """A response being made."""

    def __init__(self, context: Context, work: ResponseWork, generation: Generation) -> None:
        self._context = context
        self._work = work
        self._generation = generation
        self._growing = GrowingResponse(_head(work))

    async def whole(self) -> dict[str, Any]:
        """Raises ApiError."""
        async for _ in self._events():
            pass
        return self._kept()

    async def sent(self) -> AsyncIterator[bytes]:
        """The events as sent; a failure is the last of them."""
        try:
            with engine_errors():
                async for event in self._events():
                    if event["type"] in ("response.completed", "response.incomplete"):
                        self._kept()  # before the client hears of it and asks for it
                    yield sse.named_event(event)
            return
        except ApiError as error:
            failure = error
        except Exception:
            logger.exception("a stream failed")
            failure = errors.internal()
        for event in self._growing.fail(failure):
            yield sse.named_event(event)

    def in_background(self, resources: ExitStack) -> dict[str, Any]:
        """Starts the work, which gives `resources` back when it is over; the response as it is now."""
        responses, growing = self._context.responses, self._growing
        task = asyncio.create_task(self._run())
        responses.tasks[growing.id] = task
        responses.put(growing.response(), ())

        def over(task: asyncio.Task[None]) -> None:
            resources.close()
            del responses.tasks[growing.id]
            if task.cancelled():
                growing.cancel()
            if growing.id in responses:  # neither deleted nor pushed out by others
                self._kept()

        task.add_done_callback(over)
        return growing.response()

    async def _run(self) -> None:
        try:
            with engine_errors():
                async for _ in self._events():
                    pass
        except ApiError as error:
            self._growing.fail(error)
        except Exception:
            logger.exception("a response in the background failed")
            self._growing.fail(errors.internal())

    async def _events(self) -> AsyncIterator[Event]:
        growing, choice = self._growing, self._work.plan.choice(self._work.chat, 0)
        for event in growing.begin():
            yield event
        async for delta in self._generation.deltas():
            for event in growing.push(choice.push(delta)):
                yield event
        outputs = await self._generation.outputs()
        for event in growing.end(usage_of(self._work, outputs, choice.reasoning_tokens)):
            yield event

    def _kept(self) -> dict[str, Any]:
        """The response as it is now, stored unless the client would not have it."""
        response = self._growing.response()
        if self._work.body.store:
            self._context.responses.put(response, (*self._work.items, *response["output"]))
        return response


def _head(work: ResponseWork) -> dict[str, Any]:
    """What of a response does not change."""
    body, params = work.body, work.plan.request.params
    form = body.text.format.model_dump(exclude_none=True, by_alias=True)
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "model": work.name,
        "background": body.background,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata,
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort, "summary": None},
        "service_tier": "default",
        "store": body.store,
        "temperature": params.temperature,
        "text": {"format": form, "verbosity": body.text.verbosity or "medium"},
        "tool_choice": body.tool_choice
        if isinstance(body.tool_choice, str)
        else body.tool_choice.model_dump(),
        "tools": [{"strict": None, **tool.model_dump()} for tool in body.tools],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": body.truncation,
        "user": body.user,
    }
