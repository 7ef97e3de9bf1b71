"""GET /metrics: the engine's gauges and counters, and the times that requests took, for Prometheus."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

from ..engine.engine import Engine

PREFIX = "sensorium:"
FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5, 10, 20, 40, 80, 160)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5)
REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 3600)

# key of Engine.stats() → name and description; the counters' names end in _total when they are shown.
GAUGES = {
    "requests_running": ("num_requests_running", "Requests in the batch."),
    "requests_waiting": ("num_requests_waiting", "Requests that wait for a place in the batch."),
    "programs": ("num_programs", "Programs (a request's work as a whole) under way."),
    "kv_usage": ("kv_cache_usage_perc", "Part of the cache memory in use; 1 is all of it."),
    "encoder_cache_usage": ("encoder_cache_usage_perc", "Part of the encoder cache in use; 1 is all of it."),
}
COUNTERS = {
    "steps": ("engine_steps", "Steps of the engine."),
    "preemptions": ("num_preemptions", "Requests that gave up their pages to others."),
    "prefix_queries": ("prefix_cache_queries", "Prompt tokens that were looked up in the prefix cache."),
    "prefix_hits": ("prefix_cache_hits", "Prompt tokens that were found in the prefix cache."),
    "encoder_queries": ("encoder_cache_queries", "Media items that were looked up in the encoder cache."),
    "encoder_hits": ("encoder_cache_hits", "Media items that were found in the encoder cache."),
    "encoder_runs": ("encoder_runs", "Media items that were encoded."),
    "kv_evictions": ("kv_cache_evictions", "Cached pages that were given to others."),
}
STAGE = re.compile(r"stage_(\w+)_seconds")


class EngineCollector(Collector):
    """Shows what the engine says of itself at the moment of the scrape."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        stats = self._engine.stats()
        for key, (name, about) in GAUGES.items():
            if key in stats:
                yield GaugeMetricFamily(PREFIX + name, about, value=stats[key])
        for key, (name, about) in COUNTERS.items():
            if key in stats:
                yield CounterMetricFamily(PREFIX + name, about, value=stats[key])
        seconds = CounterMetricFamily(
            PREFIX + "engine_stage_seconds", "Time in each stage of the engine's steps.", labels=["stage"]
        )
        for key, value in stats.items():
            if stage := STAGE.fullmatch(key):
                seconds.add_metric([stage[1]], value)
        yield seconds
        yield GaugeMetricFamily(
            PREFIX + "engine_healthy", "1 while the engine runs.", value=float(self._engine.healthy)
        )


class Metrics:
    """What is measured in the server, of every model."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(engine))
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", FIRST_TOKEN_BUCKETS
        )
        self.between_tokens = self._histogram(
            "inter_token_latency_seconds", "Between a sequence's tokens.", TOKEN_BUCKETS
        )
        self.whole_request = self._histogram(
            "e2e_request_latency_seconds", "From a request's arrival to its end.", REQUEST_BUCKETS
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that ended well.")
        self.cached_tokens = self._counter("prompt_tokens_cached", "Prompt tokens that were not recomputed.")
        self.generated_tokens = self._counter("generation_tokens", "Tokens that were sampled.")
        self.finished = self._counter("request_success", "Sequences that ended well.", "finished_reason")

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, about, ["model_name"], buckets=buckets, registry=self.registry)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, about, ["model_name", *labels], registry=self.registry)


class Stopwatch:
    """Times one request from its arrival on. Seconds."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._began = time.perf_counter()
        self._last: dict[object, float] = {}

    def token(self, model: str, sequence: object) -> None:
        """A sequence has got a token."""
        now = time.perf_counter()
        last = self._last.get(sequence)
        if last is not None:
            self._metrics.between_tokens.labels(model).observe(now - last)
        elif not self._last:
            self._metrics.first_token.labels(model).observe(now - self._began)
        self._last[sequence] = now

    def over(self, model: str) -> None:
        self._metrics.whole_request.labels(model).observe(time.perf_counter() - self._began)


router = APIRouter(tags=["system"])


@router.get("/metrics", responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}})
async def metrics(request: Request) -> Response:
    registry = request.app.state.context.metrics.registry
    return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST})
