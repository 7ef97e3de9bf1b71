"""GET /v1/models, /v1/models/{id}, /health and /version."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ..engine.engine import LoadedModel
from . import errors
from .context import context_of

router = APIRouter(tags=["system"])
VERSION = metadata.version("sensorium")
OPEN_PATHS = frozenset({"/health", "/version"})  # served without an API key


def described(name: str, model: LoadedModel) -> dict[str, Any]:
    """A model in OpenAI's shape."""
    return {"id": name, "object": "model", "created": model.created, "owned_by": "sensorium"}


@router.get("/v1/models")
async def models(request: Request) -> Response:
    listed = context_of(request).names.listed()
    return errors.json_response({"object": "list", "data": [described(*entry) for entry in listed.items()]})


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> Response:
    return errors.json_response(described(name, context_of(request).names.resolve(name)))


@router.get("/health")
async def health(request: Request) -> Response:
    context_of(request).require_engine()
    return errors.json_response({"status": "ok"})


@router.get("/version")
async def version() -> Response:
    return errors.json_response({"version": VERSION})
