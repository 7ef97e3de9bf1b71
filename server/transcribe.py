"""`sensorium transcribe`: files to text, without a server."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ..engine.config import ConfigError, EngineConfig
from ..engine.engine import Engine
from ..models import store
from ..models.base import ModelError
from ..models.speech import ChunkingStrategy, OptionError, SpeechProcessor, TranscriptionOptions
from . import exits, fields, flags, logs
from .batch import FORMATS, Batch, Job, Meter, Output
from .config import ServerConfig
from .fields import MAX_SEED, FieldError
from .loading import start_engine
from .outputs import FolderOutput, StreamOutput

FILES_AT_ONCE = 8


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Adds the `transcribe` command; `run` takes what it parses."""
    summary = "transcribe audio and video files without a server"
    parser = subparsers.add_parser("transcribe", help=summary, description=summary)
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help="audio or video file; - reads standard input")
    add("--model", help="model to use (default: the first embedded one)")
    names = ", ".join(FORMATS)
    add("--format", default=["txt"], type=_formats, metavar="FORMAT,…", help=f"one or more of {names}")
    add("--output", type=Path, metavar="DIR", help="folder for the results (default: standard output)")
    add("--language", help="spoken language, e.g. en (default: detected)")
    add("--task", choices=("transcribe", "translate"), default="transcribe", help="translate: into English")
    add("--prompt", help="text that precedes the audio")
    add("--hotwords", help="words to expect")
    add("--temperature", type=_argument(fields.number(0, 1)), default=0.0, help="0 to 1 (default: 0)")
    add("--no-temperature-fallback", action="store_true", help="never retry at a higher temperature")
    eight = _argument(fields.integer(1, 8))
    add("--beam-size", type=eight, default=1, metavar="N", help="1 to 8, at temperature 0 (default: 1)")
    add("--best-of", type=eight, default=1, metavar="N", help="1 to 8, above temperature 0 (default: 1)")
    add("--word-timestamps", action="store_true", help="times of words, in verbose_json")
    add("--chunking", choices=("auto", "none"), default="none", help="auto: stretches of speech together")
    add("--no-vad", action="store_true", help="do not skip what is not speech")
    add("--no-condition-on-previous-text", action="store_true", help="decode every window by itself")
    clips = _argument(fields.clip_times)
    add("--clip-timestamps", type=clips, default=(), metavar="START,END,…", help="seconds to transcribe")
    seconds = _argument(fields.number(0, math.inf))
    add("--hallucination-silence-threshold", type=seconds, metavar="SECONDS", help="see the API")
    add(
        "--seed", type=_argument(fields.integer(0, MAX_SEED)), default=0, metavar="N", help="seed of sampling"
    )
    add("--verbose", action="store_true", help="show the log")
    add(
        "--max-audio-seconds",
        type=_argument(fields.number(0.1, math.inf)),
        default=ServerConfig.max_audio_seconds,
        metavar="SECONDS",
        help="longest audio that is decoded (default: %(default)g)",
    )
    flags.add_flags(parser, EngineConfig, "engine")
    return parser


