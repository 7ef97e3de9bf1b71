"""What every request handler needs, made once for an app."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import cast

from fastapi import Request

from ..engine.engine import Engine
from . import errors
from .config import MIB, ServerConfig
from .grammars import Grammars
from .limits import ByteBudget, RequestQueue, WorkerPool
from .metrics import Metrics
from .names import ModelNames
from .responses_store import ResponseStore

MOST_MEDIA_WORKERS = 4
TEXT_WORKERS = 2  # apart from the others: a short prompt must not wait for an hour of audio to be decoded


@dataclass(frozen=True)
class Context:
    """uploads, decoded: bytes of requests under way. decoding: held until the decoded audio has room."""

    engine: Engine
    config: ServerConfig
    names: ModelNames
    queue: RequestQueue
    uploads: ByteBudget
    decoded: ByteBudget
    decoding: asyncio.Semaphore
    workers: WorkerPool
    text_queue: RequestQueue
    text_workers: WorkerPool
    grammars: Grammars
    metrics: Metrics
    responses: ResponseStore
    model_workers: WorkerPool  # one thread: models are loaded and unloaded one at a time

    @classmethod
    def create(cls, engine: Engine, config: ServerConfig) -> Context:
        """Raises ConfigError for an alias of a model that is not loaded."""
        workers = config.media_workers or min(MOST_MEDIA_WORKERS, len(os.sched_getaffinity(0)))
        return cls(
            engine=engine,
            config=config,
            names=ModelNames(engine, config.aliases),
            queue=RequestQueue(config.max_queue),
            uploads=ByteBudget(config.max_inflight_mb * MIB),
            decoded=ByteBudget(config.max_decoded_mb * MIB),
            decoding=asyncio.Semaphore(workers),
            workers=WorkerPool(workers),
            text_queue=RequestQueue(config.max_text_queue),
            text_workers=WorkerPool(TEXT_WORKERS, "text"),
            grammars=Grammars(),
            metrics=Metrics(engine),
            responses=ResponseStore(config.max_stored_responses, config.max_stored_mb * MIB),
            model_workers=WorkerPool(1, "models"),
        )

    def require_engine(self) -> None:
        """Raises ApiError 503 when the engine cannot run anything."""
        if not self.engine.healthy:
            raise errors.unavailable()


def context_of(request: Request) -> Context:
    return cast(Context, request.app.state.context)
