"""Text generation for the endpoints: a request's way from its body to the engine, and what comes back."""

from __future__ import annotations

import hashlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fastapi import Request

from ..engine.engine import (
    EngineDead,
    LoadedModel,
    ProgramAborted,
    ProgramFailed,
    ProgramRun,
    RequestRefused,
    UnknownModel,
)
from ..engine.structured import GrammarError
from ..models.base import GenerationOutput, GenerationRequest, TokenDelta
from ..models.text import GenerationProgram
from . import errors, sse
from .context import Context
from .disconnect import unless_gone
from .errors import ApiError
from .json_body import read_body
from .metrics import Stopwatch
from .system import VERSION

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Work:
    """A request whose every parameter has been checked. name: what the client calls the model.

    requests: one a prompt; their keys are their positions.
    """

    model: LoadedModel
    name: str
    requests: tuple[GenerationRequest, ...]
    priority: int

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.inputs.prompt_token_ids) for request in self.requests)


W = TypeVar("W", bound=Work)
T = TypeVar("T")
Prepare = Callable[[Context, bytes], Coroutine[Any, Any, T]]


def in_worker(function: Callable[[Context, bytes], T]) -> Prepare[T]:
    """Runs a preparation that is all computation in a worker thread."""

    async def prepare(context: Context, body: bytes) -> T:
        return await context.text_workers.call(function, context, body)

    return prepare


class Generation:
    """A request's work in the engine, timed."""

    def __init__(self, context: Context, work: Work, run: ProgramRun, stopwatch: Stopwatch) -> None:
        self._context = context
        self._work = work
        self._run = run
        self._stopwatch = stopwatch
        self._read = False

    async def deltas(self) -> AsyncIterator[TokenDelta]:
        """What the sequences gain, step by step; ends when the work does, also by failure."""
        async for delta in self._run.events():
            prompt, first = delta.key
            if delta.token_ids:
                self._stopwatch.token(self._work.model.name, (prompt, first + delta.sequence))
            yield replace(delta, key=prompt, sequence=first + delta.sequence)
        self._read = True

    async def outputs(self) -> list[GenerationOutput]:
        """The outputs in the order of the requests, `deltas` having been read or not. Raises ApiError."""
        with engine_errors():
            if not self._read:
                async for _ in self.deltas():
                    pass  # for the times of their arrival
            outputs = joined(await self._result())
        self._count(outputs)
        return outputs

    async def _result(self) -> list[GenerationOutput]:
        try:
            found: list[GenerationOutput] = await self._run.result()
        except ProgramFailed as error:
            if self._work.model not in self._context.engine.models():
                raise UnknownModel(self._work.name) from error  # unloaded while it worked
            raise
        return found

    def _count(self, outputs: Sequence[GenerationOutput]) -> None:
        name, metrics = self._work.model.name, self._context.metrics
        self._stopwatch.over(name)
        metrics.prompt_tokens.labels(name).inc(self._work.num_prompt_tokens)
        metrics.cached_tokens.labels(name).inc(sum(output.num_cached_tokens for output in outputs))
        for output in outputs:
            for completion in output.completions:
                metrics.generated_tokens.labels(name).inc(len(completion.token_ids))
                metrics.finished.labels(name, completion.finish_reason).inc()


def split(request: GenerationRequest, most: int) -> list[GenerationRequest]:
    """Requests of at most so many sequences each, which the engine can run in one step.

    Their keys are (the request's key, their first sequence). Seeds go on from one to the next.
    """
    params = request.params
    found = []
    for first in range(0, params.num_sequences, most):
        seed = None if params.seed is None else params.seed + first
        part = replace(params, num_sequences=min(most, params.num_sequences - first), seed=seed)
        found.append(replace(request, key=(request.key, first), params=part))
    return found


def joined(outputs: Sequence[GenerationOutput]) -> list[GenerationOutput]:
    """One output for each request before it was split, in order."""
    keyed: dict[Any, GenerationOutput] = {output.key: output for output in outputs}
    found: dict[Any, GenerationOutput] = {}
    for (prompt, _), output in sorted(keyed.items()):
        before = found.get(prompt)
        if before is None:
            found[prompt] = replace(output, key=prompt)
        else:
            found[prompt] = replace(before, completions=before.completions + output.completions)
    return list(found.values())


async def start(
    request: Request, context: Context, prepare: Prepare[W], resources: ExitStack
) -> tuple[W, Generation]:
    """Receives and checks a request and gives its work to the engine; what it holds is in `resources`.

    prepare: what makes work of the body. Raises ApiError, ClientGone.
    """
    stopwatch = Stopwatch(context.metrics)
    context.require_engine()
    work = await receive(request, context, prepare, resources)
    most = context.engine.config.max_num_seqs
    program = GenerationProgram([part for request in work.requests for part in split(request, most)])
    with engine_errors():
        run = context.engine.run(work.model.name, program, work.priority)
    resources.callback(run.abort)
    return work, Generation(context, work, run, stopwatch)


async def receive(request: Request, context: Context, prepare: Prepare[T], resources: ExitStack) -> T:
    """Receives a body and makes of it what `prepare` does. Raises ApiError, ClientGone."""
    context.text_queue.check()
    with context.uploads.holding() as held:
        body = await read_body(request, context.config, held)
        resources.enter_context(context.text_queue.slot())
        return await unless_gone(request.receive, prepare(context, body))


@contextmanager
def engine_errors() -> Iterator[None]:
    """Says what went wrong in the API's terms."""
    try:
        yield
    except (EngineDead, ProgramAborted) as error:
        # Aborted by the engine, which is shutting down: a client's leaving ends the wait before this.
        raise errors.unavailable() from error
    except UnknownModel as error:
        raise errors.model_not_found(str(error)) from None  # unloaded meanwhile
    except RequestRefused as error:
        raise errors.invalid(None, f"The request cannot be run: {error}.", "invalid_value") from None
    except ProgramFailed as error:
        if isinstance(error.__cause__, GrammarError):
            raise errors.invalid("response_format", str(error.__cause__), "invalid_value") from None
        logger.exception("a generation failed")
        raise errors.internal() from error


async def guarded(events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    """Events as sent, then [DONE]; a failure becomes an error event that ends the stream early."""
    try:
        with engine_errors():
            async for event in events:
                yield sse.event(event)
    except ApiError as error:
        yield sse.event(error.body())
        return
    except Exception:
        logger.exception("a stream failed")
        yield sse.event(errors.internal().body())
        return
    yield sse.DONE


def header(prefix: str, kind: str, work: Work) -> dict[str, Any]:
    """What every answer, and every chunk of a stream, begins with."""
    identity = f"{VERSION}\0{work.model.name}\0{work.model.processor.info.architecture}"
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": work.name,
        "system_fingerprint": "fp_" + hashlib.sha256(identity.encode()).hexdigest()[:10],
    }


def usage(prompt: int, completion: int, cached: int = 0, reasoning: int = 0) -> dict[str, Any]:
    """Token counts."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": reasoning,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def usage_of(work: Work, outputs: Sequence[GenerationOutput], reasoning: int = 0) -> dict[str, Any]:
    sampled = sum(len(completion.token_ids) for output in outputs for completion in output.completions)
    cached = sum(output.num_cached_tokens for output in outputs)
    return usage(work.num_prompt_tokens, sampled, cached, reasoning)
