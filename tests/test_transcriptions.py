from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from openai import APIError, BadRequestError
from sensorium.models.speech import ChunkingStrategy, TranscriptionOptions

from .fake_engine import SPEECH, FakeEngine, segment
from .live_server import Live, error_of, form_request, live, multipart, wait_until, wav

TEXT = "".join(said.text for said in SPEECH).strip()
FILE = b'Content-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live() as running:
        yield running


def options(server: Live) -> TranscriptionOptions:
    """The options of the newest request."""
    return server.engine.multilingual.asked[-1].options


# -- answers ------------------------------------------------------------------------------------------


def test_json(server: Live) -> None:
    answer = server.post(file=wav(4.2))
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"].startswith("req_")
    assert answer.json() == {"text": TEXT, "usage": {"type": "duration", "seconds": 5}}


def test_verbose_json_key_order_and_types(server: Live) -> None:
    body = server.post(response_format="verbose_json").json()
    assert list(body) == ["task", "language", "duration", "text", "segments", "usage"]
    assert body["task"] == "transcribe"
    assert body["language"] == "english"
    assert isinstance(body["duration"], float)
    assert b'"duration":5.0,' in server.post(response_format="verbose_json").content
    assert list(body["segments"][0]) == [
        *("id", "seek", "start", "end", "text", "tokens"),
        *("temperature", "avg_logprob", "compression_ratio", "no_speech_prob"),
    ]
    assert body["segments"][0]["text"] == " And so, my fellow Americans,"


@pytest.mark.parametrize(
    ("sent", "segments", "words"),
    [
        ({}, True, False),
        ({"timestamp_granularities[]": ""}, True, False),
        ({"timestamp_granularities[]": "segment"}, True, False),
        ({"timestamp_granularities[]": "word"}, False, True),
        ({"timestamp_granularities[]": ["word", "segment"]}, True, True),
        ({"timestamp_granularities": ["segment", "word"]}, True, True),
        ({"timestamp_granularities": "word,segment"}, True, True),
        ({"timestamp_granularities": '["word"]'}, False, True),
        ({"timestamp_granularities[0]": "word", "timestamp_granularities[1]": "segment"}, True, True),
    ],
)
def test_granularities(server: Live, sent: dict[str, str], segments: bool, words: bool) -> None:
    body = server.post(response_format="verbose_json", **sent).json()
    assert ("segments" in body, "words" in body) == (segments, words)
    assert options(server).word_timestamps == words
    if words:
        assert list(body["words"][0]) == ["word", "start", "end"]
        spoken = [word["word"] for word in body["words"]]
        assert spoken[:5] == ["And", "so", "my", "fellow", "Americans"]
        assert "can't" in spoken
        assert "3.5" in spoken
        assert "your" in spoken
        assert list(body)[-2:] == ["words", "usage"]


@pytest.mark.parametrize("kind", ["text", "srt", "vtt"])
def test_text_formats_are_plain_text(server: Live, kind: str) -> None:
    answer = server.post(response_format=kind)
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert "Voilà" in answer.text
    assert answer.text.count("-->") == (1 if kind == "text" else 3)


def test_translation(server: Live) -> None:
    body = server.post("translations", response_format="verbose_json", language="fr").json()
    assert list(body) == ["task", "language", "duration", "text", "segments"]
    assert (body["task"], body["language"]) == ("translate", "english")
    assert (options(server).task, options(server).language) == ("translate", "fr")
    assert server.post("translations").json() == {"text": TEXT}


def test_silence_is_an_empty_answer() -> None:
    with live(FakeEngine(segments=())) as server:
        body = server.post(response_format="verbose_json").json()
        assert (body["text"], body["segments"]) == ("", [])
        assert server.post(response_format="srt").text == "\n"
        assert server.post(response_format="text").text == "\n"


def test_openai_client_reads_every_format(server: Live) -> None:
    create = server.openai.audio.transcriptions.create
    sound = ("a.wav", wav(5.0))
    assert create(model="whisper-1", file=sound).text == TEXT
    verbose = create(
        model="whisper-1",
        file=sound,
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
        chunking_strategy={"type": "server_vad", "threshold": 0.4},
        temperature=0.2,
        extra_body={"vad_filter": False, "beam_size": 3},
    )
    assert (verbose.duration, verbose.language, len(verbose.segments or [])) == (5.0, "english", 3)
    assert verbose.words
    assert options(server) == TranscriptionOptions(
        temperature=0.2,
        beam_size=3,
        vad_filter=False,
        word_timestamps=True,
        chunking=ChunkingStrategy(threshold=0.4, prefix_padding_ms=300, silence_duration_ms=200),
    )
    for kind in ("text", "srt", "vtt"):
        assert isinstance(create(model="whisper-1", file=sound, response_format=kind), str)
    assert server.openai.audio.translations.create(model="whisper-1", file=sound).text == TEXT


# -- streams ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["json", "text"])
def test_stream(kind: str) -> None:
    said = (segment(0, 0, 1, "  one "), segment(1, 1, 2, " two\n"), segment(2, 2, 3, " trois € "))
    with live(FakeEngine(said, pace=0.02)) as server:
        answer = server.post(stream="true", response_format=kind)
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        lines = answer.text.split("\n\n")
        assert lines[-1] == ""
        assert lines[-2] == "data: [DONE]"
        assert all(line.startswith("data: ") for line in lines[:-1])
        events = [json.loads(line[6:]) for line in lines[:-2]]
        *deltas, done = events
        assert [event["type"] for event in deltas] == ["transcript.text.delta"] * 3
        assert done["type"] == "transcript.text.done"
        assert "".join(event["delta"] for event in deltas) == done["text"] == "one  two\n trois €"
        assert done["usage"] == {"type": "duration", "seconds": 5}


