"""POST /v1/completions."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ..models.base import Completion, GenerationOutput, TokenDelta, TokenLogprob
from . import errors, sse
from .completions_protocol import CompletionBody, check_completion
from .context import Context, context_of
from .disconnect import unless_gone
from .generation import Generation, Work, guarded, header, start, usage, usage_of
from .json_body import body_schema, parse
from .logprobs import LegacyLogprobs, prompt_logprobs, ranked_prompt
from .sampling import PromptText, completion_requests, text_processor

logger = logging.getLogger(__name__)
router = APIRouter(tags=["completions"])
PATH = "/v1/completions"


@dataclass(frozen=True)
class CompletionWork(Work):
    """prompts: each prompt's ids and, where it is echoed, its text."""

    body: CompletionBody
    prompts: tuple[PromptText, ...]

    def logprobs(self) -> LegacyLogprobs | None:
        top = self.body.logprobs
        return None if top is None else LegacyLogprobs(text_processor(self.model).tokenizer, top)


@router.post(PATH, **body_schema(CompletionBody, PATH))
async def completions(request: Request) -> Response:
    context = context_of(request)
    with ExitStack() as resources:
        work, generation = await start(request, context, _prepare, resources)
        if work.body.stream:
            events = guarded(_chunks(work, generation))
            return sse.EventStream(events, resources.pop_all(), context.config.stream_stall_seconds)
        outputs = await unless_gone(request.receive, generation.outputs())
        return errors.json_response(_answer(work, outputs))


async def _prepare(context: Context, raw: bytes) -> CompletionWork:
    """Raises ApiError."""
    body = await context.text_workers.call(_read, raw)
    model = context.names.resolve(body.model)
    grammar = await context.grammars.wanted(body, model)
    prompts, requests = await context.text_workers.call(completion_requests, body, model, grammar)
    logger.info(
        "task=completion model=%s prompts=%d prompt_tokens=%d stream=%s",
        *(model.name, len(prompts), sum(len(ids) for ids, _ in prompts), body.stream),
    )
    return CompletionWork(model, body.model, requests, body.priority, body, prompts)


def _read(raw: bytes) -> CompletionBody:
    body = parse(CompletionBody, raw)
    check_completion(body)
    return body


def _answer(work: CompletionWork, outputs: list[GenerationOutput]) -> dict[str, Any]:
    pairs = [
        (prompt, output, completion)
        for prompt, output in zip(work.prompts, outputs, strict=True)
        for completion in _best(output.completions, work.body.n)
    ]
    choices = [_choice(work, *pair, index) for index, pair in enumerate(pairs)]
    return {**header("cmpl", "text_completion", work), "choices": choices, "usage": usage_of(work, outputs)}


def _best(completions: tuple[Completion, ...], n: int) -> Sequence[Completion | None]:
    """The n of best_of whose tokens are likeliest on average; None where the prompt alone was asked for."""
    if len(completions) <= n:
        return completions or (None,)
    return sorted(completions, key=lambda c: -c.cumulative_logprob / max(len(c.token_ids), 1))[:n]


def _choice(
    work: CompletionWork,
    prompt: PromptText,
    output: GenerationOutput,
    completion: Completion | None,
    index: int,
) -> dict[str, Any]:
    ids, echoed = prompt
    logprobs = work.logprobs()
    tokens: list[TokenLogprob | int] = list(completion.logprobs or ()) if completion else []
    if logprobs is not None and work.body.echo:
        tokens = [*prompt_logprobs(ids, output.probe, work.body.logprobs or 0), *tokens]
    choice = {
        "text": echoed + (completion.text if completion else ""),
        "index": index,
        "logprobs": None if logprobs is None else logprobs.push(tokens),
        "finish_reason": completion.finish_reason if completion else "length",
    }
    if work.body.prompt_logprobs is not None:
        tokenizer = text_processor(work.model).tokenizer
        choice["prompt_logprobs"] = ranked_prompt(tokenizer, ids, output.probe, work.body.prompt_logprobs)
    return choice


async def _chunks(work: CompletionWork, generation: Generation) -> AsyncIterator[dict[str, Any]]:
    """The stream's events."""
    body, head = work.body, header("cmpl", "text_completion", work)
    streams = {
        (key, n): _Stream(work, key * body.n + n) for key in range(len(work.prompts)) for n in range(body.n)
    }
    sampled = 0

    def chunk(choices: list[dict[str, Any]], counts: dict[str, Any] | None = None) -> dict[str, Any]:
        event = {**head, "choices": choices}
        if body.includes_usage:
            event["usage"] = counts
        return event

    if body.echo:
        for (key, _), stream in streams.items():
            yield chunk([stream.echo(work.prompts[key][1])])
    async for delta in generation.deltas():
        assert isinstance(delta.key, int)
        sampled += len(delta.token_ids)
        choice = streams[delta.key, delta.sequence].push(delta)
        if choice is not None:
            counts = usage(work.num_prompt_tokens, sampled) if body.counts_all_along else None
            yield chunk([choice], counts)
    outputs = await generation.outputs()
    if not body.max_tokens:
        for stream in streams.values():
            yield chunk([stream.end()])
    if body.includes_usage:
        yield chunk([], usage_of(work, outputs))


class _Stream:
    """One choice of a stream."""

    def __init__(self, work: CompletionWork, index: int) -> None:
        self._index = index
        self._logprobs = work.logprobs()
        self._held: list[Any] = []

    def echo(self, text: str) -> dict[str, Any]:
        return self._choice(text, None)

    def end(self) -> dict[str, Any]:
        """For who asked for the prompt alone."""
        return self._choice("", "length")

    def push(self, delta: TokenDelta) -> dict[str, Any] | None:
        """The choice to send; None while there is nothing to show."""
        self._held += delta.logprobs or ()
        if not delta.text and delta.finish_reason is None:
            return None
        return self._choice(delta.text, delta.finish_reason)

    def _choice(self, text: str, finish_reason: str | None) -> dict[str, Any]:
        held, self._held = self._held, []
        logprobs = None if self._logprobs is None else self._logprobs.push(held)
        return {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
