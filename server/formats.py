"""A finished transcription in each of the response formats, byte for byte as OpenAI's service writes them."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Collection
from typing import Any

import orjson

from ..models.speech import Segment, Transcription, Word

TEXT_TYPE = "text/plain; charset=utf-8"
JSON_TYPE = "application/json"
TIME_DECIMALS = 6  # finer than a sample lasts; sums of frame times such as 7.6000000000000005 end here
# U+FFFD marks bytes that were no character, and a lone surrogate cannot be written as UTF-8.
_UNWRITABLE = {0xFFFD: None, **dict.fromkeys(range(0xD800, 0xE000))}

_ARROW = re.compile("--+>")  # "-->" ends the times of a cue and must not be in its text


def media_type(response_format: str) -> str:
    return JSON_TYPE if response_format.endswith("json") else TEXT_TYPE


def render(
    result: Transcription, response_format: str, language: str, granularities: Collection[str] = ("segment",)
) -> bytes:
    """language: the lower-case English name. granularities: "segment", "word" or both, for verbose_json."""
    if response_format == "json":
        return orjson.dumps(plain_json(result))
    if response_format == "verbose_json":
        return orjson.dumps(verbose_json(result, language, granularities))
    if response_format == "srt":
        return srt(result).encode()
    if response_format == "vtt":
        return vtt(result).encode()
    if response_format == "text":
        return (final_text(result) + "\n").encode()
    raise ValueError(f"no such response format: {response_format}")


def clean(text: str) -> str:
    """The text without what must never reach a client."""
    return text.translate(_UNWRITABLE)


def final_text(result: Transcription) -> str:
    return clean(result.text).strip()


def usage(result: Transcription) -> dict[str, Any]:
    return {"type": "duration", "seconds": math.ceil(result.duration)}


def plain_json(result: Transcription) -> dict[str, Any]:
    body: dict[str, Any] = {"text": final_text(result)}
    if result.task == "transcribe":
        body["usage"] = usage(result)
    return body


def verbose_json(result: Transcription, language: str, granularities: Collection[str]) -> dict[str, Any]:
    """Keys in the service's order; a translation is English and has neither words nor usage."""
    translated = result.task == "translate"
    body: dict[str, Any] = {
        "task": result.task,
        "language": "english" if translated else language,
        "duration": _seconds(result.duration),
        "text": final_text(result),
    }
    if "segment" in granularities:
        body["segments"] = [_segment(segment) for segment in result.segments]
    if "word" in granularities and not translated:
        spoken = [_word(word) for segment in result.segments for word in segment.words or ()]
        body["words"] = [word for word in spoken if word["word"]]
    if not translated:
        body["usage"] = usage(result)
    return body


def _segment(segment: Segment) -> dict[str, Any]:
    return {
        "id": segment.id,
        "seek": segment.seek,
        "start": _seconds(segment.start),
        "end": _seconds(segment.end),
        "text": clean(segment.text),
        "tokens": list(segment.tokens),
        "temperature": _finite(segment.temperature),
        "avg_logprob": _finite(segment.avg_logprob),
        "compression_ratio": _finite(segment.compression_ratio),
        "no_speech_prob": _finite(segment.no_speech_prob),
    }


def _finite(value: float) -> float:
    """JSON has no NaN, and the schema wants a number."""
    return float(value) if math.isfinite(value) else 0.0


def _seconds(value: float) -> float:
    """Rounding keeps the order of times, and apart those that are 1e-6 s apart: so are a segment's."""
    return round(_finite(value), TIME_DECIMALS)


def _word(word: Word) -> dict[str, Any]:
    return {"word": bare_word(word.word), "start": _seconds(word.start), "end": _seconds(word.end)}


def bare_word(word: str) -> str:
    """The word without spaces and punctuation around it; apostrophes and points inside it stay."""
    text = clean(word).strip()
    start, end = 0, len(text)
    while start < end and _is_edge(text[start]):
        start += 1
    while end > start and _is_edge(text[end - 1]):
        end -= 1
    return text[start:end]


def _is_edge(character: str) -> bool:
    return character.isspace() or unicodedata.category(character).startswith("P")


def srt(result: Transcription) -> str:
    cues = enumerate(_cues(result), start=1)
    return "".join(f"{number}\n{_span(cue, ',')}\n{text}\n\n" for number, (cue, text) in cues) + "\n"


def vtt(result: Transcription) -> str:
    return "WEBVTT\n\n" + "".join(f"{_span(cue, '.')}\n{text}\n\n" for cue, text in _cues(result))


def _cues(result: Transcription) -> list[tuple[Segment, str]]:
    """Segments with the text of their cues: one line, for a blank line would end the cue."""
    texts = (" ".join(_ARROW.sub("->", clean(s.text)).split()) for s in result.segments)
    return [(segment, text) for segment, text in zip(result.segments, texts, strict=True) if text]


def _span(segment: Segment, decimal_mark: str) -> str:
    return f"{clock(segment.start, decimal_mark)} --> {clock(segment.end, decimal_mark)}"


def clock(seconds: float, decimal_mark: str) -> str:
    """HH:MM:SS and milliseconds; the hours are always there."""
    # Halves go up: round() takes 1.5 and 2.5 to the same number, and so a millisecond's cue to nothing.
    minutes, milliseconds = divmod(math.floor(seconds * 1000 + 0.5), 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{milliseconds // 1000:02d}{decimal_mark}{milliseconds % 1000:03d}"
