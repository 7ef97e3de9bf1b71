"""POST /v1/models/load and /v1/models/unload, where the server's owner allows them."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

from annotated_types import Len
from fastapi import APIRouter, Request
from starlette.responses import Response

from ..engine.engine import LoadedModel, UnknownModel
from ..models import store
from ..models.base import ModelError
from . import errors
from .context import Context, context_of
from .errors import ApiError
from .generation import in_worker, receive
from .json_body import Body, body_schema, parse
from .loading import served_name
from .system import described

logger = logging.getLogger(__name__)
router = APIRouter(tags=["models"])
LOAD = "/v1/models/load"
UNLOAD = "/v1/models/unload"


class ModelBody(Body):
    """model: the name of a pack, a local path or owner/repo of the hub; to unload one, what it is called."""

    model: Annotated[str, Len(1, 1024)]


@router.post(LOAD, **body_schema(ModelBody, LOAD))
async def load_model(request: Request) -> Response:
    context = context_of(request)
    model = await context.model_workers.call(_load, context, await _named(request, context))
    return errors.json_response(described(model.name, model))


@router.post(UNLOAD, **body_schema(ModelBody, UNLOAD))
async def unload_model(request: Request) -> Response:
    context = context_of(request)
    name = await context.model_workers.call(_unload, context, await _named(request, context))
    return errors.json_response({"id": name, "object": "model", "deleted": True})


async def _named(request: Request, context: Context) -> str:
    """The model that a request names. Raises ApiError 403 where models are the owner's alone to manage."""
    if not context.config.allow_model_management:
        message = (
            "This server does not let clients load models: it was started without --allow-model-management."
        )
        raise ApiError(403, message, code="model_management_disabled")
    context.require_engine()
    with ExitStack() as resources:
        return await receive(request, context, in_worker(_read), resources)


def _read(_context: Context, raw: bytes) -> str:
    return parse(ModelBody, raw).model


def _load(context: Context, wanted: str) -> LoadedModel:
    """In a worker thread; may take minutes. Raises ApiError 404 for what cannot be found or fetched, 400 for
    what cannot be served."""
    name = served_name(wanted)
    if context.names.is_alias(name):
        raise errors.invalid("model", f"{errors.shown(name)} is another model's alias here.", "invalid_value")
    try:
        path = store.resolve(wanted)
    except ModelError as error:
        message = _without_path(error, Path(wanted), name)
        raise ApiError(404, message, param="model", code="model_not_found") from None
    logger.info("loading model=%s", name)
    try:
        return context.engine.load(name, path)
    except ModelError as error:
        message = _without_path(error, path, name)
        raise errors.invalid("model", message, "invalid_model") from None


def _without_path(error: ModelError, path: Path, name: str) -> str:
    """An error in one line that names the model where it named its files."""
    text = " ".join(str(error).split())
    for spelled in sorted({str(path), str(path.expanduser().absolute())}, key=len, reverse=True):
        text = text.replace(spelled, name)
    return text[:500]


def _unload(context: Context, wanted: str) -> str:
    """In a worker thread. Raises ApiError 404."""
    name = context.names.resolve(wanted).name
    try:
        context.engine.unload(name)
    except UnknownModel:
        raise errors.model_not_found(wanted) from None
    context.grammars.forget(name)
    logger.info("unloaded model=%s", name)
    return name
