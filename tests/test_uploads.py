"""What clients put on the wire, byte for byte, and the limits on it."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sensorium.server.errors import ApiError
from sensorium.server.media import MAX_PARTS, MAX_TEXT_BYTES, _FormReader

from .fake_engine import FakeEngine
from .live_server import BOUNDARY, Live, error_of, form_request, live, multipart, wait_until, wav

FILE = b'Content-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n' + wav(1.0)
MODEL = b'Content-Disposition: form-data; name="model"\r\n\r\nwhisper-base'
JSON_PART = b"Content-Type: application/json\r\n"
MULTIPART = {"content-type": "multipart/form-data; boundary=" + BOUNDARY.decode()}
HEADERS = (
    b'Content-Disposition: form-data; name="prompt"; filename=',
    b"Content-Disposition: form-data; name=",
    b"Content-Disposition: form-data; name*=",
    b'Content-Disposition: form-data; name="prompt"',
    b"Content-Type: text/plain; charset=",
    b'Content-Type: text/plain; charset="',
    b"Content-Type:",
)
MIB = 1024 * 1024


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(max_upload_mb=1, max_inflight_mb=1) as running:
        yield running


def field(name: bytes, value: bytes) -> bytes:
    return b'Content-Disposition: form-data; name="' + name + b'"\r\n\r\n' + value


# -- quirks of clients --------------------------------------------------------------------------------


def test_dotnet(server: Live) -> None:
    """openai-dotnet: unquoted names, filename*, a Content-Type on every part, a quoted boundary."""
    text = b"Content-Type: text/plain; charset=utf-8\r\nContent-Disposition: form-data; name="
    body = multipart(
        text + b"model\r\n\r\nwhisper-base",
        text + b"response_format\r\n\r\nverbose_json",
        text + b'"timestamp_granularities[]"\r\n\r\nword',
        text + b'"timestamp_granularities[]"\r\n\r\nsegment',
        b"Content-Disposition: form-data; name=file; filename=C:\\x\\a.wav; filename*=utf-8''a%20b.wav\r\n"
        b"Content-Type: application/octet-stream\r\n\r\n" + wav(1.0),
    )
    request = form_request(body).replace(b"boundary=" + BOUNDARY, b'boundary="' + BOUNDARY + b'"')
    status, _, answer = server.raw(request)
    assert status == 200, answer
    assert {"segments", "words"} <= set(json.loads(answer))


@pytest.mark.parametrize(
    "disposition",
    [
        b'form-data; name="file"; filename="C:\\Users\\me\\rec.wav"',
        b'form-data; name="file"; filename="\\\\server\\share\\rec.wav"',
        b'form-data; name="file"; filename=""',
        b'form-data; name="file"',
        b"form-data; name=file",
        b"form-data; filename*=utf-8''%e2%82%ac.wav; name=file",
        'form-data; name="file"; filename="été; \\"1\\".wav"'.encode(),
        b'form-data; filename="a;b=c.wav"; name="file"',
        b"FORM-DATA; NAME=file; FileName=x",
    ],
)
def test_any_way_to_name_a_file(server: Live, disposition: bytes) -> None:
    part = b"content-disposition: " + disposition + b"\r\nContent-Type: image/png\r\n\r\n" + wav(1.0)
    status, body = server.raw_form(part, MODEL)
    assert status == 200, body


@pytest.mark.parametrize(
    "parts",
    [
        [field(b"chunking_strategy[type]", b"server_vad"), field(b"chunking_strategy[threshold]", b"0.25")],
        [field(b"chunking_strategy", b'{"type": "server_vad", "threshold": 0.25}')],
        [
            b"Content-Type: application/json\r\n"
            + field(b"chunking_strategy", b'{"threshold":"0.25","type":"server_vad"}')
        ],
    ],
)
def test_objects(server: Live, parts: list[bytes]) -> None:
    status, body = server.raw_form(FILE, MODEL, *parts)
    assert status == 200, body
    chunking = server.engine.multilingual.asked[-1].options.chunking
    assert chunking is not None
    assert (chunking.threshold, chunking.prefix_padding_ms, chunking.silence_duration_ms) == (0.25, 300, 200)


@pytest.mark.parametrize("text", [b"true", b"True", b"TRUE", b"1", b" true "])
def test_booleans(server: Live, text: bytes) -> None:
    status, _ = server.raw_form(
        FILE, MODEL, field(b"condition_on_previous_text", text), field(b"vad_filter", b"0")
    )
    assert status == 200
    options = server.engine.multilingual.asked[-1].options
    assert (options.condition_on_previous_text, options.vad_filter) == (True, False)


def test_text_is_utf8_unless_it_says_otherwise(server: Live) -> None:
    for part in (
        field(b"prompt", "Füße".encode()),
        b"Content-Type: text/plain; charset=iso-8859-1\r\n" + field(b"prompt", "Füße".encode("latin-1")),
    ):
        assert server.raw_form(FILE, MODEL, part)[0] == 200
        assert server.engine.multilingual.asked[-1].options.prompt == "Füße"
    for part in (
        field(b"prompt", b"\xff\xfe\xfd"),
        b"Content-Type: text/plain; charset=idna\r\n" + field(b"prompt", b"a"),
        b"Content-Type: text/plain; charset=hex\r\n" + field(b"prompt", b"aa"),
        b'Content-Type: text/plain; charset="\0"\r\n' + field(b"prompt", b"a"),
        b"Content-Type: text/plain; charset=\r\n" + field(b"prompt", b"a"),
        b"Content-Type: text/plain; charset=utf-16\r\n" + field(b"prompt", b"odd"),
    ):
        status, body = server.raw_form(FILE, MODEL, part)
        assert (status, body["error"]["param"]) == (400, "prompt")


def test_body_without_announced_length(server: Live) -> None:
    body = multipart(FILE, MODEL)

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(body), 1000):
            yield body[start : start + 1000]

    assert (
        server.http.post("/v1/audio/transcriptions", content=pieces(), headers=MULTIPART).status_code == 200
    )


# -- what is malformed --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("param", "parts"),
    [
        ("file", [MODEL]),
        ("model", [FILE]),
        ("file", []),
        ("file", [FILE, FILE, MODEL]),
        ("model", [FILE, MODEL, field(b"model", b"gpt-4o-transcribe")]),
        ("language", [FILE, MODEL, field(b"language", b"en"), field(b"language", b"fr")]),
        (None, [b"Content-Type: text/plain\r\n\r\nno name"]),
        ("prompt", [FILE, MODEL, field(b"prompt", b"x" * (MAX_TEXT_BYTES + 1))]),
        (None, [field(b"n%d" % number, b"") for number in range(MAX_PARTS + 1)]),
    ],
)
def test_form_that_is_wrong(server: Live, param: str | None, parts: list[bytes]) -> None:
    status, body = server.raw_form(*parts)
    assert (status, body["error"]["type"], body["error"]["param"]) == (400, "invalid_request_error", param)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"garbage",
        multipart(FILE, MODEL)[:-20],
        b"--" + BOUNDARY + b"\r\nbad header\r\n\r\n\r\n",
        b"\r\n" * 9,
    ],
)
def test_body_that_is_no_form(server: Live, body: bytes) -> None:
    status, _, answer = server.raw(form_request(body))
    assert status == 400, answer
    assert json.loads(answer)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "application/json"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "multipart/form-data"},
        {"content-type": "multipart/form-data; boundary=" + "x" * 300},
        {},
    ],
)
def test_body_of_another_type(server: Live, headers: dict[str, str]) -> None:
    answer = server.http.post(
        "/v1/audio/transcriptions", content=b'{"model": "whisper-base"}', headers=headers
    )
    assert answer.status_code == 400
    assert error_of(answer)["type"] == "invalid_request_error"


@given(
    st.lists(st.tuples(st.sampled_from(["a", "file", "ü", "a[]"]), st.binary(max_size=40)), max_size=6),
    st.data(),
)
def test_any_cut_of_a_form_reads_the_same(parts: list[tuple[str, bytes]], data: st.DataObject) -> None:
    body = multipart(*(field(name.encode(), value) for name, value in parts))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=8)))

    def read(pieces: list[bytes]) -> object:
        reader = _FormReader(BOUNDARY, MIB)
        try:
            for piece in pieces:
                reader.write(piece)
            form = reader.finish()
        except ApiError as error:
            return error.body()
        return form.fields, form.file

    pieces = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    assert read(pieces) == read([body])


@given(
    st.lists(st.tuples(st.sampled_from(HEADERS), st.binary(max_size=60)), max_size=3), st.binary(max_size=9)
)
def test_any_part_is_read_or_refused(headers: list[tuple[bytes, bytes]], content: bytes) -> None:
    lines = b"".join(name + value + b"\r\n" for name, value in headers)
    reader = _FormReader(BOUNDARY, MIB)
    with suppress(ApiError):
        reader.write(multipart(lines + b"\r\n" + content))
        reader.finish()


# -- limits -------------------------------------------------------------------------------------------


def test_file_over_the_limit(server: Live) -> None:
    answer = server.post(file=bytes(MIB + 1))
    assert answer.status_code == 413
    error = error_of(answer)
    assert error["message"].startswith(f"Maximum content size limit ({MIB}) exceeded (")
    assert error["message"].endswith(" bytes read)")
    assert (error["type"], error["param"], error["code"]) == ("server_error", None, None)
    assert server.post(file=wav(1.0) + bytes(MIB - 32_044)).status_code == 200, "exactly the limit is taken"


def test_announced_length_is_refused_before_it_is_sent(server: Live) -> None:
    head = form_request(b"").replace(b"Content-Length: 0", b"Content-Length: 10485760")
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(head)
        assert b" 413 " in connection.recv(65536).split(b"\r\n")[0]


def test_endless_body_is_cut_off(server: Live) -> None:
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        yield b"--" + BOUNDARY + b"\r\n" + field(b"file", b"")
        for _ in range(4000):
            sent += 65536
            yield bytes(65536)

    try:
        answer = server.http.post("/v1/audio/transcriptions", content=endless(), headers=MULTIPART)
    except httpx.WriteError:
        pytest.fail("the answer was lost")
    assert answer.status_code == 413


def test_uploads_in_flight_are_bounded(server: Live) -> None:
    head = form_request(b"").replace(b"Content-Length: 0", b"Content-Length: 900000")
    with socket.create_connection(("127.0.0.1", server.port)) as stalled:
        stalled.sendall(head)
        time.sleep(0.2)
        answer = server.post(file=wav(8.0))
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert error_of(answer)["code"] == "rate_limit_exceeded"
    wait_until(lambda: server.post(file=wav(8.0)).status_code == 200)


def test_upload_that_stalls() -> None:
    with live(upload_stall_seconds=0.2) as server:
        status, _, body = server.raw(
            form_request(multipart(FILE, MODEL)).replace(b"\r\n\r\n", b"\r\n\r\n", 1)[:500]
        )
        assert status == 408
        assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_queue_is_bounded() -> None:
    with live(FakeEngine(pace=0.3), max_queue=1) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as first:
            first.sendall(form_request(multipart(FILE, MODEL)))
            wait_until(lambda: server.engine.runs)
            answer = server.post()
            assert answer.status_code == 429
            assert int(answer.headers["retry-after"]) >= 1
        wait_until(lambda: server.post().status_code == 200)


def test_decoded_audio_waits_for_room() -> None:
    with live(FakeEngine(pace=0.1), max_decoded_mb=1) as server:
        sockets = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(3)]
        for connection in sockets:
            connection.sendall(form_request(multipart(field(b"file", wav(10.0)), MODEL)))
        wait_until(lambda: server.engine.runs)
        time.sleep(0.1)
        assert len(server.engine.runs) == 1, "two of 0.6 MiB do not fit into 1 MiB"
        wait_until(lambda: len(server.engine.runs) == 3)
        for connection in sockets:
            assert b" 200 " in connection.recv(65536)
            connection.close()


def test_two_hundred_bad_requests_change_nothing(server: Live) -> None:
    before = server.post().json()
    for number in range(200):
        form = {"response_format": "xml"} if number % 2 else {}
        assert server.post(file=b"noise" * 2000, **form).status_code == 400
    assert server.post().json() == before
