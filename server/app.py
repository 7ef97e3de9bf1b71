"""The HTTP application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from ..engine.engine import Engine
from . import (
    chat,
    completions,
    embeddings,
    errors,
    management,
    metrics,
    responses,
    system,
    tokenize,
    transcriptions,
)
from .config import ServerConfig
from .context import Context
from .middleware import Guard, RequestLog


def create_app(engine: Engine, config: ServerConfig) -> FastAPI:
    """An app that serves the models of a started engine, which stays the caller's to shut down.

    Raises ConfigError for an alias of a model that is not loaded.
    """
    context = Context.create(engine, config)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        context.responses.close()
        context.workers.shutdown()
        context.text_workers.shutdown()
        context.model_workers.shutdown()
        context.grammars.close()

    app = FastAPI(
        title="Sensorium",
        version=system.VERSION,
        lifespan=lifespan,
        redirect_slashes=False,
        responses=errors.DOCUMENTED,
    )
    app.state.context = context
    errors.install(app)
    for resource in (
        transcriptions,
        chat,
        completions,
        responses,
        embeddings,
        tokenize,
        management,
        system,
        metrics,
    ):
        app.include_router(resource.router)
    app.add_middleware(Guard, api_key=config.api_key)
    if config.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origin),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_middleware(RequestLog)  # added last, so outermost: every answer has an id
    return app