def test_openai_client_reads_the_stream_as_it_grows() -> None:
    with live(FakeEngine(pace=0.3)) as server:
        stream = server.openai.audio.transcriptions.create(
            model="whisper-1", file=("a.wav", wav(5.0)), stream=True
        )
        arrived = [(time.monotonic(), event) for event in stream]
        assert [event.type for _, event in arrived] == ["transcript.text.delta"] * 3 + [
            "transcript.text.done"
        ]
        assert arrived[2][0] - arrived[0][0] > 0.4, "deltas must not wait for the end"


def test_failure_within_a_stream_is_an_error_event() -> None:
    engine = FakeEngine(pace=0.02)
    engine.fail_after = 1
    with live(engine) as server:
        events = server.post(stream="true").text.split("\n\n")
        assert len(events) == 3
        assert list(json.loads(events[1][6:])["error"]) == ["message", "type", "param", "code"]
        stream = server.openai.audio.transcriptions.create(
            model="whisper-1", file=("a.wav", wav(5.0)), stream=True
        )
        with pytest.raises(APIError):
            list(stream)


@pytest.mark.parametrize("kind", ["srt", "vtt", "verbose_json"])
def test_stream_goes_with_json_and_text_only(server: Live, kind: str) -> None:
    answer = server.post(stream="true", response_format=kind)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "stream"


# -- a client that leaves -----------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [b"true", b"false"])
def test_client_that_leaves_aborts_its_work(stream: bytes) -> None:
    with live(FakeEngine(pace=2.0)) as server:
        body = multipart(
            FILE + wav(5.0),
            b'Content-Disposition: form-data; name="model"\r\n\r\nwhisper-1',
            b'Content-Disposition: form-data; name="stream"\r\n\r\n' + stream,
        )
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(form_request(body))
            wait_until(lambda: server.engine.runs)
        left = time.monotonic()
        wait_until(lambda: server.engine.runs[0].aborted_at is not None)
        assert server.engine.runs[0].aborted_at - left < 1.0
        assert server.http.get("/health").status_code == 200


def test_client_that_leaves_while_its_file_is_decoded() -> None:
    engine = FakeEngine()
    with live(engine, media_workers=1) as server:
        decoding, proceed = threading.Event(), threading.Event()

        def slow(audio: object, options: object) -> object:
            decoding.set()
            proceed.wait(10)
            return original(audio, options)

        original, engine.multilingual.transcription = engine.multilingual.transcription, slow
        body = multipart(FILE + wav(5.0), b'Content-Disposition: form-data; name="model"\r\n\r\nwhisper-1')
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(form_request(body))
            assert decoding.wait(10)
        time.sleep(0.1)
        proceed.set()
        engine.multilingual.transcription = original
        assert server.post().status_code == 200
        assert len(engine.runs) == 1, "only the second request may have reached the engine"


# -- media --------------------------------------------------------------------------------------------

PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\1\0\0\0\1\x08\6\0\0\0\x1f\x15\xc4\x89"


@pytest.mark.parametrize("file", [b"", b"just text\n" * 50, PNG, wav(0.0), bytes(range(256)) * 64])
def test_what_is_no_audio_is_400_at_once(server: Live, file: bytes) -> None:
    began = time.monotonic()
    answer = server.post(file=file, name="a.mp3")
    assert time.monotonic() - began < 1.0
    assert answer.status_code == 400
    assert error_of(answer)["type"] == "invalid_request_error"


def test_undecodable_has_the_services_words(server: Live) -> None:
    with pytest.raises(BadRequestError, match=r"Invalid file format. Supported formats: \['flac',"):
        server.openai.audio.transcriptions.create(model="whisper-1", file=("a.wav", b"RIFFnonsense"))


def test_too_short(server: Live) -> None:
    error = error_of(server.post(file=wav(0.05)))
    assert (error["param"], error["code"]) == ("file", "audio_too_short")
    assert server.post(file=wav(0.1)).status_code == 200


def test_too_long() -> None:
    with live(max_audio_seconds=3.0) as server:
        answer = server.post(file=wav(3.5))
        assert answer.status_code == 413
        assert error_of(answer)["code"] == "audio_too_long"
        assert server.post(file=wav(2.5)).status_code == 200


def test_real_recording_by_content_alone(server: Live, media: Path) -> None:
    recording = (media / "audio" / "jfk_441khz.m4a").read_bytes()
    body = server.post(file=recording, name="C:\\music\\jfk.txt", response_format="verbose_json").json()
    assert body["duration"] == pytest.approx(11.0, abs=0.2)


def test_media_work_runs_in_worker_threads(server: Live) -> None:
    server.post()
    assert all(name.startswith("media") for name in server.engine.multilingual.threads)


def test_health_answers_while_many_transcribe() -> None:
    with live(FakeEngine(pace=0.3)) as server, ThreadPoolExecutor(8) as clients:
        work = [clients.submit(server.post) for _ in range(8)]
        wait_until(lambda: len(server.engine.runs) == 8)
        began = time.monotonic()
        assert server.http.get("/health").status_code == 200
        assert time.monotonic() - began < 0.5
        assert {future.result().status_code for future in work} == {200}
