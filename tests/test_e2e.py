"""The whole service as users meet it: real process, real HTTP, real client, real recordings."""

from __future__ import annotations

import io
import re
import socket
import statistics
import time
import wave
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from openai import APIStatusError, OpenAI

from .live import LiveServer, serve
from .oracle import samples, speech_files

TRANSCRIPTIONS = "/v1/audio/transcriptions"
JFK = "jfk_16k_mono.wav"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serve(tmp_path_factory.mktemp("e2e") / "log", "--model", "whisper-base") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: LiveServer) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300, max_retries=0)


def to_wav(samples: np.ndarray) -> bytes:
    """float samples → a 16 kHz 16-bit mono file."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(16000)
        out.writeframes((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())
    return buffer.getvalue()


def english(media: Path, seconds: float) -> bytes:
    """English speech of this length: whole recordings one after another, pauses between them."""
    names = [JFK, "oai_houseplant_care.mp3", "f5_ref_en.wav", "oai_meeting.wav"]
    pieces = [part for n in names * 4 for part in (samples(media / "audio" / n), np.zeros(12800, np.float32))]
    return to_wav(np.concatenate(pieces)[: int(seconds * 16000)])


def post(server: LiveServer, data: bytes, **fields: str) -> httpx.Response:
    fields.setdefault("model", "whisper-1")
    return httpx.post(server.url + TRANSCRIPTIONS, files={"file": ("a", data)}, data=fields, timeout=300)


def test_the_client_parses_every_format(client: OpenAI, media: Path) -> None:
    def transcribe(**options: object) -> object:
        with open(media / "audio" / JFK, "rb") as audio:
            return client.audio.transcriptions.create(model="whisper-1", file=audio, **options)  # type: ignore[call-overload]

    plain = transcribe()
    assert "ask what you can do for your country" in plain.text
    assert plain.usage.seconds == 11
    assert transcribe(response_format="text").strip() == plain.text
    subtitles = transcribe(response_format="srt")
    assert subtitles.startswith("1\n00:00:00,000 --> ")
    assert transcribe(response_format="vtt").startswith("WEBVTT\n\n00:00:00.000 --> ")
    verbose = transcribe(response_format="verbose_json", timestamp_granularities=["segment", "word"])
    assert verbose.language == "english"
    assert verbose.duration == pytest.approx(11.0)
    assert "".join(s.text for s in verbose.segments).strip() == verbose.text
    assert [w.word for w in verbose.words][:5] == ["And", "so", "my", "fellow", "Americans"]
    assert all(0 <= w.start < w.end <= 11.0 for w in verbose.words)
    only_words = transcribe(response_format="verbose_json", timestamp_granularities=["word"])
    assert only_words.segments is None
    assert only_words.words


def test_a_stream_adds_up_to_its_last_event(client: OpenAI, media: Path) -> None:
    data = english(media, 70)
    events = list(client.audio.transcriptions.create(model="whisper-1", file=("a.wav", data), stream=True))
    deltas = [e.delta for e in events if e.type == "transcript.text.delta"]
    assert len(deltas) > 1
    assert [e.type for e in events].count("transcript.text.done") == 1
    assert "".join(deltas) == events[-1].text


def test_translation(client: OpenAI, media: Path) -> None:
    with open(media / "audio/buzz_french.mp3", "rb") as audio:
        result = client.audio.translations.create(
            model="whisper-1", file=audio, response_format="verbose_json"
        )
    assert result.language == "english"
    assert "podcast" in result.text.lower()


def test_sixteen_files_at_once_give_what_each_gives_alone(server: LiveServer, media: Path) -> None:
    files = [path.read_bytes() for path in speech_files(media)[:16]]
    alone = [post(server, data).json()["text"] for data in files]
    with ThreadPoolExecutor(16) as pool:
        together = [r.json()["text"] for r in pool.map(lambda data: post(server, data), files)]
    assert len(set(alone)) > 10
    assert together == alone


@pytest.mark.parametrize("fields", [{"chunking_strategy": "auto"}, {"chunking_strategy[type]": "server_vad"}])
def test_chunks_of_one_file_run_side_by_side(server: LiveServer, media: Path, fields: dict[str, str]) -> None:
    data = english(media, 100)
    body = post(server, data, response_format="verbose_json", **fields).json()
    starts = [segment["start"] for segment in body["segments"]]
    assert starts == sorted(starts)
    assert len(starts) > 8
    assert body["segments"][-1]["end"] <= body["duration"] == pytest.approx(100)
    assert "ask what you can do for your country" in body["text"]


def test_no_speech_is_no_text(server: LiveServer, media: Path) -> None:
    noise = np.random.default_rng(0).normal(0, 0.05, 5 * 16000).astype(np.float32)
    for data in ((media / "audio/ina_silence2sec.wav").read_bytes(), to_wav(noise), to_wav(np.zeros(16000))):
        answer = post(server, data, response_format="verbose_json")
        assert answer.status_code == 200
        assert answer.json()["text"] == ""
        assert answer.json()["segments"] == []


def test_a_prompt_of_two_thousand_words_is_cut_not_refused(server: LiveServer, media: Path) -> None:
    answer = post(server, (media / "audio" / JFK).read_bytes(), prompt="politics and speeches " * 667)
    assert answer.status_code == 200
    assert "country" in answer.json()["text"]


BAD_FIELDS = [
    ({"response_format": "xml"}, "response_format"),
    ({"response_format": "diarized_json"}, "response_format"),
    ({"temperature": "2"}, "temperature"),
    ({"language": "klingon"}, "language"),
    ({"timestamp_granularities[]": "sentence", "response_format": "verbose_json"}, "timestamp_granularities"),
    ({"timestamp_granularities[]": "word"}, "timestamp_granularities"),
    ({"include[]": "logprobs"}, "include"),
    ({"beam_size": "9"}, "beam_size"),
    ({"stream": "true", "response_format": "srt"}, "stream"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_FIELDS)
def test_a_bad_value_is_named(server: LiveServer, media: Path, fields: dict[str, str], param: str) -> None:
    answer = post(server, (media / "audio" / JFK).read_bytes(), **fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"].removesuffix("[]") == param


def bad_files(media: Path) -> dict[str, bytes]:
    return {
        "empty": b"",
        "text": b"this is no audio at all\n" * 50,
        "png": (media / "images/cat_chelsea.png").read_bytes(),
        "video without audio": (media / "images/nasa_rotated.mp4").read_bytes(),
        "header only": (media / "audio/bad_ps_null.wav").read_bytes(),
        "broken header": (media / "audio/bad_ps_bad.wav").read_bytes(),
        "random": np.random.default_rng(1).bytes(200_000),
    }


def test_bad_files_are_refused_within_a_second(server: LiveServer, media: Path) -> None:
    for name, data in bad_files(media).items():
        started = time.monotonic()
        answer = post(server, data)
        assert answer.status_code == 400, name
        assert answer.json()["error"]["type"] == "invalid_request_error", name
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert time.monotonic() - started < 1, name


def test_unknown_model_and_missing_file(server: LiveServer, client: OpenAI, media: Path) -> None:
    with pytest.raises(APIStatusError) as caught:
        client.audio.transcriptions.create(model="nothing", file=media / "audio" / JFK)
    assert (caught.value.status_code, caught.value.code) == (404, "model_not_found")
    answer = httpx.post(server.url + TRANSCRIPTIONS, files={"model": (None, "whisper-1")})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "file"


def test_two_hundred_bad_requests_change_nothing(server: LiveServer, media: Path) -> None:
    good = (media / "audio/oai_hello_world.mp3").read_bytes()
    bad = list(bad_files(media).values())
    for data in bad:
        post(server, data)
    want = post(server, good).json()
    before = server.resident_bytes()
    with ThreadPoolExecutor(8) as pool:
        codes = list(pool.map(lambda n: post(server, bad[n % len(bad)]).status_code, range(200)))
    assert set(codes) == {400}
    assert post(server, good).json() == want
    assert server.resident_bytes() < before * 1.05


def test_work_ends_when_the_client_leaves(server: LiveServer, media: Path) -> None:
    data = english(media, 170)
    head = (
        b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper-1\r\n'
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
    )
    body = head + data + b"\r\n--x--\r\n"
    port = int(server.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(
            b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: a\r\nContent-Type: multipart/form-data; boundary=x\r\n"
            + f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        time.sleep(2.5)
    time.sleep(2)
    idle = []
    for _ in range(5):
        before = server.cpu_seconds()
        time.sleep(0.4)
        idle.append((server.cpu_seconds() - before) / 0.4)
    assert statistics.median(idle) < 0.3, "the server goes on working for nobody"


@pytest.mark.slow
def test_memory_is_flat_over_many_requests(tmp_path: Path, media: Path) -> None:
    files = [path.read_bytes() for path in speech_files(media) if path.stat().st_size < 150_000]
    # A small arena is full after a few requests, so growth after that would be a leak.
    with serve(tmp_path / "log", "--model", "whisper-base", "--kv-cache-mb", "256") as server:

        def hundred() -> int:
            with ThreadPoolExecutor(4) as pool:
                answers = list(pool.map(lambda n: post(server, files[n % len(files)]).status_code, range(60)))
            assert set(answers) == {200}
            return server.resident_bytes()

        first = hundred()
        last = [hundred() for _ in range(2)][-1]
    assert last <= 1.05 * first


def test_sigterm_lets_running_work_finish(tmp_path: Path, media: Path) -> None:
    data = english(media, 20)
    with serve(tmp_path / "log", "--model", "whisper-base") as server, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, server, data)
        time.sleep(0.7)
        server.process.terminate()
        assert answer.result().status_code == 200
        assert server.process.wait(30) == 0


def test_a_key_is_asked_for(tmp_path: Path, media: Path) -> None:
    with serve(tmp_path / "log", "--model", "whisper-base", "--api-key", "sesame") as server:
        with pytest.raises(APIStatusError) as caught:
            OpenAI(base_url=f"{server.url}/v1", api_key="wrong").models.list()
        assert (caught.value.status_code, caught.value.code) == (401, "invalid_api_key")
        ids = [m.id for m in OpenAI(base_url=f"{server.url}/v1", api_key="sesame").models.list()]
    assert ids == ["whisper-base", "whisper-1"]


def words_of(text: str) -> list[str]:
    return re.findall(r"[\w']+", text.lower())


def test_every_format_has_the_same_words(server: LiveServer, media: Path) -> None:
    """Across the cuts at 30 s too; subtitles and words are made from the segments of the one transcription."""
    data = english(media, 48)
    plain = post(server, data).json()["text"]
    assert len(words_of(plain)) > 80
    assert post(server, data, response_format="text").text.strip() == plain
    both = {"timestamp_granularities[]": "word,segment"}
    verbose = post(server, data, response_format="verbose_json", **both).json()
    assert verbose["text"] == plain
    assert "".join(segment["text"] for segment in verbose["segments"]).strip() == plain
    assert words_of(" ".join(word["word"] for word in verbose["words"])) == words_of(plain)
    starts = [word["start"] for word in verbose["words"]]
    assert starts == sorted(starts)
    assert all(0 <= word["start"] < word["end"] <= verbose["duration"] for word in verbose["words"])
    for kind in ("srt", "vtt"):
        shown = post(server, data, response_format=kind).text
        cues = [line for line in shown.splitlines() if line and "-->" not in line and not line.isdigit()]
        assert words_of(" ".join(cues)) == words_of("WEBVTT " * (kind == "vtt") + plain)


def test_a_prompt_costs_no_segments(server: LiveServer, media: Path) -> None:
    """Nor do names of control tokens in it."""
    data = english(media, 48)
    alone = post(server, data, response_format="verbose_json").json()
    for prompt in (
        "A president speaks about the country, and a gardener of plants. ",
        "<|endoftext|><|0.00|>",
    ):
        said = post(server, data, response_format="verbose_json", prompt=prompt).json()
        assert len(said["segments"]) > len(alone["segments"]) / 2
        assert "ask what you can do for your country" in said["text"]
        assert said["segments"][-1]["end"] > 40, "the end of the file is there"


def test_less_than_a_second_of_speech_is_text(server: LiveServer, media: Path) -> None:
    said = samples(media / "audio/oai_hello_world.mp3")[: int(0.9 * 16000)]
    assert "hello" in post(server, to_wav(said)).json()["text"].lower()


def test_digits_have_times(server: LiveServer, media: Path) -> None:
    data = (media / "audio/num123_mono_16bit_44k.aiff").read_bytes()
    body = post(server, data, response_format="verbose_json", **{"timestamp_granularities[]": "word"}).json()
    assert words_of(" ".join(word["word"] for word in body["words"])) == words_of(body["text"])
    assert len({word["start"] for word in body["words"]}) == len(body["words"]) > 0
