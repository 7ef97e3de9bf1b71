"""Responses that can be asked for again, kept in memory within bounds."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from . import errors
from .errors import ApiError


@dataclass(frozen=True)
class Stored:
    """items: the conversation up to and with the response's own output, instructions left out. size: bytes,
    as JSON; what two responses of one conversation share is counted for both."""

    response: dict[str, Any]
    items: tuple[dict[str, Any], ...]
    size: int


class ResponseStore:
    """The responses used last. Used on the event loop only."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, Stored] = OrderedDict()
        self.num_bytes = 0
        self.tasks: dict[str, asyncio.Task[None]] = {}  # of the responses that are made in the background

    def __contains__(self, name: str) -> bool:
        return name in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, response: dict[str, Any], items: Sequence[dict[str, Any]]) -> None:
        """Keeps a response, at the expense of those not used for longest; not one larger than all the room."""
        self._drop(response["id"])
        size = len(orjson.dumps(response)) + len(orjson.dumps(list(items)))
        if size > self._max_bytes:
            return
        self._kept[response["id"]] = Stored(response, tuple(items), size)
        self.num_bytes += size
        while self.num_bytes > self._max_bytes or len(self._kept) > self._max_count:
            self._drop(next(iter(self._kept)))

    def get(self, name: str) -> Stored:
        """Raises ApiError 404."""
        found = self._kept.get(name)
        if found is None:
            raise ApiError(
                404, f"Response with id {errors.shown(name)} not found.", code="response_not_found"
            )
        self._kept.move_to_end(name)
        return found

    def before(self, name: str | None) -> tuple[dict[str, Any], ...]:
        """The conversation that a response ended, for the next one. Raises ApiError 400."""
        if name is None:
            return ()
        found = self._kept.get(name)
        if found is None:
            message = f"Previous response with id {errors.shown(name)} not found."
            raise errors.invalid("previous_response_id", message, "previous_response_not_found")
        if found.response["status"] not in ("completed", "incomplete"):
            message = f"Previous response with id {errors.shown(name)} has not been completed."
            raise errors.invalid("previous_response_id", message, "previous_response_not_completed")
        self._kept.move_to_end(name)
        return found.items

    def delete(self, name: str) -> None:
        """Also stops what is still being made. Raises ApiError 404."""
        self.get(name)
        self._drop(name)
        if name in self.tasks:
            self.tasks[name].cancel()

    def _drop(self, name: str) -> None:
        dropped = self._kept.pop(name, None)
        if dropped is not None:
            self.num_bytes -= dropped.size

    def close(self) -> None:
        for task in self.tasks.values():
            task.cancel()
