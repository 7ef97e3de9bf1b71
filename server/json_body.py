"""JSON request bodies: read under limits, parsed strictly, every fault a 400 that names its parameter."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, TypeVar

import orjson
from fastapi import Request
from pydantic import BaseModel, ConfigDict, FailFast, ValidationError

from . import errors
from .config import MIB, ServerConfig
from .errors import ApiError, ClientGone
from .limits import Holding

logger = logging.getLogger(__name__)

JSON_TYPES = ("application/json", "text/json")


class _OneFault(FailFast):
    """pydantic's FailFast, hashable, so that it may stand within unions."""

    def __hash__(self) -> int:
        return hash(_OneFault)


ONE_FAULT = _OneFault()  # of a long list the first wrong item is enough


class Body(BaseModel):
    """A part of a request body. Numbers are numbers, text is text; NaN and infinity are neither.

    A null at the top of a body means "not given". Names that are not declared are kept out.
    """

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())


B = TypeVar("B", bound=Body)


async def read_body(request: Request, config: ServerConfig, held: Holding) -> bytes:
    """The request's body; `held` grows with the bytes in memory and stays held on return.

    Raises ApiError: 400 not JSON by its content type, 408 nothing arrived for long, 413 too large,
    429 too much in flight. Raises ClientGone when the connection closes.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind not in JSON_TYPES and not kind.endswith("+json"):
        raise errors.invalid(None, "The request body must be JSON: send Content-Type: application/json.")
    limit = config.max_body_mb * MIB
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise errors.content_too_large(limit, int(announced))
    body = bytearray()
    more = True
    while more:
        try:
            async with asyncio.timeout(config.upload_stall_seconds):
                message = await request.receive()
        except TimeoutError:
            raise ApiError(408, "The request stalled: no data arrived for too long.") from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > limit:
            raise errors.content_too_large(limit, len(body))
        if not held.try_grow_to(len(body)):
            raise errors.overloaded("too many request bodies are in flight")
    return bytes(body)


def parse(kind: type[B], body: bytes) -> B:
    """Reads a body as `kind`. Raises ApiError 400."""
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise errors.invalid(None, f"The request body is not valid JSON: {error}.") from None
    if not isinstance(found, dict):
        raise errors.invalid(None, "The request body must be a JSON object.")
    given = {name: value for name, value in found.items() if value is not None}
    unknown = sorted(given.keys() - kind.model_fields.keys())
    if unknown:
        logger.info("ignored unknown parameters: %s", ", ".join(map(errors.shown, unknown[:10])))
    return validated(kind, given)


def validated(kind: type[B], given: Mapping[str, Any]) -> B:
    """Raises ApiError 400 about the first parameter that does not fit."""
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False)
    places = [_place(given, fault["loc"], fault["type"] == "missing") for fault in faults]
    # The branches of a union each say what they would have taken.
    reasons = dict.fromkeys(
        fault["msg"].removeprefix("Value error, ")
        for fault, place in zip(faults, places, strict=True)
        if place == places[0]
    )
    code = {"missing": "missing_required_parameter"}.get(faults[0]["type"], "invalid_value")
    where = places[0] or None
    raise errors.invalid(where, f"{where or 'body'}: {', or '.join(reasons)}."[:1000], code)


def _place(given: Any, location: tuple[int | str, ...], is_missing: bool) -> str:
    """Where in the body, as messages[0].content. A union's branch names are part of pydantic's location and
    none of the body: only steps that lead somewhere are kept, and the last one to what is missing."""
    path = ""
    here = given
    for index, step in enumerate(location):
        if isinstance(step, int) and isinstance(here, list) and step < len(here):
            path, here = f"{path}[{step}]", here[step]
        elif isinstance(here, dict) and (step in here or (is_missing and index == len(location) - 1)):
            path, here = f"{path}.{step}" if path else str(step), here.get(step)
    return path[:200]


def body_schema(kind: type[Body], path: str, **extra: Any) -> dict[str, Any]:
    """Keyword arguments of a POST route whose OpenAPI entry describes `kind` as its body."""
    pointer = path.replace("~", "~0").replace("/", "~1")
    root = f"#/paths/{pointer}/post/requestBody/content/application~1json/schema/$defs"
    schema = kind.model_json_schema(ref_template=root + "/{model}")
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    answers: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if "stream" in kind.model_fields:
        answers["text/event-stream"] = {"schema": {"type": "string"}}
    responses = {200: {"description": "The answer.", "content": answers}}
    return {"openapi_extra": {"requestBody": body}, "responses": responses, **extra}
