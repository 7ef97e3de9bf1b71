"""POST /v1/audio/transcriptions and /v1/audio/translations."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from ..engine.engine import EngineDead, ProgramAborted, ProgramFailed, ProgramRun, UnknownModel
from ..models.speech import OptionError, Task, Transcription
from ..processors import media as decoder
from ..processors.audio import SAMPLE_RATE
from . import errors, formats, sse
from .config import MIB, MIN_AUDIO_SECONDS, ServerConfig
from .context import Context, context_of
from .disconnect import unless_gone
from .errors import ApiError
from .media import Form, read_form
from .protocol import SpeechRequest, form_schema, read_request

logger = logging.getLogger(__name__)
router = APIRouter(prefix="/v1/audio", tags=["audio"])


def _documented(task: Task) -> dict[str, Any]:
    """Keyword arguments of a route: what its OpenAPI entry says."""
    body = {"required": True, "content": {"multipart/form-data": {"schema": form_schema(task)}}}
    text = {"schema": {"type": "string"}}
    answers: dict[str, Any] = {formats.JSON_TYPE: {"schema": {"type": "object"}}, "text/plain": text}
    if task == "transcribe":
        answers["text/event-stream"] = text
    responses = {200: {"description": "The text, in the format asked for.", "content": answers}}
    return {"openapi_extra": {"requestBody": body}, "responses": responses}


@router.post("/transcriptions", **_documented("transcribe"))
async def transcriptions(request: Request) -> Response:
    return await _serve(request, "transcribe")


@router.post("/translations", **_documented("translate"))
async def translations(request: Request) -> Response:
    return await _serve(request, "translate")


async def _serve(request: Request, task: Task) -> Response:
    context = context_of(request)
    context.require_engine()
    context.queue.check()
    with ExitStack() as resources:
        wanted, run = await _start(request, context, task, resources)
        if wanted.stream:
            return sse.EventStream(_events(run), resources.pop_all(), context.config.stream_stall_seconds)
        with _engine_errors():
            result: Transcription = await unless_gone(request.receive, run.result())
    language = wanted.processor.languages.get(result.language, result.language)
    body = formats.render(result, wanted.response_format, language, wanted.granularities)
    return Response(body, headers={"content-type": formats.media_type(wanted.response_format)})


async def _start(
    request: Request, context: Context, task: Task, resources: ExitStack
) -> tuple[SpeechRequest, ProgramRun]:
    """Receives, checks and decodes the request and gives its work to the engine. What it holds from then on
    is in `resources`."""
    config = context.config
    with context.uploads.holding() as upload:
        form = await read_form(request, config.max_upload_mb * MIB, config.upload_stall_seconds, upload)
        wanted = read_request(form, task, context.names)
        resources.enter_context(context.queue.slot())
        held = resources.enter_context(context.decoded.holding())

        async def decode() -> np.ndarray:
            async with context.decoding:
                samples = await context.workers.call(_decode, form, config)
                await held.take(samples.nbytes)
                return samples

        samples = await unless_gone(request.receive, decode())

    with _engine_errors():
        prepare = context.workers.call(wanted.processor.transcription, samples, wanted.options)
        program = await unless_gone(request.receive, prepare)
        run = context.engine.run(wanted.model.name, program)
    resources.callback(run.abort)
    seconds = len(samples) / SAMPLE_RATE
    name, kind = wanted.model.name, wanted.response_format
    logger.info("task=%s model=%s seconds=%.2f format=%s", task, name, seconds, kind)
    return wanted, run


def _decode(form: Form, config: ServerConfig) -> np.ndarray:
    """float32 [samples], 16 kHz mono; the upload's bytes are let go. Raises ApiError."""
    file, form.file = form.file, None
    assert file is not None
    limits = decoder.MediaLimits(max_seconds=config.max_audio_seconds, max_bytes=config.max_upload_mb * MIB)
    try:
        audio = decoder.decode_audio(file, limits)
    except decoder.MediaTooLong:
        message = f"The audio is longer than the {limits.max_seconds:g} seconds that this server accepts."
        raise ApiError(413, message, param="file", code="audio_too_long") from None
    except decoder.MediaTooLarge:
        raise errors.content_too_large(limits.max_bytes, len(file)) from None
    except decoder.EmptyMedia:
        raise errors.invalid("file", "The file holds no audio samples.", "audio_too_short") from None
    except decoder.NoAudioStream:
        raise errors.invalid("file", "The file has no audio track.", "no_audio") from None
    except decoder.UndecodableMedia:
        raise errors.undecodable() from None
    if audio.duration < MIN_AUDIO_SECONDS:
        message = f"Audio file is too short. Minimum audio length is {MIN_AUDIO_SECONDS} seconds."
        raise errors.invalid("file", message, "audio_too_short")
    return audio.samples


@contextmanager
def _engine_errors() -> Iterator[None]:
    """Says what went wrong in the API's terms."""
    try:
        yield
    except OptionError as error:
        raise errors.invalid(error.param, str(error), "invalid_value") from None
    except UnknownModel as error:
        raise errors.model_not_found(str(error)) from None  # unloaded since it was looked up
    except (EngineDead, ProgramAborted) as error:
        # Aborted by the engine, which is shutting down: a client's leaving ends the wait before this.
        raise errors.unavailable() from error
    except ProgramFailed as error:
        if isinstance(error.__cause__, OptionError):
            raise errors.invalid(error.__cause__.param, str(error.__cause__), "invalid_value") from None
        logger.exception("a transcription failed")
        raise errors.internal() from error


async def _events(run: ProgramRun) -> AsyncIterator[bytes]:
    """The text in deltas as windows finish, the whole text, [DONE]; an error event ends the stream early."""
    text = sse.DeltaText()
    try:
        with _engine_errors():
            async for progress in run.events():
                delta = text.push(formats.clean("".join(s.text for s in progress.segments)))
                if delta:
                    yield sse.event({"type": "transcript.text.delta", "delta": delta})
            result: Transcription = await run.result()
    except ApiError as error:
        yield sse.event(error.body())
        return
    except Exception:
        logger.exception("a stream failed")
        yield sse.event(errors.internal().body())
        return
    if text.text != formats.final_text(result):
        logger.error("the streamed text differs from the result's")
    yield sse.event({"type": "transcript.text.done", "text": text.text, "usage": formats.usage(result)})
    yield sse.DONE
