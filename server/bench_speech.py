"""`sensorium bench speech`: audio seconds per second of transcription, beside faster-whisper."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from ..engine.config import EngineConfig
from ..models import store
from ..models.weights import detect_format
from ..processors.audio import SAMPLE_RATE
from .bench_corpus import can_count_errors, default_recordings, read_recordings, word_error_rate, work_list
from .bench_faster_whisper import BATCH_SIZE, FasterWhisperRunner
from .bench_ours import OurRunner
from .bench_rounds import BenchUsage, Results, Settings, Variant, run_rounds
from .bench_rows import Report, make_figures, make_rows
from .bench_task import Recording, SpeechTask
from .bench_worker import start_worker

SUMMARY = "audio seconds transcribed per second"
PEERS: tuple[str, ...] = ("faster-whisper",)
PACKAGES: tuple[str, ...] = ("faster-whisper", "ctranslate2")
UNIT = "audio s/s"

LENGTHS = (3, 5, 8, 11, 20, 30, 45, 60, 120, 180)  # seconds
QUICK_LENGTHS = (3, 11, 20)
THREADS_PER_WORKER = 2  # of faster-whisper, with several clients
COMPUTE_TYPES = ("int8", "float32")
MAX_CLIENTS = 64
MIN_LENGTH, MAX_LENGTH = 1, 7200  # seconds
NOTES = (
    "Both sides get the same samples, already decoded; spectrogram and language detection are timed. Greedy, "
    "no voice detection.",
    "sensorium and faster-whisper sequential: timestamps, temperature fallback, conditioned on the text "
    "before. Its batched pipeline: clips of 30 s, without these, as is its default.",
    "Before each round the lowest bit of one sample a second is changed, so that nothing cached is of use.",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("files", nargs="*", type=Path, metavar="FILE", help="recordings (default: SENSORIUM_MEDIA/audio)")
    add(
        "--lengths",
        type=_lengths,
        metavar="SECONDS,…",
        help=f"join recordings to files of about these lengths (default: {_listed(LENGTHS)}; "
        f"{_listed(QUICK_LENGTHS)} with --quick)",
    )
    add("--model", help="model to measure (default: the first embedded one)")
    add(
        "--clients",
        type=_clients,
        default=(1, 8),
        metavar="N,…",
        help="files under way at once, each number measured by itself (default: 1,8)",
    )


def _listed(numbers: Sequence[float]) -> str:
    return ",".join(f"{number:g}" for number in numbers)


def _lengths(value: str) -> tuple[float, ...]:
    try:
        lengths = tuple(float(part) for part in value.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{value!r} is not a list of seconds") from None
    if not all(MIN_LENGTH <= length <= MAX_LENGTH for length in lengths):
        raise argparse.ArgumentTypeError(f"a length is from {MIN_LENGTH} to {MAX_LENGTH} seconds")
    return lengths


def _clients(value: str) -> tuple[int, ...]:
    try:
        counts = tuple(dict.fromkeys(int(part) for part in value.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{value!r} is not a list of whole numbers") from None
    if not all(1 <= count <= MAX_CLIENTS for count in counts):
        raise argparse.ArgumentTypeError(f"a number of clients is from 1 to {MAX_CLIENTS}")
    return counts


def run(args: argparse.Namespace, settings: Settings) -> Report:
    """Raises BenchUsage, BenchFailed, ModelError."""
    against = "faster-whisper" in settings.against
    if against and find_spec("faster_whisper") is None:
        hint = "pip install 'sensorium[bench]', or leave it out with --against none"
        raise BenchUsage(f"faster-whisper is not installed: {hint}")
    found = read_recordings(args.files) if args.files else default_recordings(_media_folder())
    lengths = args.lengths or (QUICK_LENGTHS if settings.quick else LENGTHS)
    recordings = work_list(found, lengths)
    name = args.model or store.default_models()[0]
    model = store.resolve(name)
    if against and detect_format(model) != "ctranslate2":
        raise BenchUsage(f"faster-whisper needs a CTranslate2 model, {name} is none: use --against none")

    variants = make_variants(model, recordings, args.clients, settings.threads, against)
    start = partial(start_worker, threads=settings.threads)
    results = run_rounds(variants, settings.rounds, start, settings.tell)
    return make_report(name, variants, results, recordings, settings)


def _media_folder() -> Path:
    configured = os.environ.get("SENSORIUM_MEDIA")
    if not configured:
        raise BenchUsage("name FILEs to transcribe, or set SENSORIUM_MEDIA to a folder with audio/INDEX.tsv")
    return Path(configured) / "audio"


def make_variants(
    model: Path, recordings: tuple[Recording, ...], clients: Sequence[int], threads: int, against: bool
) -> list[Variant]:
    """For each number of clients ours, then every way of faster-whisper."""
    variants = []
    for count in clients:
        task = SpeechTask(recordings, SAMPLE_RATE, count)
        work = f"speech, {count} client{'s' if count > 1 else ''}"
        config = EngineConfig(threads=threads)
        variants.append(Variant("sensorium", work, True, OurRunner(model, config, task)))
        if against:
            variants += [Variant(_name(peer), work, False, peer) for peer in _peers(model, threads, task)]
    return variants


def _peers(model: Path, threads: int, task: SpeechTask) -> list[FasterWhisperRunner]:
    peers = []
    for compute_type in COMPUTE_TYPES:
        # Callers in several threads run in parallel if there are several workers; on two threads one worker
        # measures as fast as two of one thread each.
        workers = max(1, min(task.clients, threads // THREADS_PER_WORKER))
        ways = (False, True) if task.clients > 1 else (False,)
        peers += [
            FasterWhisperRunner(model, compute_type, batched, workers, threads // workers, task)
            for batched in ways
        ]
    return peers


def _name(peer: FasterWhisperRunner) -> str:
    way = f"batched {BATCH_SIZE}" if peer.batched else "sequential"
    return f"faster-whisper {peer.compute_type}, {way}"


def make_report(
    model: str,
    variants: Sequence[Variant],
    results: Results,
    recordings: Sequence[Recording],
    settings: Settings,
) -> Report:
    """variants and results as `run_rounds` has them; recordings: the work list."""
    lengths = [len(one.samples) / SAMPLE_RATE for one in recordings]
    about = (
        f"Model {model}; threads: {settings.threads}; files: {len(recordings)} of {min(lengths):.0f} to "
        f"{max(lengths):.0f} s, {sum(lengths):.0f} s in all; rounds: {settings.rounds} after a warm-up."
    )
    notes = [about, *NOTES]
    if not can_count_errors():
        notes.append("Word errors are not counted: jiwer, which the bench extra installs, is absent.")
    return Report(
        "speech",
        UNIT,
        make_rows(variants, results, {}),
        make_figures(
            variants, results, lambda rounds: word_error_rate(recordings, [one.outputs for one in rounds])
        ),
        {
            "model": model,
            "threads": settings.threads,
            "rounds": settings.rounds,
            "quick": settings.quick,
            "file_seconds": [round(length, 2) for length in lengths],
        },
        notes,
    )
