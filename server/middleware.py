"""ASGI layers around every request: its id and log line, the API key, the answer to what nobody expected."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from . import errors
from .logs import request_id
from .system import OPEN_PATHS

logger = logging.getLogger(__name__)
_USABLE_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class RequestLog:
    """Names every request, in the x-request-id header and in the log, and writes one line when it is over."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = Headers(scope=scope).get("x-request-id", "")
        name = sent if _USABLE_ID.fullmatch(sent) else f"req_{uuid.uuid4().hex}"
        status = 0
        began = time.perf_counter()

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = name
            await send(message)

        token = request_id.set(name)
        try:
            await self._app(scope, receive, send_named)
        finally:
            # The raw path is percent-encoded: a decoded one could break the line.
            path = scope.get("raw_path", b"").decode("latin-1")[:200]
            level = logging.DEBUG if path == "/health" and status == 200 else logging.INFO
            elapsed = (time.perf_counter() - began) * 1000
            logger.log(level, "method=%s path=%s status=%d ms=%.1f", scope["method"], path, status, elapsed)
            request_id.reset(token)


class Guard:
    """Asks for the API key where one is set, and turns an unexpected exception into a fixed 500."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        self._key = api_key.encode() if api_key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._key and scope["path"] not in OPEN_PATHS and not self._admits(scope):
            await errors.invalid_api_key().response()(scope, receive, send)
            return
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except asyncio.CancelledError:
            # Only a server that stops cancels requests, when their time is over; the connection still stands.
            logger.warning("cut off: the server is stopping")
            if not started:
                await errors.unavailable().response()(scope, receive, send)
        except Exception:
            logger.exception("unexpected error")
            if started:
                raise
            await errors.internal().response()(scope, receive, send)

    def _admits(self, scope: Scope) -> bool:
        assert self._key is not None
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        # compare_digest takes the same time wherever the keys differ.
        return scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode("latin-1"), self._key)
