"""The engine: one thread that schedules, executes and updates, and the only seam to it."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from ..models import registry
from ..models.base import GenerationOutput, GenerationRequest, Model, ModelError, ModelProcessor, Program
from .block_pool import BlockPool, CacheConfigError
from .config import EngineConfig
from .encoder_cache import EncoderCache
from .kv_cache_manager import CacheGroups
from .metrics import EngineMetrics
from .model_runner import ModelRunner
from .output import OutputProcessor
from .program import EngineDead, ProgramAborted, ProgramFailed, ProgramRun, RequestRefused
from .request import Request
from .scheduler import Scheduler, SchedulerOutput

__all__ = [
    "Engine",
    "EngineDead",
    "LoadedModel",
    "ProgramAborted",
    "ProgramFailed",
    "ProgramRun",
    "RequestRefused",
    "UnknownModel",
]

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PROGRAM_THREADS = 4
T = TypeVar("T")


class UnknownModel(LookupError):
    """No model of this name is loaded."""


@dataclass(frozen=True)
class LoadedModel:
    """A model that is served. created: unix seconds."""

    name: str
    created: int
    processor: ModelProcessor
    max_model_len: int
    vocab_size: int  # of the logits; a tokenizer may have fewer


class Engine:
    """Serves every loaded model from one arena.

    `load` models, `start` the loop, `run` programs, `shutdown`. `run` and what it returns may be used from
    any thread; all state behind it belongs to the loop's thread.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
        self.pool = BlockPool(
            config.kv_cache_mb << 20, config.slab_mb << 20, idle_cross_bytes=config.encoder_cache_mb << 20
        )
        self.encoder_cache = EncoderCache(config.encoder_cache_mb << 20)
        self.scheduler = Scheduler(config, self.pool, self.encoder_cache)
        self.metrics = EngineMetrics()
        self.runners: dict[str, ModelRunner] = {}
        self.num_steps = 0
        self._models: dict[str, LoadedModel] = {}
        self._output = OutputProcessor(self.scheduler, self._deliver, self._refuse)
        self._executor = ThreadPoolExecutor(PROGRAM_THREADS, thread_name_prefix="program")
        self._commands: deque[Callable[[], None]] = deque()
        self._wakeup = threading.Condition()
        self._runs: set[ProgramRun] = set()
        self._ids = itertools.count()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._error: BaseException | None = None

    # -- models ---------------------------------------------------------------------------------------

    def load(self, name: str, path: Path) -> LoadedModel:
        """Loads a model's files under a name, before `start` or while others are served. Raises ModelError."""
        if name in self._models:
            raise ModelError(f"the model {name} is loaded already")
        model, processor = registry.load(path, name, DTYPES.get(self.config.dtype, torch.float32))
        return self._call(lambda: self._register(name, model, processor))

    def unload(self, name: str) -> None:
        """Takes a model out; what runs on it fails, its memory goes to the others. Raises UnknownModel."""
        self.model(name)
        self._call(lambda: self._unregister(name))

    def _register(self, name: str, model: Model, processor: ModelProcessor) -> LoadedModel:
        if name in self._models:
            raise ModelError(f"the model {name} is loaded already")
        try:
            groups = CacheGroups.register(self.pool, name, model.kv_cache_spec)
        except CacheConfigError as error:
            raise ModelError(str(error)) from error
        self.scheduler.groups[name] = groups
        self._output.tokenizers[name] = processor.tokenizer
        self.runners[name] = ModelRunner(name, model, groups, self.encoder_cache, self.metrics)
        spec = model.kv_cache_spec
        loaded = LoadedModel(name, int(time.time()), processor, spec.max_model_len, model.vocab_size)
        self._models[name] = loaded
        return loaded

    def _unregister(self, name: str) -> None:
        if self._models.pop(name, None) is None:
            raise UnknownModel(name)
        for run in [run for run in self._runs if run.model == name]:
            run.fail(ProgramFailed("the model was unloaded"))
            self._take_out(run)
        for group in self.scheduler.groups.pop(name).all():
            self.pool.forget(group)
            self.pool.unregister(group)
        self.encoder_cache.drop_model(name)
        del self.runners[name], self._output.tokenizers[name]

    def models(self) -> list[LoadedModel]:
        return list(self._models.values())

    def model(self, name: str) -> LoadedModel:
        """Raises UnknownModel."""
        try:
            return self._models[name]
        except KeyError:
            raise UnknownModel(name) from None

    # -- life -----------------------------------------------------------------------------------------

    @property
    def healthy(self) -> bool:
        return self._error is None and self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()

    def shutdown(self, drain: bool = True, timeout: float = 30) -> None:
        """Ends the loop; with drain, running programs may finish within `timeout` seconds first."""
        deadline = time.monotonic() + (timeout if drain else 0)
        while self._runs and self.healthy and time.monotonic() < deadline:
            time.sleep(0.02)
        for run in list(self._runs):
            run.abort()
        with self._wakeup:
            self._stopping = True
            self._wakeup.notify()
        if self._thread is not None:
            self._thread.join(timeout=max(timeout, 5))
        self._executor.shutdown(wait=True, cancel_futures=True)

    # -- work -----------------------------------------------------------------------------------------

    def run(self, model: str, program: Program, priority: int = 0) -> ProgramRun:
        """Starts a program on a model; lower priority values go first. Raises UnknownModel, EngineDead."""
        self.model(model)
        if not self.healthy or self._stopping:
            raise EngineDead("the engine is not running")
        run = ProgramRun(model, program, priority, self._executor, self._submit, self._cancel)
        self._runs.add(run)
        run.begin()
        return run

    def stats(self) -> dict[str, float]:
        """Counters and gauges of this moment; read without a lock, each value by itself is right."""
        scheduler = self.scheduler
        return {
            "steps": self.num_steps,
            "programs": len(self._runs),
            "requests_running": len(scheduler.running),
            "requests_waiting": len(scheduler.waiting),
            "preemptions": scheduler.num_preemptions,
            "prefix_queries": scheduler.kv.prefix_queries,
            "prefix_hits": scheduler.kv.prefix_hits,
            "encoder_queries": self.encoder_cache.queries,
            "encoder_hits": self.encoder_cache.hits,
            "encoder_runs": sum(r.num_encoded for r in self.runners.values()),
            "kv_evictions": self.pool.evictions,
            "kv_usage": self.pool.usage(),
            "encoder_cache_usage": self.encoder_cache.num_bytes / self.encoder_cache.budget_bytes,
            "generated_tokens": self._output.num_generated,
            **self.metrics.snapshot(),
        }

    def _post(self, command: Callable[[], None]) -> None:
        with self._wakeup:
            self._commands.append(command)
            self._wakeup.notify()

    def _call(self, function: Callable[[], T]) -> T:
        """Runs a function between two steps, in the loop's thread while there is one; returns what it gives."""
        if not self.healthy:
            return function()
        future: Future[T] = Future()

        def command() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self._post(command)
        return future.result()

    def _submit(self, run: ProgramRun, requests: list[GenerationRequest]) -> None:
        self._post(lambda: self._add(run, requests))

    def _cancel(self, run: ProgramRun) -> None:
        self._runs.discard(run)
        self._post(lambda: self._take_out(run))

    def _deliver(self, request: Request, output: GenerationOutput) -> None:
        request.owner.deliver(output)

    def _refuse(self, request: Request, reason: str) -> None:
        request.owner.fail(RequestRefused(reason))

    # -- the loop's thread ----------------------------------------------------------------------------

    def _loop(self) -> None:
        try:
            while True:
                with self._wakeup:
                    self._wakeup.wait_for(
                        lambda: self._commands or self._stopping or self.scheduler.has_requests
                    )
                    if self._stopping:
                        return
                    commands, self._commands = self._commands, deque()
                for command in commands:
                    command()
                if self.scheduler.has_requests:
                    self.step()
        except BaseException as error:
            logger.exception("the engine loop failed")
            self._error = error
            for run in list(self._runs):
                run.fail(EngineDead("the engine has failed"))

    def step(self) -> None:
        """schedule → execute → update."""
        with self.metrics.stage("schedule"):
            outputs = self.scheduler.schedule()
        while self.scheduler.unservable:
            request = self.scheduler.unservable.pop()
            self.scheduler.finish(request)
            request.owner.fail(RequestRefused("the request needs more cache than --kv-cache-mb gives"))
        for output in outputs:
            try:
                result = self.runners[output.model].execute(output)
            except Exception:
                logger.exception("a step of model %s failed", output.model)
                self._fail_step(output)
                continue
            for request, error in result.failed.items():
                self._output.withdraw(request)
                failure = ProgramFailed("the request's media could not be encoded")
                failure.__cause__ = error
                request.owner.fail(failure)
            if result.batch is not None:
                self.metrics.prompt_tokens += len(result.batch.input_ids) - len(result.batch.sampled)
                with self.metrics.stage("sample"):
                    self._output.update(result.batch, result.logits)
        self.num_steps += 1

    def _fail_step(self, output: SchedulerOutput) -> None:
        for request in output.encoder_requests:
            self._output.withdraw(request)
        for request in {s.sequence.request for s in output.sequences}:
            self.scheduler.finish(request)
            request.owner.fail(ProgramFailed("the request failed inside the server"))

    def _add(self, run: ProgramRun, works: list[GenerationRequest]) -> None:
        if run.done:
            return
        if run.model not in self.runners:
            run.fail(ProgramFailed("the model was unloaded"))
            return
        for work in works:
            request = Request(next(self._ids), run.model, work, run, next(self._ids), run.priority)
            refusal = self.scheduler.refusal(request)
            if refusal is not None:
                run.fail(RequestRefused(refusal))
                return
            self.scheduler.add(request)

    def _take_out(self, run: ProgramRun) -> None:
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            if request.owner is run:
                self.scheduler.finish(request)
