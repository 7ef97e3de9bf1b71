"""Runs programs over the engine: a program says what to compute next, given what came back."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor
from typing import Any

from ..models.base import GenerationOutput, GenerationRequest, Program

logger = logging.getLogger(__name__)


class EngineDead(RuntimeError):
    """The engine's loop has failed; nothing can run any more."""


class ProgramFailed(RuntimeError):
    """This program failed; others are not touched."""


class RequestRefused(ProgramFailed):
    """The program asked for what can never run, or for output that no token can continue; its own fault."""


class ProgramAborted(RuntimeError):
    """The program was aborted before it ended."""


class ProgramRun:
    """A program under way. Every method may be called from any thread.

    The program's own methods run in worker threads, one call at a time, so that the engine's thread never
    waits for them. `submit` hands requests to the engine, `cancel` takes all of this run out of it.
    """

    def __init__(
        self,
        model: str,
        program: Program,
        priority: int,
        executor: Executor,
        submit: Callable[[ProgramRun, list[GenerationRequest]], None],
        cancel: Callable[[ProgramRun], None],
    ) -> None:
        self.model = model
        self.priority = priority
        self.created = time.monotonic()
        self._program = program
        self._executor = executor
        self._submit = submit
        self._cancel = cancel
        self._changed = threading.Condition()
        self._listeners: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self._inbox: deque[GenerationOutput | None] = deque([None])  # None stands for the start
        self._draining = False
        self._outstanding = 0
        self._events: list[Any] = []
        self._result: Any = None
        self._error: BaseException | None = None
        self._done = False

    # -- for the engine -------------------------------------------------------------------------------

    def begin(self) -> None:
        self._wake()

    def deliver(self, output: GenerationOutput) -> None:
        """Takes a finished request's output; the program sees it in a worker thread."""
        with self._changed:
            self._inbox.append(output)
        self._wake()

    def publish(self, event: Any) -> None:
        """Hands an event to whoever listens, past the program: tokens of a streaming request."""
        with self._changed:
            if not self._done:
                self._events.append(event)
                self._notify()

    def fail(self, error: BaseException) -> None:
        """Ends the run with an error; has no effect on a run that is over."""
        with self._changed:
            if self._done:
                return
            self._done, self._error = True, error
            self._notify()
        self._cancel(self)

    # -- for the caller -------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        return self._done

    def abort(self) -> None:
        """Stops the work and frees its pages within a step; has no effect on a run that is over."""
        self.fail(ProgramAborted("the request was aborted"))

    def wait(self, timeout: float | None = None) -> Any:
        """Blocks until the result is there. Raises TimeoutError, or what the run failed with."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._done, timeout):
                raise TimeoutError
        return self._value()

    def iter_events(self) -> Iterator[Any]:
        """Blocking iteration over the program's events, until it is over (also by failure)."""
        position = 0
        while True:
            with self._changed:
                while not self._done and len(self._events) == position:
                    self._changed.wait()
                fresh, over = self._events[position:], self._done
            yield from fresh
            position += len(fresh)
            if over:
                return

    async def result(self) -> Any:
        """Waits for the result. Raises what the run failed with."""
        async for _ in self.events():
            pass
        return self._value()

    async def events(self) -> AsyncIterator[Any]:
        """The program's events, until it is over (also by failure)."""
        wakeup = asyncio.Event()
        listener = (asyncio.get_running_loop(), wakeup)
        with self._changed:
            self._listeners.append(listener)
        position = 0
        try:
            while True:
                with self._changed:
                    fresh, over = self._events[position:], self._done
                    wakeup.clear()
                for event in fresh:
                    yield event
                position += len(fresh)
                if over:
                    return
                if not fresh:
                    await wakeup.wait()
        finally:
            with self._changed:
                self._listeners.remove(listener)

    # -- inside ---------------------------------------------------------------------------------------

    def _value(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._result

    def _notify(self) -> None:
        self._changed.notify_all()
        for loop, wakeup in self._listeners:
            if not loop.is_closed():
                loop.call_soon_threadsafe(wakeup.set)

    def _wake(self) -> None:
        with self._changed:
            if self._draining or self._done:
                return
            self._draining = True
        self._executor.submit(self._drain)

    def _drain(self) -> None:
        """Feeds waiting outputs to the program, in a worker thread; never two of these at a time."""
        while True:
            with self._changed:
                if self._done or not self._inbox:
                    self._draining = False
                    return
                output = self._inbox.popleft()
            try:
                requests = self._program.start() if output is None else self._program.accept(output)
                events = self._program.take_events()
                self._outstanding += len(requests) - (output is not None)
                over = self._outstanding == 0
                result = self._program.result() if over else None
            except Exception as error:
                logger.exception("a program failed")
                failure = ProgramFailed("the request failed inside the server")
                failure.__cause__ = error
                self.fail(failure)
                continue
            with self._changed:
                if self._done:
                    continue  # aborted meanwhile
                self._events += events
                if over:
                    self._done, self._result = True, result
                if over or events:
                    self._notify()
            if over:
                self._cancel(self)
            elif requests:
                self._submit(self, requests)
