"""What a form may say, through the whole of the HTTP layer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import NotFoundError
from sensorium.models.speech import ChunkingStrategy, OptionError, TranscriptionOptions

from .fake_engine import FakeEngine
from .live_server import Live, error_of, live, wav


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live() as running:
        yield running


def options(server: Live) -> TranscriptionOptions:
    """The options of the newest request."""
    return server.engine.multilingual.asked[-1].options


@pytest.mark.parametrize(
    ("param", "form"),
    [
        ("response_format", {"response_format": "xml"}),
        ("response_format", {"response_format": "diarized_json"}),
        ("temperature", {"temperature": "2"}),
        ("temperature", {"temperature": "-0.1"}),
        ("temperature", {"temperature": "nan"}),
        ("temperature", {"temperature": "inf"}),
        ("temperature", {"temperature": "0,5"}),
        ("temperature", {"temperature": ["0", "1"]}),
        ("language", {"language": "klingon"}),
        ("timestamp_granularities", {"timestamp_granularities[]": "sentence"}),
        ("timestamp_granularities", {"timestamp_granularities[]": "word"}),
        ("timestamp_granularities", {"timestamp_granularities": "word", "response_format": "srt"}),
        ("include", {"include[]": "logprobs"}),
        ("stream", {"stream": "maybe"}),
        ("chunking_strategy", {"chunking_strategy": "manual"}),
        ("chunking_strategy", {"chunking_strategy": '{"type": "semantic_vad"}'}),
        ("chunking_strategy", {"chunking_strategy": '{"type": "server_vad", "threshold": 7}'}),
        ("chunking_strategy", {"chunking_strategy[type]": "server_vad", "chunking_strategy[foo]": "1"}),
        ("known_speaker_names", {"known_speaker_names[]": "Ann"}),
        ("known_speaker_references", {"known_speaker_references[]": "data:audio/wav;base64,AAAA"}),
        ("languages", {"languages[]": "en"}),
        ("keywords", {"keywords[]": "kernel"}),
        ("vad_filter", {"vad_filter": "2"}),
        ("condition_on_previous_text", {"condition_on_previous_text": "perhaps"}),
        ("temperature_fallback", {"temperature_fallback": "x"}),
        ("beam_size", {"beam_size": "9"}),
        ("beam_size", {"beam_size": "0"}),
        ("beam_size", {"beam_size": "1.5"}),
        ("best_of", {"best_of": "1e1"}),
        ("clip_timestamps", {"clip_timestamps": "5,1"}),
        ("clip_timestamps", {"clip_timestamps": "a"}),
        ("clip_timestamps", {"clip_timestamps": "0,inf"}),
        ("hallucination_silence_threshold", {"hallucination_silence_threshold": "-1"}),
        ("seed", {"seed": "9" * 30}),
        ("model", {"model": ""}),
        ("model", {"model": "chatty"}),
    ],
)
def test_parameter_that_cannot_be_honoured(server: Live, param: str, form: dict[str, str]) -> None:
    before = len(server.engine.runs)
    answer = server.post(file=b"never decoded", **form)
    assert answer.status_code == 400
    error = error_of(answer)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert len(server.engine.runs) == before


def test_wrong_language_has_the_services_shape(server: Live) -> None:
    body = server.post(language="klingon").json()
    assert body["error"]["code"] == "invalid_language_format"
    assert body["usage"] == {"type": "duration", "seconds": 0}


def test_unknown_model(server: Live) -> None:
    answer = server.post(model="gpt-9")
    assert answer.status_code == 404
    assert (error_of(answer)["param"], error_of(answer)["code"]) == ("model", "model_not_found")
    with pytest.raises(NotFoundError):
        server.openai.audio.transcriptions.create(model="gpt-9", file=("a.wav", wav(1)))


def test_english_model_does_not_translate(server: Live) -> None:
    answer = server.post("translations", model="org/whisper-tiny.en")
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "model"
    assert server.post(model="org/whisper-tiny.en").status_code == 200


@pytest.mark.parametrize(
    ("param", "form"),
    [
        ("stream", {"stream": "true"}),
        (
            "timestamp_granularities",
            {"timestamp_granularities[]": "word", "response_format": "verbose_json"},
        ),
    ],
)
def test_what_translations_cannot_do(server: Live, param: str, form: dict[str, str]) -> None:
    answer = server.post("translations", **form)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == param


def test_option_that_the_model_refuses() -> None:
    engine = FakeEngine()
    engine.multilingual.refuse = OptionError("hotwords", "hotwords are too long")
    with live(engine) as server:
        answer = server.post()
        assert answer.status_code == 400
        assert error_of(answer)["param"] == "hotwords"


@pytest.mark.parametrize("absent", ["", "null"])
def test_empty_and_null_mean_absent(server: Live, absent: str) -> None:
    names = ("language", "prompt", "response_format", "temperature", "stream", "chunking_strategy", "seed")
    assert server.post(**dict.fromkeys(names, absent)).status_code == 200
    assert options(server) == TranscriptionOptions()


def test_options_of_our_own(server: Live) -> None:
    answer = server.post(
        language="English",
        prompt="Glossary: Nimbus",
        hotwords="Kubernetes",
        temperature="0.5",
        temperature_fallback="False",
        beam_size="8",
        best_of="5",
        condition_on_previous_text="0",
        vad_filter="FALSE",
        chunking_strategy="auto",
        clip_timestamps="0,1.5,1.5,3",
        hallucination_silence_threshold="2",
        seed="7",
        something_unknown="1",
    )
    assert answer.status_code == 200
    assert options(server) == TranscriptionOptions(
        language="en",
        prompt="Glossary: Nimbus",
        hotwords="Kubernetes",
        temperature=0.5,
        temperature_fallback=False,
        beam_size=8,
        best_of=5,
        condition_on_previous_text=False,
        vad_filter=False,
        chunking=ChunkingStrategy(),
        clip_timestamps=(0.0, 1.5, 1.5, 3.0),
        hallucination_silence_threshold=2.0,
        seed=7,
    )
