"""Bounds on what is in progress at once: requests, uploaded bytes, decoded audio, worker threads."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from . import errors

T = TypeVar("T")


class RequestQueue:
    """Counts the requests of one kind that run or wait. Used on the event loop only."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.size = 0

    def check(self) -> None:
        """Raises ApiError 429 when no more are taken."""
        if self.size >= self.limit:
            raise errors.overloaded("too many requests are waiting")

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Counts one more until the context ends. Raises ApiError 429 when no more are taken."""
        self.check()
        self.size += 1
        try:
            yield
        finally:
            self.size -= 1


class ByteBudget:
    """A number of bytes shared by many holders. Used on the event loop only."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def holding(self) -> Holding:
        return Holding(self)

    def _fits(self, amount: int) -> bool:
        # Something larger than the whole budget still runs, alone.
        return self.used == 0 or self.used + amount <= self.total

    def _give_back(self, amount: int) -> None:
        self.used -= amount
        while self._waiting:
            wanted, future = self._waiting[0]
            if future.cancelled():
                self._waiting.popleft()
                continue
            if not self._fits(wanted):
                break
            self._waiting.popleft()
            self.used += wanted
            future.set_result(None)


class Holding:
    """One holder's share of a ByteBudget; a context manager that gives everything back."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self.amount = 0

    def try_grow_to(self, amount: int) -> bool:
        """Takes what is missing up to `amount` bytes; False, and nothing taken, when it does not fit.

        A sole holder always fits: one request's size is bounded elsewhere.
        """
        more = amount - self.amount
        if more > 0:
            others = self._budget.used - self.amount
            if others and self._budget.used + more > self._budget.total:
                return False
            self._budget.used += more
            self.amount = amount
        return True

    async def take(self, amount: int) -> None:
        """Waits, first come first served, until `amount` more bytes are free, and takes them."""
        budget = self._budget
        if not budget._waiting and budget._fits(amount):
            budget.used += amount
        else:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            budget._waiting.append((amount, future))
            try:
                await future
            except asyncio.CancelledError:
                if future.done() and not future.cancelled():
                    budget._give_back(amount)
                raise
        self.amount += amount

    def release(self) -> None:
        amount, self.amount = self.amount, 0
        if amount:
            self._budget._give_back(amount)

    def __enter__(self) -> Holding:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class WorkerPool:
    """Threads for what takes long on a processor, media and prompts, and must stay off the event loop."""

    def __init__(self, workers: int, name: str = "media") -> None:
        self.workers = workers
        self._executor = ThreadPoolExecutor(workers, thread_name_prefix=name)

    async def call(self, function: Callable[..., T], *args: object) -> T:
        """Runs function(*args) in a worker. When cancelled, work not begun is dropped and work that has
        begun is waited for, so that the caller's accounting covers the memory it uses."""
        future = self._executor.submit(function, *args)
        waiter = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(waiter)
        except asyncio.CancelledError:
            if not future.cancel():
                await asyncio.wait({waiter})
                waiter.exception()  # marks it as seen
            raise

    def shutdown(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
