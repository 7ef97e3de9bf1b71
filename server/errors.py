"""Every error of the HTTP API, as the OpenAI object {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

SUPPORTED_FORMATS = ("flac", "m4a", "mp3", "mp4", "mpeg", "mpga", "oga", "ogg", "wav", "webm")
CLIENT_CLOSED_REQUEST = 499  # nginx's status for the log; nobody is left to read it
RETRY_AFTER_SECONDS = 2

_NULLABLE = {"anyOf": [{"type": "string"}, {"type": "null"}]}
_ERROR = {
    "type": "object",
    "required": ["message", "type", "param", "code"],
    "properties": {
        "message": {"type": "string"},
        "type": {"type": "string"},
        "param": _NULLABLE,
        "code": _NULLABLE,
    },
}
_ANSWER = {
    "description": "The error.",
    "content": {
        "application/json": {
            "schema": {"type": "object", "required": ["error"], "properties": {"error": _ERROR}}
        }
    },
}
DOCUMENTED: dict[int | str, dict[str, Any]] = {"4XX": _ANSWER, "5XX": _ANSWER}


class ApiError(Exception):
    """A request that cannot be served. `message` goes to the client as it is: no path, no address."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.extra = dict(extra or {})

    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error, **self.extra}

    def response(self) -> Response:
        return json_response(self.body(), self.status, self.headers)


class ClientGone(Exception):
    """The client closed the connection; whatever was going on for it must stop."""


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status, dict(headers or {}), media_type="application/json")


def shown(value: str, limit: int = 80) -> str:
    """A client's own text, quoted and shortened, for use inside a message."""
    return repr(value if len(value) <= limit else value[:limit] + "…")


def invalid(param: str | None, message: str, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def invalid_language(message: str) -> ApiError:
    usage = {"usage": {"type": "duration", "seconds": 0}}
    return ApiError(400, message, param="language", code="invalid_language_format", extra=usage)


def undecodable() -> ApiError:
    formats = ",".join(f"'{name}'" for name in SUPPORTED_FORMATS)
    return invalid(None, f"Invalid file format. Supported formats: [{formats}]")


def content_too_large(limit: int, read: int) -> ApiError:
    """limit, read: bytes."""
    message = f"Maximum content size limit ({limit}) exceeded ({read} bytes read)"
    return ApiError(413, message, kind="server_error")


def model_not_found(name: str) -> ApiError:
    message = f"The model {shown(name)} does not exist or is not loaded by this server."
    return ApiError(404, message, param="model", code="model_not_found")


def invalid_api_key() -> ApiError:
    message = "Incorrect API key provided: send it as 'Authorization: Bearer KEY'."
    headers = {"www-authenticate": "Bearer"}
    return ApiError(401, message, code="invalid_api_key", headers=headers)


def overloaded(what: str) -> ApiError:
    headers = {"retry-after": str(RETRY_AFTER_SECONDS)}
    message = f"The server is busy: {what}. Try again shortly."
    return ApiError(429, message, kind="rate_limit_error", code="rate_limit_exceeded", headers=headers)


def unavailable() -> ApiError:
    message = "The server cannot run models at the moment."
    return ApiError(503, message, kind="server_error", code="engine_unavailable")


def internal() -> ApiError:
    message = "The server had an error while processing your request."
    return ApiError(500, message, kind="server_error")


def _from_http(request: Request, error: HTTPException) -> ApiError:
    where = f"{request.method} {request.url.path[:200]}"
    if error.status_code == 404:
        return ApiError(404, f"Invalid URL ({where})", code="unknown_url")
    if error.status_code == 405:
        message = f"Method not allowed ({where})"
        return ApiError(405, message, code="method_not_supported", headers=error.headers)
    return ApiError(error.status_code, str(error.detail), headers=error.headers)


def install(app: FastAPI) -> None:
    """Gives the app handlers for every expected exception; `middleware.Guard` answers the unexpected ones."""

    async def api_error(_request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response()

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _from_http(request, error).response()

    async def validation_error(_request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        return invalid(str(first["loc"][-1]), str(first["msg"])).response()

    async def client_gone(_request: Request, _error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, validation_error)
    app.add_exception_handler(ClientGone, client_gone)
