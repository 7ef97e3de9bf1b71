"""Transcribes files through one engine: several at a time, a bounded number decoded at once."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from ..engine.engine import Engine, EngineDead, LoadedModel, ProgramAborted, ProgramFailed, ProgramRun
from ..models.speech import OptionError, SpeechProcessor, Transcription, TranscriptionOptions
from ..processors import media as decoder
from . import exits, formats
from .config import MIN_AUDIO_SECONDS
from .outputs import STDIN

logger = logging.getLogger(__name__)

FORMATS: Mapping[str, str] = {  # of the command line → of the API
    "txt": "text",
    "srt": "srt",
    "vtt": "vtt",
    "json": "json",
    "verbose_json": "verbose_json",
}


class Output(Protocol):
    """Takes results as they come, in any order, from one thread."""

    def write(self, name: str, results: Mapping[str, bytes]) -> None: ...

    def skip(self, name: str) -> None: ...


class Meter(Protocol):
    """Is told how far each file is, from any thread. Seconds of audio."""

    def begun(self, name: str, seconds: float) -> None: ...

    def reached(self, name: str, seconds: float) -> None: ...

    def ended(self, name: str) -> None: ...


@dataclass(frozen=True)
class Job:
    """What to do with every file. formats: names of the command line."""

    model: LoadedModel
    options: TranscriptionOptions
    formats: Sequence[str]
    max_seconds: float
    parallel: int

    @property
    def processor(self) -> SpeechProcessor:
        return cast(SpeechProcessor, self.model.processor)


class FileError(Exception):
    """A file that could not be transcribed; one line for users."""


class Batch:
    """One run over many files. A file that fails leaves the others alone."""

    def __init__(self, engine: Engine, job: Job, output: Output, meter: Meter) -> None:
        self._engine = engine
        self._job = job
        self._output = output
        self._meter = meter
        self._lock = threading.Lock()
        self._runs: set[ProgramRun] = set()
        self._stopped = False
        self._stdin = b""

    def run(self, files: Sequence[str]) -> int:
        """Transcribes all, writes each result when it is there, reports failures on standard error.

        Returns the exit code. KeyboardInterrupt stops what is under way; what is written stays.
        """
        if STDIN in files:
            # Here, not in a worker: a thread that waits for input could not be ended.
            self._stdin = sys.stdin.buffer.read()
        failed = 0
        executor = ThreadPoolExecutor(self._job.parallel, thread_name_prefix="file")
        try:
            pending: dict[Future[Mapping[str, bytes]], str] = {
                executor.submit(self._transcribe, name): name for name in files
            }
            while pending:
                done, _ = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    failed += not self._finish(pending.pop(future), future)
        except EngineDead:
            self._report("", "the engine has failed")
            return exits.UNAVAILABLE
        finally:
            self._stop()
            executor.shutdown(wait=True, cancel_futures=True)
        if not failed:
            return exits.OK
        return exits.ALL_FAILED if failed == len(files) else exits.SOME_FAILED

    def _finish(self, name: str, future: Future[Mapping[str, bytes]]) -> bool:
        self._meter.ended(name)
        try:
            self._output.write(name, future.result())
            return True
        except FileError as error:
            self._report(name, str(error))
        except (BrokenPipeError, EngineDead):
            raise
        except OSError as error:
            self._report(name, f"cannot write the result: {error.strerror or error}")
        except Exception:
            logger.exception("transcribing a file failed")
            self._report(name, "the transcription failed inside the program; --verbose tells more")
        self._output.skip(name)
        return False

    @staticmethod
    def _report(name: str, message: str) -> None:
        where = f"{'standard input' if name == STDIN else name}: " if name else ""
        print(f"sensorium transcribe: {where}{message}", file=sys.stderr)

    def _transcribe(self, name: str) -> Mapping[str, bytes]:
        """In a worker thread. Raises FileError, EngineDead."""
        job = self._job
        audio = self._decode(name)
        self._meter.begun(name, audio.duration)
        try:
            program = job.processor.transcription(audio.samples, job.options)
            del audio
            run = self._started(self._engine.run(job.model.name, program))
            try:
                for progress in run.iter_events():
                    self._meter.reached(name, progress.seconds)
                result: Transcription = run.wait()
            finally:
                self._runs.discard(run)
        except OptionError as error:
            raise FileError(f"{error.param}: {error}") from error
        except (ProgramFailed, ProgramAborted) as error:
            raise FileError(str(error)) from error
        language = job.processor.languages.get(result.language, result.language)
        granularities = ("segment", "word") if job.options.word_timestamps else ("segment",)
        return {kind: _render(result, kind, language, granularities) for kind in job.formats}

    def _started(self, run: ProgramRun) -> ProgramRun:
        with self._lock:
            self._runs.add(run)
            stopped = self._stopped
        if stopped:
            run.abort()
        return run

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
            runs = list(self._runs)
        for run in runs:
            run.abort()

    def _decode(self, name: str) -> decoder.DecodedAudio:
        if self._stopped:
            raise FileError("interrupted")
        limits = decoder.MediaLimits(max_seconds=self._job.max_seconds, max_bytes=sys.maxsize)
        try:
            source = self._stdin if name == STDIN else Path(name)
            audio = decoder.decode_audio(source, limits)
        except decoder.MediaTooLong as error:
            raise FileError(f"{error} (--max-audio-seconds)") from error
        except decoder.MediaError as error:
            raise FileError(str(error)) from error
        except OSError as error:
            raise FileError(f"cannot read: {error.strerror or error}") from error
        if audio.duration < MIN_AUDIO_SECONDS:
            raise FileError(f"The audio is shorter than {MIN_AUDIO_SECONDS} seconds.")
        return audio


def _render(result: Transcription, kind: str, language: str, granularities: Sequence[str]) -> bytes:
    body = formats.render(result, FORMATS[kind], language, granularities)
    return body if body.endswith(b"\n") else body + b"\n"
