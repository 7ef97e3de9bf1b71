"""What holds for every route: ids, keys, errors, names, health."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import pytest
from openai import AuthenticationError, OpenAI
from sensorium.engine.config import ConfigError
from sensorium.server.app import create_app
from sensorium.server.config import ServerConfig
from sensorium.server.context import Context

from .fake_engine import FakeEngine
from .live_server import Live, error_of, live, wav


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live() as running:
        yield running


def test_models(server: Live) -> None:
    listed = server.http.get("/v1/models").json()
    assert listed["object"] == "list"
    ids = [model["id"] for model in listed["data"]]
    assert ids == ["whisper-base", "org/whisper-tiny.en", "chatty", "whisper-1"]
    assert all(set(model) == {"id", "object", "created", "owned_by"} for model in listed["data"])
    for name in ids:
        assert server.openai.models.retrieve(name).id == name
    assert [model.id for model in server.openai.models.list()] == ids
    answer = server.http.get("/v1/models/nope")
    assert answer.status_code == 404
    assert error_of(answer)["code"] == "model_not_found"


def test_aliases() -> None:
    with live(served_model_name=("whisper-1=org/whisper-tiny.en", "a/b=whisper-base")) as server:
        assert server.post(model="whisper-1").status_code == 200
        assert len(server.engine.english.asked) == 1
        assert server.post(model="a/b").status_code == 200
        assert len(server.engine.multilingual.asked) == 1
        assert server.http.get("/v1/models/a/b").json()["id"] == "a/b"


def test_alias_of_nothing_is_an_error() -> None:
    config = ServerConfig(served_model_name=("x=absent",))
    with pytest.raises(ConfigError, match="absent"):
        create_app(FakeEngine(), config)  # type: ignore[arg-type]


def test_version_and_health(server: Live) -> None:
    assert re.fullmatch(r"\d+\.\d+.*", server.http.get("/version").json()["version"])
    assert server.http.get("/health").json() == {"status": "ok"}


def test_dead_engine() -> None:
    engine = FakeEngine()
    with live(engine) as server:
        engine.dead = True
        for answer in (server.http.get("/health"), server.post()):
            assert answer.status_code == 503
            assert error_of(answer)["type"] == "server_error"


def test_engine_that_dies_under_a_request() -> None:
    engine = FakeEngine()
    engine.fail_after = 0
    with live(engine) as server:
        answer = server.post()
        assert answer.status_code == 500
        assert error_of(answer)["type"] == "server_error"
        engine.fail_after = None
        assert server.post().status_code == 200


def test_unexpected_error_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine()

    def broken(audio: object, options: object) -> None:
        raise RuntimeError("secret at 0xdeadbeef in /srv/models")

    engine.multilingual.transcription = broken  # type: ignore[method-assign, assignment]
    with live(engine) as server, caplog.at_level(logging.ERROR):
        answer = server.post()
        assert answer.status_code == 500
        assert answer.headers["x-request-id"]
        assert error_of(answer)["message"] == "The server had an error while processing your request."
        assert "secret" not in answer.text
        assert "secret" in caplog.text
        assert server.http.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1/audio/transcriptions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/v1/nothing", 404),
        ("GET", "/v1/chat/completions", 405),
        ("GET", "/v1/models/", 404),
        ("PUT", "/health", 405),
    ],
)
def test_routes_that_are_not_there(server: Live, method: str, path: str, status: int) -> None:
    answer = server.http.request(method, path)
    assert answer.status_code == status
    assert error_of(answer)["type"] == "invalid_request_error"
    assert answer.headers["x-request-id"]
    assert status != 405 or answer.headers["allow"]


def test_request_id_of_the_client_is_kept_when_it_is_safe(server: Live) -> None:
    for sent, kept in (("abc-1.2_3", True), ("two words", False), ("x" * 65, False)):
        answer = server.http.get("/version", headers={"x-request-id": sent})
        assert (answer.headers["x-request-id"] == sent) == kept


def test_api_key() -> None:
    with live(api_key="sécret") as server:
        assert server.http.get("/health").status_code == 200
        assert server.http.get("/version").status_code == 200
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic sécret".encode()}):
            for path in ("/v1/models", "/v1/audio/transcriptions", "/nothing"):
                answer = server.http.get(path, headers=headers)
                assert answer.status_code == 401
                assert error_of(answer)["code"] == "invalid_api_key"
                assert answer.headers["x-request-id"]
        right = {"authorization": "bearer sécret".encode()}
        assert server.http.get("/v1/models", headers=right).status_code == 200
        with pytest.raises(AuthenticationError):
            server.openai.models.list()


def test_api_key_through_the_client() -> None:
    with live(api_key="sk-right") as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="sk-right", max_retries=0)
        assert client.audio.transcriptions.create(model="whisper-1", file=("a.wav", wav(1))).text


def test_cors() -> None:
    asking = {"origin": "https://a.example", "access-control-request-method": "POST"}
    with live(cors_origin=("https://a.example",), api_key="k") as server:
        answer = server.http.options("/v1/audio/transcriptions", headers=asking)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        answer = server.http.get("/v1/models", headers={"origin": "https://a.example"})
        assert answer.status_code == 401
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        answer = server.http.get("/health", headers={"origin": "https://b.example"})
        assert "access-control-allow-origin" not in answer.headers


def test_no_cors_unless_asked_for(server: Live) -> None:
    answer = server.http.get("/health", headers={"origin": "https://a.example"})
    assert "access-control-allow-origin" not in answer.headers


def test_openapi_names_every_field(server: Live) -> None:
    document = server.http.get("/openapi.json").json()
    route = document["paths"]["/v1/audio/transcriptions"]["post"]
    schema = route["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert schema["required"] == ["file", "model"]
    assert {"timestamp_granularities[]", "vad_filter", "beam_size", "seed"} <= set(schema["properties"])
    assert "4XX" in route["responses"]


def test_log_has_ids_and_no_contents(server: Live, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        server.post(prompt="the secret prompt", odd_name="the secret value")
    assert "method=POST path=/v1/audio/transcriptions status=200" in caplog.text
    assert "odd_name" in caplog.text
    assert "secret" not in caplog.text


def test_nothing_is_held_after_requests() -> None:
    with live() as server:
        context = _context(server)
        for form in ({}, {"stream": "true"}, {"response_format": "xml"}, {"model": "nope"}):
            server.post(**form)
        server.post(file=b"noise")
        assert (context.queue.size, context.uploads.used, context.decoded.used) == (0, 0, 0)


def _context(server: Live) -> Context:
    context = server.app.state.context
    assert isinstance(context, Context)
    return context
