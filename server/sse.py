"""Server-sent events of an answer: `data:` lines only, closed by `data: [DONE]`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

import orjson
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from .disconnect import unless_gone
from .errors import ClientGone

logger = logging.getLogger(__name__)
DONE = b"data: [DONE]\n\n"


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


def named_event(body: dict[str, Any]) -> bytes:
    """An event whose type stands in a line of its own too, as the Responses API sends them."""
    return f"event: {body['type']}\n".encode() + event(body)


class DeltaText:
    """Cuts a growing text into deltas whose concatenation is the text stripped at both ends.

    White space that might turn out to be the last is held back until more text follows.
    """

    def __init__(self) -> None:
        self.text = ""
        self._held = ""

    def push(self, text: str) -> str:
        """The delta for `text`, "" when there is nothing to send yet."""
        grown = self._held + text if self.text else text.lstrip()
        delta = grown.rstrip()
        self._held = grown[len(delta) :]
        self.text += delta
        return delta


class EventStream(StreamingResponse):
    """A stream that ends `resources` when it is over, and at once when the client leaves or stops reading.

    stall_seconds: how long a client may leave the connection full. What waits meanwhile is what the
    connection's buffers hold and one event.
    """

    def __init__(self, events: AsyncIterator[bytes], resources: ExitStack, stall_seconds: float) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream; charset=utf-8")
        self._resources = resources
        self._stall_seconds = stall_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(self._stall_seconds):
                    await send(message)
            except TimeoutError:
                raise ClientGone from None

        # Starlette's own way of noticing a client that left depends on the server's ASGI version.
        with self._resources:
            try:
                await unless_gone(receive, self.stream_response(send_in_time))
            except ClientGone:
                logger.info("the client left its stream or stopped reading it")
