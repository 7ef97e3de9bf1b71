"""What a transcription request may say: one table of form parameters, read in its order."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ..engine.engine import LoadedModel
from ..models.speech import ChunkingStrategy, OptionError, SpeechProcessor, Task, TranscriptionOptions
from . import errors, fields
from .fields import FieldError
from .media import Form
from .names import ModelNames

logger = logging.getLogger(__name__)

RESPONSE_FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
STREAMABLE_FORMATS = ("json", "text")
GRANULARITIES = ("word", "segment")

_BRACKETED = re.compile(r"([^\[\]]+)\[([^\[\]]*)\]")

# What was sent under one name: (key within brackets or None, value), in order.
Sent = Sequence[tuple[str | None, str]]


@dataclass(frozen=True)
class SpeechRequest:
    """A request whose every parameter has been checked."""

    model: LoadedModel
    options: TranscriptionOptions
    response_format: str
    granularities: frozenset[str]
    stream: bool

    @property
    def processor(self) -> SpeechProcessor:
        return cast(SpeechProcessor, self.model.processor)


@dataclass(frozen=True)
class Parameter:
    """One form field. read: what was sent → its value; raises FieldError. schema: its OpenAPI description."""

    name: str
    read: Callable[[Sent], Any]
    schema: Mapping[str, Any]


def _one(read: Callable[[str], Any]) -> Callable[[Sent], Any]:
    """Reads a field that may be sent once."""

    def reader(sent: Sent) -> Any:
        values = {value for key, value in sent if key is None}
        if len(values) != 1:
            raise FieldError("must be sent once" if values else "must be a single value")
        return read(values.pop())

    return reader


def _many(sent: Sent) -> list[str]:
    """Reads a list: `name[]` or `name` repeated, a JSON list, or a comma-separated one."""
    return [item for _, value in sent for item in fields.items(value) if not fields.absent(item)]


def _granularities(sent: Sent) -> frozenset[str]:
    read = fields.choice(GRANULARITIES)
    return frozenset(read(item) for item in _many(sent))


def _clip_times(sent: Sent) -> tuple[float, ...]:
    return fields.clip_times(",".join(_many(sent)))


def _chunking(sent: Sent) -> ChunkingStrategy:
    parts = {key: value for key, value in sent if key}
    return fields.server_vad(parts) if parts else _one(fields.chunking)(sent)


def _unsupported(why: str) -> Callable[[Sent], Any]:
    def reader(_sent: Sent) -> Any:
        raise FieldError(f"is not supported{why}")

    return reader


_NO_DIARIZATION = _unsupported(": no model here tells speakers apart")


def _schema(kind: str, description: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "description": description, **more}


_REFUSED = _schema("array", "Not supported.", items={"type": "string"}, maxItems=0)
_EIGHT = {"minimum": 1, "maximum": 8, "default": 1}


def _flag(name: str, description: str, default: bool = True) -> Parameter:
    return Parameter(name, _one(fields.boolean), _schema("boolean", description, default=default))


def _text(name: str, description: str) -> Parameter:
    return Parameter(name, _one(fields.text), _schema("string", description))


PARAMETERS = (
    _text("language", "Spoken language, e.g. en; detected if absent."),
    _text("prompt", "Text that precedes the audio; its tail is used."),
    Parameter(
        "response_format",
        _one(fields.choice(RESPONSE_FORMATS)),
        _schema("string", "Format of the answer.", enum=list(RESPONSE_FORMATS), default="json"),
    ),
    Parameter(
        "temperature",
        _one(fields.number(0, 1)),
        _schema("number", "0 is greedy; raised by itself on failure.", minimum=0, maximum=1, default=0),
    ),
    Parameter(
        "timestamp_granularities",
        _granularities,
        _schema("array", "word needs verbose_json.", items={"type": "string", "enum": list(GRANULARITIES)}),
    ),
    Parameter("include", _unsupported(": this server returns no logprobs"), _REFUSED),
    _flag("stream", "Send text as it is found.", default=False),
    Parameter(
        "chunking_strategy",
        _chunking,
        _schema("string", 'Cut at silences and decode the pieces together: "auto" or a server_vad object.'),
    ),
    Parameter("known_speaker_names", _NO_DIARIZATION, _REFUSED),
    Parameter("known_speaker_references", _NO_DIARIZATION, _REFUSED),
    Parameter("languages", _unsupported(": send one language"), _REFUSED),
    Parameter("keywords", _unsupported(": send hotwords"), _REFUSED),
    _flag("vad_filter", "Skip what is not speech."),
    _flag("condition_on_previous_text", "Show each window the text before it."),
    _flag("temperature_fallback", "Retry failed windows at higher temperatures."),
    Parameter(
        "beam_size", _one(fields.integer(1, 8)), _schema("integer", "Beams at temperature 0.", **_EIGHT)
    ),
    Parameter(
        "best_of", _one(fields.integer(1, 8)), _schema("integer", "Samples above temperature 0.", **_EIGHT)
    ),
    _text("hotwords", "Words to expect; shown before every window."),
    Parameter(
        "clip_timestamps",
        _clip_times,
        _schema("string", "Stretches to transcribe, in seconds: start,end,start,end…"),
    ),
    Parameter(
        "hallucination_silence_threshold",
        _one(fields.number(0, math.inf)),
        _schema("number", "Skip silences longer than this many seconds around invented text.", minimum=0),
    ),
    Parameter(
        "seed",
        _one(fields.integer(0, fields.MAX_SEED)),
        _schema("integer", "Seed of sampling.", minimum=0, maximum=fields.MAX_SEED, default=0),
    ),
)
_KNOWN = frozenset(parameter.name for parameter in PARAMETERS)
# Read here, and not passed on to the model as options of the same name.
_OWN = frozenset({"response_format", "timestamp_granularities", "stream", "chunking_strategy"})


def form_schema(task: Task) -> dict[str, Any]:
    """OpenAPI schema of the multipart body."""
    properties: dict[str, Any] = {
        "file": {"type": "string", "format": "binary", "description": "Audio or video, any common format."},
        "model": _schema("string", "A loaded model's name or alias."),
    }
    for parameter in PARAMETERS:
        name = parameter.name + "[]" if parameter.schema["type"] == "array" else parameter.name
        properties[name] = dict(parameter.schema)
    return {"title": task, "type": "object", "required": ["file", "model"], "properties": properties}


def _sent(form: Form) -> dict[str, list[tuple[str | None, str]]]:
    """Groups fields by name: `a`, `a[]`, `a[0]` and `a[key]` are all `a`."""
    found: dict[str, list[tuple[str | None, str]]] = {}
    for name, value in form.fields:
        bracketed = _BRACKETED.fullmatch(name)
        base, key = (bracketed[1], bracketed[2]) if bracketed else (name, None)
        found.setdefault(base, []).append((None if key is not None and _is_index(key) else key, value))
    return found


def _is_index(key: str) -> bool:
    return key == "" or key.isdecimal()


def read_request(form: Form, task: Task, names: ModelNames) -> SpeechRequest:
    """Checks everything but the media. Raises ApiError; of several faults always the same one first."""
    sent = _sent(form)
    if form.file is None:
        raise errors.invalid("file", "The form has no file.")
    named = {value.strip() for _, value in sent.pop("model", ()) if not fields.absent(value)}
    if len(named) != 1:
        raise errors.invalid("model", "Send one model only." if named else "The form has no model.")
    model = names.resolve(named.pop())
    names.require(model, "transcription" if task == "transcribe" else "translation")
    values: dict[str, Any] = {}
    for parameter in PARAMETERS:
        given = [pair for pair in sent.get(parameter.name, ()) if not fields.absent(pair[1])]
        if given:
            values[parameter.name] = _read(parameter, given)
            if parameter.name == "language":
                values["language"] = _language(model, values["language"])
    unknown = sorted(set(sent) - _KNOWN)
    if unknown:
        logger.info("ignored unknown form fields: %s", ", ".join(map(errors.shown, unknown[:10])))
    return _checked(model, task, values)


def _read(parameter: Parameter, given: Sent) -> Any:
    try:
        return parameter.read(given)
    except FieldError as error:
        code = "unsupported_value" if parameter.name in ("response_format", "include") else "invalid_value"
        raise errors.invalid(parameter.name, f"{parameter.name} {error}.", code) from None


def _language(model: LoadedModel, language: str) -> str:
    try:
        return cast(SpeechProcessor, model.processor).resolve_language(language.strip())
    except OptionError as error:
        raise errors.invalid_language(str(error)) from None


def _checked(model: LoadedModel, task: Task, values: dict[str, Any]) -> SpeechRequest:
    """Checks what parameters say together."""
    response_format = values.get("response_format", "json")
    granularities = values.get("timestamp_granularities") or frozenset({"segment"})
    stream = values.get("stream", False)
    if "word" in granularities and response_format != "verbose_json":
        raise errors.invalid(
            "timestamp_granularities", "timestamp_granularities[]=word needs response_format=verbose_json."
        )
    if "word" in granularities and task == "translate":
        raise errors.invalid("timestamp_granularities", "Translations have no word times.")
    if stream and task == "translate":
        raise errors.invalid("stream", "Translations cannot be streamed.")
    if stream and response_format not in STREAMABLE_FORMATS:
        raise errors.invalid("stream", f"stream does not go with response_format={response_format}.")
    options = TranscriptionOptions(
        task=task,
        word_timestamps="word" in granularities,
        chunking=values.get("chunking_strategy"),
        **{name: value for name, value in values.items() if name not in _OWN},
    )
    return SpeechRequest(model, options, response_format, frozenset(granularities), stream)
