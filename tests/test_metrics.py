"""GET /metrics as Prometheus reads it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sensorium.server.metrics import Metrics, Stopwatch

from .fake_text import FakeTextEngine
from .live_server import Live, live


@pytest.fixture
def server() -> Iterator[Live]:
    with live(FakeTextEngine("12345", pace=0.02)) as running:
        yield running


def scrape(server: Live) -> dict[str, float]:
    answer = server.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    samples = [s for family in text_string_to_metric_families(answer.text) for s in family.samples]
    return {s.name + "".join(f",{v}" for _, v in sorted(s.labels.items())): s.value for s in samples}


def test_engine_gauges_and_counters(server: Live) -> None:
    found = scrape(server)
    assert found["sensorium:num_requests_running"] == 3
    assert found["sensorium:prefix_cache_hits_total"] == 7
    assert found["sensorium:engine_stage_seconds_total,decode"] == 1.5
    assert found["sensorium:engine_healthy"] == 1
    server.engine.dead = True
    assert scrape(server)["sensorium:engine_healthy"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_requests_are_measured(server: Live, stream: bool) -> None:
    body = {"model": "tiny-text", "messages": [{"role": "user", "content": "Hi"}], "stream": stream}
    assert server.http.post("/v1/chat/completions", json=body).status_code == 200
    found = scrape(server)
    assert found["sensorium:time_to_first_token_seconds_count,tiny-text"] == 1
    assert found["sensorium:time_to_first_token_seconds_sum,tiny-text"] >= 0.02
    assert found["sensorium:inter_token_latency_seconds_count,tiny-text"] == 4
    assert found["sensorium:inter_token_latency_seconds_sum,tiny-text"] >= 0.07
    assert found["sensorium:e2e_request_latency_seconds_count,tiny-text"] == 1
    assert found["sensorium:e2e_request_latency_seconds_sum,tiny-text"] >= 0.1
    assert found["sensorium:generation_tokens_total,tiny-text"] == 5
    assert found["sensorium:prompt_tokens_total,tiny-text"] > 5
    assert found["sensorium:request_success_total,stop,tiny-text"] == 1


def test_completions_are_measured_too() -> None:
    with live(FakeTextEngine("12345")) as server:
        body = {"model": "tiny-text", "prompt": ["a", "b"], "n": 2}
        assert server.http.post("/v1/completions", json=body).status_code == 200
        found = scrape(server)
    assert found["sensorium:time_to_first_token_seconds_count,tiny-text"] == 1
    assert found["sensorium:inter_token_latency_seconds_count,tiny-text"] == 16
    assert found["sensorium:generation_tokens_total,tiny-text"] == 20


def test_sequences_of_one_request_are_timed_apart() -> None:
    metrics = Metrics(FakeTextEngine())  # type: ignore[arg-type]
    watch = Stopwatch(metrics)
    for sequence in (0, 1, 0, 1):
        watch.token("m", sequence)
    counts = {
        sample.name: sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name.endswith("_count")
    }
    assert counts["sensorium:time_to_first_token_seconds_count"] == 1
    assert counts["sensorium:inter_token_latency_seconds_count"] == 2


def test_two_apps_do_not_share() -> None:
    with live(FakeTextEngine("x")) as one, live(FakeTextEngine("x")) as two:
        one.http.post("/v1/completions", json={"model": "tiny-text", "prompt": "a"})
        assert scrape(one)["sensorium:prompt_tokens_total,tiny-text"] == 1
        assert "sensorium:prompt_tokens_total,tiny-text" not in scrape(two)