def _argument(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """A form field's reader as an argparse type."""

    def convert(value: str) -> Any:
        try:
            return read(value)
        except FieldError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def _formats(value: str) -> list[str]:
    found = list(dict.fromkeys(item.strip() for item in value.split(",")))
    unknown = [item for item in found if item not in FORMATS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown format {unknown[0]!r}; known are {', '.join(FORMATS)}")
    return found


def run(args: argparse.Namespace) -> int:
    """Transcribes every file. Returns the exit code."""
    logs.configure("info" if args.verbose else "critical")
    return transcribe(args, start_engine)


def transcribe(args: argparse.Namespace, start: Callable[[EngineConfig, Sequence[str]], Engine]) -> int:
    """`run` with an engine of one's own. start: makes a started engine with the named models."""
    if args.output is None and len(args.format) > 1:
        return _refuse("several formats need --output", exits.USAGE)
    if args.output is not None and args.output.exists() and not args.output.is_dir():
        return _refuse(f"--output: {args.output} is not a folder", exits.USAGE)
    try:
        engine_config = flags.from_args(EngineConfig, args)
        engine = start(engine_config, [args.model or store.default_models()[0]])
    except ConfigError as error:
        return _refuse(str(error), exits.USAGE)
    except ModelError as error:
        return _refuse(str(error), exits.UNAVAILABLE)
    try:
        return _transcribe(engine, args)
    finally:
        engine.shutdown(drain=False)


def _refuse(message: str, code: int) -> int:
    print(f"sensorium transcribe: {message}", file=sys.stderr)
    return code


def _transcribe(engine: Engine, args: argparse.Namespace) -> int:
    model = engine.models()[0]
    needed = "transcription" if args.task == "transcribe" else "translation"
    if needed not in model.processor.info.capabilities:
        return _refuse(f"the model {model.name} does not support {needed}", exits.USAGE)
    try:
        options = _options(args, cast(SpeechProcessor, model.processor))
    except OptionError as error:
        return _refuse(f"--{error.param}: {error}", exits.USAGE)
    files = list(dict.fromkeys(args.files))
    job = Job(model, options, args.format, args.max_audio_seconds, min(FILES_AT_ONCE, len(files)))
    output: Output = FolderOutput(args.output, files) if args.output else StreamOutput(files)
    with _meter(len(files)) as meter:
        return Batch(engine, job, output, meter).run(files)


def _options(args: argparse.Namespace, processor: SpeechProcessor) -> TranscriptionOptions:
    return TranscriptionOptions(
        task=args.task,
        language=processor.resolve_language(args.language) if args.language else None,
        prompt=args.prompt,
        hotwords=args.hotwords,
        temperature=args.temperature,
        temperature_fallback=not args.no_temperature_fallback,
        beam_size=args.beam_size,
        best_of=args.best_of,
        condition_on_previous_text=not args.no_condition_on_previous_text,
        word_timestamps=args.word_timestamps,
        vad_filter=not args.no_vad,
        chunking=ChunkingStrategy() if args.chunking == "auto" else None,
        clip_timestamps=args.clip_timestamps,
        hallucination_silence_threshold=args.hallucination_silence_threshold,
        seed=args.seed,
    )


class _NoMeter:
    """Shows nothing: standard error is not a terminal."""

    def begun(self, name: str, seconds: float) -> None: ...

    def reached(self, name: str, seconds: float) -> None: ...

    def ended(self, name: str) -> None: ...


class _BarMeter:
    """One bar over the seconds of audio of all files decoded so far."""

    def __init__(self, progress: Progress, files: int) -> None:
        self._progress = progress
        self._files = files
        self._finished = 0
        self._lengths: dict[str, float] = {}
        self._reached: dict[str, float] = {}
        self._task = progress.add_task("", total=None, done=0.0, length=0.0, files=f"0/{files}")

    def begun(self, name: str, seconds: float) -> None:
        self._lengths[name] = seconds
        self._show()

    def reached(self, name: str, seconds: float) -> None:
        self._reached[name] = seconds
        self._show()

    def ended(self, name: str) -> None:
        self._finished += 1
        self._reached[name] = self._lengths.get(name, 0.0)
        self._show()

    def _show(self) -> None:
        # Copies: other threads may add to these meanwhile.
        length, done = sum(list(self._lengths.values())), sum(list(self._reached.values()))
        self._progress.update(
            self._task,
            total=length or None,
            completed=done,
            done=done,
            length=length,
            files=f"{self._finished}/{self._files}",
        )


@contextmanager
def _meter(files: int) -> Iterator[Meter]:
    console = Console(stderr=True, soft_wrap=True)  # results on the same terminal keep their lines
    if not console.is_terminal:
        yield _NoMeter()
        return
    columns = (
        SpinnerColumn(),
        BarColumn(),
        TextColumn("{task.fields[done]:.0f}/{task.fields[length]:.0f} s of audio"),
        TextColumn("{task.fields[files]} files"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield _BarMeter(progress, files)
