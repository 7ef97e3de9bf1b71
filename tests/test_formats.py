from __future__ import annotations

import math
import unicodedata

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sensorium.models.speech import Segment, Transcription, Word
from sensorium.server import formats

from .fake_engine import segment


def result(*segments: Segment, duration: float = 5.0) -> Transcription:
    return Transcription("transcribe", "en", duration, "".join(s.text for s in segments), segments)


TWO = result(segment(0, 0.0, 2.0, " Hello there."), segment(1, 3.25, 3661.5, " A --> B\n\n and  more "))


def test_srt_bytes() -> None:
    assert formats.render(TWO, "srt", "english") == (
        b"1\n00:00:00,000 --> 00:00:02,000\nHello there.\n\n"
        b"2\n00:00:03,250 --> 01:01:01,500\nA -> B and more\n\n\n"
    )


def test_vtt_bytes() -> None:
    assert formats.render(TWO, "vtt", "english") == (
        b"WEBVTT\n\n00:00:00.000 --> 00:00:02.000\nHello there.\n\n"
        b"00:00:03.250 --> 01:01:01.500\nA -> B and more\n\n"
    )


def test_text_and_json_bytes() -> None:
    said = result(segment(0, 0.0, 1.7, " Grüße, ‘du’."), duration=1.7)
    assert formats.render(said, "text", "german") == "Grüße, ‘du’.\n".encode()
    expected = '{"text":"Grüße, ‘du’.","usage":{"type":"duration","seconds":2}}'
    assert formats.render(said, "json", "german") == expected.encode()


def test_verbose_json_bytes() -> None:
    said = result(segment(0, 0.0, 1.0, " Hi!"), duration=1.0)
    assert formats.render(said, "verbose_json", "english", ("word", "segment")) == (
        b'{"task":"transcribe","language":"english","duration":1.0,"text":"Hi!",'
        b'"segments":[{"id":0,"seek":0,"start":0.0,"end":1.0,"text":" Hi!","tokens":[50364,1,2,50464],'
        b'"temperature":0.0,"avg_logprob":-0.25,"compression_ratio":1.25,"no_speech_prob":0.01}],'
        b'"words":[{"word":"Hi","start":0.0,"end":1.0}],"usage":{"type":"duration","seconds":1}}'
    )


def test_unknown_format() -> None:
    with pytest.raises(ValueError, match="xml"):
        formats.render(TWO, "xml", "english")


@pytest.mark.parametrize(
    ("word", "bare"),
    [
        (" Americans,", "Americans"),
        (' "Don\'t!"', "Don't"),
        (" 3.5.", "3.5"),
        (" rock'n'roll…", "rock'n'roll"),
        (" $5", "$5"),
        ("¿Qué?", "Qué"),
        ("「日本」。", "日本"),
        (" —", ""),
        (" ...", ""),
        ("", ""),
    ],
)
def test_bare_word(word: str, bare: str) -> None:
    assert formats.bare_word(word) == bare


def test_words_of_punctuation_alone_are_left_out() -> None:
    words = (Word(" -", 0.0, 0.1, 0.5), Word(" yes", 0.1, 0.4, 0.5))
    body = formats.verbose_json(result(segment(0, 0, 1, " - yes", words=words)), "english", ("word",))
    assert body["words"] == [{"word": "yes", "start": 0.1, "end": 0.4}]


@given(st.text())
def test_bare_word_has_no_punctuation_at_its_ends(text: str) -> None:
    bare = formats.bare_word(text)
    assert bare in text
    for end in bare[:1], bare[-1:]:
        assert not end or not unicodedata.category(end).startswith(("P", "Z"))


@pytest.mark.parametrize("text", ["a --> b", "a ---> b", "a ------> b", "-->-->"])
def test_no_arrow_in_a_cue(text: str) -> None:
    said = result(segment(0, 0.0, 1.0, text))
    assert formats.srt(said).count("-->") == formats.vtt(said).count("-->") == 1


def test_what_cannot_be_written_is_left_out() -> None:
    said = result(segment(0, 0.0, 1.0, " a\ufffd\ud800b", avg_logprob=math.nan))
    body = orjson.loads(formats.render(said, "verbose_json", "english"))
    assert (body["text"], body["segments"][0]["avg_logprob"]) == ("ab", 0.0)


def test_times_are_written_without_the_noise_of_sums() -> None:
    said = result(segment(0, 0.0, 7.6000000000000005, " a"), duration=7.6000000000000005)
    body = formats.verbose_json(said, "english", ("segment", "word"))
    assert body["duration"] == body["segments"][0]["end"] == body["words"][0]["end"] == 7.6


@given(st.floats(0, 400_000), st.floats(0.002, 30), st.floats(0, 1))
def test_rounding_keeps_times_in_order(start: float, length: float, rest: float) -> None:
    end = start + length
    said = result(segment(0, start, end, " a"), duration=end + rest)
    body = formats.verbose_json(said, "english", ("segment",))
    (shown,) = body["segments"]
    assert 0 <= shown["start"] < shown["end"] <= body["duration"]
    assert formats.clock(start, ",") < formats.clock(end, ",")


@given(st.floats(0, 400_000))
def test_clock_rounds_and_carries(seconds: float) -> None:
    hours, minutes, rest = formats.clock(seconds, ".").split(":")
    assert int(minutes) < 60
    assert float(rest) < 60
    assert len(rest) == 6
    assert int(hours) * 3600 + int(minutes) * 60 + float(rest) == pytest.approx(seconds, abs=0.00051)


@given(st.text(st.characters()), st.floats(), st.sampled_from(["json", "text", "srt", "vtt", "verbose_json"]))
def test_always_valid_utf8_and_finite_numbers(text: str, number: float, kind: str) -> None:
    said = segment(0, 0.0, 1.0, text, avg_logprob=number, no_speech_prob=number, compression_ratio=number)
    body = formats.render(result(said), kind, "english", ("segment", "word"))
    assert "�" not in body.decode("utf-8")
    if kind.endswith("json"):
        orjson.loads(body)
    if kind == "verbose_json":
        assert all(math.isfinite(s["avg_logprob"]) for s in orjson.loads(body)["segments"])
    if kind in ("srt", "vtt"):
        assert body.decode().count("-->") <= 1
