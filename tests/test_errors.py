from __future__ import annotations

import orjson
import pytest
from sensorium.server import errors


@pytest.mark.parametrize(
    ("error", "status", "kind", "param", "code"),
    [
        (errors.invalid("seed", "no"), 400, "invalid_request_error", "seed", None),
        (errors.invalid_language("no"), 400, "invalid_request_error", "language", "invalid_language_format"),
        (errors.undecodable(), 400, "invalid_request_error", None, None),
        (errors.content_too_large(1, 2), 413, "server_error", None, None),
        (errors.model_not_found("m"), 404, "invalid_request_error", "model", "model_not_found"),
        (errors.invalid_api_key(), 401, "invalid_request_error", None, "invalid_api_key"),
        (errors.overloaded("full"), 429, "rate_limit_error", None, "rate_limit_exceeded"),
        (errors.unavailable(), 503, "server_error", None, "engine_unavailable"),
        (errors.internal(), 500, "server_error", None, None),
    ],
)
def test_shape(error: errors.ApiError, status: int, kind: str, param: str | None, code: str | None) -> None:
    answer = error.response()
    assert answer.status_code == status
    body = orjson.loads(answer.body)
    assert list(body["error"]) == ["message", "type", "param", "code"]
    assert [body["error"][key] for key in ("type", "param", "code")] == [kind, param, code]
    assert body["error"]["message"]
    assert ("retry-after" in answer.headers) == (status == 429)


def test_words_of_the_service() -> None:
    assert str(errors.content_too_large(26214400, 30000000)) == (
        "Maximum content size limit (26214400) exceeded (30000000 bytes read)"
    )
    assert str(errors.undecodable()) == (
        "Invalid file format. Supported formats: "
        "['flac','m4a','mp3','mp4','mpeg','mpga','oga','ogg','wav','webm']"
    )


def test_shown_is_short_and_on_one_line() -> None:
    assert errors.shown("a\nb") == r"'a\nb'"
    assert len(errors.shown("x" * 10_000)) < 100
