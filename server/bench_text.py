"""`sensorium bench text`: prompt and output tokens a second, beside llama.cpp."""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from ..engine.config import EngineConfig
from ..models import store
from ..models.gguf import gguf_path
from ..models.text_loader import open_text
from ..models.weights import detect_format
from ..processors.text import TextTokenizer
from .bench_llama_cpp import LlamaCppRunner
from .bench_rounds import BenchUsage, Results, Settings, Variant, run_rounds
from .bench_rows import Report, Row, make_figures, make_rows
from .bench_text_ours import OurTextRunner
from .bench_text_task import Prompt, PromptTask, StreamTask, Task
from .bench_worker import start_worker

SUMMARY = "prompt and output tokens per second of text models"
PEER = "llama.cpp"
PEERS: tuple[str, ...] = (PEER,)
PACKAGES: tuple[str, ...] = ("xllamacpp",)
UNIT = "tokens/s"
MODEL = "smollm2-135m-instruct"
OURS, UNCACHED = "sensorium", "sensorium, not cached"

STREAM_PROMPT = 16  # tokens that every stream begins with
WARM_UP_PROMPT = 64
MAX_PROMPT, MAX_TOKENS, MAX_STREAMS = 100_000, 10_000, 64
NOTES = (
    "Both sides: the same token ids and GGUF file, greedy, no stop token. sensorium computes in float32; "
    "llama.cpp's own file format is what it computes with.",
    "A prompt's tokens/s: its tokens over the time to its first output token. Streams: tokens a second while "
    "all of them are under way, prompts not included. Each round has new prompts.",
    "Cached: the same prompt once more, which each side has kept from before.",
)
WORDS = (
    "water house light morning river story people garden letter music window winter answer little "
    "number question paper summer table village mountain friend market yellow bridge simple quiet "
    "travel kitchen season father doctor island forest silver station engine captain language picture "
    "because before under between always never often where after while about could again every"
)


@dataclass(frozen=True)
class Sizes:
    """Tokens of the long prompt, tokens that each stream makes, and how many streams there are."""

    prompt: int
    tokens: int
    streams: int

    @property
    def names(self) -> Names:
        prompt = f"prompt of {self.prompt:,} tokens"
        streams = f"{self.streams} stream{'s' if self.streams > 1 else ''} of {self.tokens} tokens"
        return Names(prompt, f"1 stream of {self.tokens} tokens", streams, f"{prompt}, cached")


@dataclass(frozen=True)
class Names:
    """What the pieces of work are called."""

    prompt: str
    single: str
    streams: str
    cached: str


DEFAULT_SIZES, QUICK_SIZES = Sizes(2000, 128, 8), Sizes(200, 16, 8)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default=MODEL, help=f"model to measure (default: {MODEL})")
    add(
        "--prompt-tokens",
        type=partial(_count, low=STREAM_PROMPT + 1, high=MAX_PROMPT),
        metavar="N",
        help=f"length of the long prompt (default: {DEFAULT_SIZES.prompt}; {QUICK_SIZES.prompt} with --quick)",
    )
    add(
        "--tokens",
        type=partial(_count, low=2, high=MAX_TOKENS),
        metavar="N",
        help=f"tokens of each stream (default: {DEFAULT_SIZES.tokens}; {QUICK_SIZES.tokens} with --quick)",
    )
    add(
        "--streams",
        type=partial(_count, low=1, high=MAX_STREAMS),
        metavar="N",
        help=f"streams under way at once, besides one alone (default: {DEFAULT_SIZES.streams})",
    )


def _count(value: str, low: int, high: int) -> int:
    if not value.isdecimal() or not low <= int(value) <= high:
        raise argparse.ArgumentTypeError(f"{value!r} is not a whole number from {low} to {high}")
    return int(value)


def run(args: argparse.Namespace, settings: Settings) -> Report:
    """Raises BenchUsage, BenchFailed, ModelError."""
    against = PEER in settings.against
    if against and find_spec("xllamacpp") is None:
        hint = "pip install 'sensorium[bench]', or leave it out with --against none"
        raise BenchUsage(f"llama.cpp (xllamacpp) is not installed: {hint}")
    model = store.resolve(args.model)
    is_gguf = detect_format(model) == "gguf"
    if against and not is_gguf:
        raise BenchUsage(f"llama.cpp needs a GGUF model, {args.model} is none: use --against none")
    usual = QUICK_SIZES if settings.quick else DEFAULT_SIZES
    sizes = Sizes(
        args.prompt_tokens or usual.prompt, args.tokens or usual.tokens, args.streams or usual.streams
    )
    checkpoint = open_text(model)
    longest = max(sizes.prompt + 1, STREAM_PROMPT + sizes.tokens)
    if longest > checkpoint.config["max_position_embeddings"]:
        raise BenchUsage(f"{args.model} cannot hold {longest:,} tokens: use smaller numbers")

    tasks = make_tasks(checkpoint.tokenizer, sizes, settings.rounds)
    file = gguf_path(model) if is_gguf else model
    variants = make_variants(file, tasks, settings.threads, against)
    results = run_rounds(
        variants, settings.rounds, partial(start_worker, threads=settings.threads), settings.tell
    )
    return make_report(args.model, sizes, variants, results, settings)


def make_tasks(tokenizer: TextTokenizer, sizes: Sizes, rounds: int) -> dict[str, Task]:
    """Name of the work → the work. No two prompts begin alike, beyond a token that begins every text."""
    seeds = iter(range(1 << 32))

    def prompts(lengths: Sequence[int]) -> tuple[Prompt, ...]:
        return tuple(write_prompt(tokenizer, length, next(seeds)) for length in lengths)

    def turns(streams: int) -> tuple[tuple[Prompt, ...], ...]:
        return tuple(prompts([STREAM_PROMPT] * streams) for _ in range(rounds + 1))

    names, long = sizes.names, sizes.prompt
    tasks: dict[str, Task] = {
        names.prompt: PromptTask(prompts([min(WARM_UP_PROMPT, long)] + [long] * rounds), reuse=False),
        names.single: StreamTask(turns(1), sizes.tokens),
        names.streams: StreamTask(turns(sizes.streams), sizes.tokens),
        names.cached: PromptTask(prompts([long]), reuse=True),
    }
    return tasks


def write_prompt(tokenizer: TextTokenizer, length: int, seed: int) -> Prompt:
    """Ids of a text of common English words in random order; the seed stands at its start."""

    def words() -> Iterator[str]:
        chance, known = random.Random(seed), WORDS.split()
        yield str(seed)
        while True:
            yield chance.choice(known)

    source = words()
    text = " ".join(next(source) for _ in range(length + 1))  # a word is one token or more
    return tuple(tokenizer.encode_prompt(text)[:length])


def make_variants(model: Path, tasks: dict[str, Task], threads: int, against: bool) -> list[Variant]:
    """For each piece of work ours, then llama.cpp."""
    variants = []
    for work, task in tasks.items():
        config = EngineConfig(threads=threads)
        config = replace(config, max_num_seqs=max(config.max_num_seqs, task.streams))
        variants.append(Variant(OURS, work, True, OurTextRunner(model, config, task)))
        if against:
            variants.append(Variant(PEER, work, False, LlamaCppRunner(model, threads, task)))
    return variants


def make_report(
    model: str, sizes: Sizes, variants: Sequence[Variant], results: Results, settings: Settings
) -> Report:
    """variants and results as `run_rounds` has them. Targets hold for the usual work alone."""
    names = sizes.names
    targets: dict[str, float] = {}
    if sizes == DEFAULT_SIZES and model == MODEL:
        peers = {names.prompt: 2.5, names.single: 1.0, names.streams: 3.0}
        targets = {f"{work}: {PEER}": ratio for work, ratio in peers.items()}
        targets[f"{names.cached}: {UNCACHED}"] = 15.0
    return Report(
        "text",
        UNIT,
        _with_first_token_times(_rows(names, variants, results, targets), sizes),
        make_figures(variants, results, lambda rounds: None),
        {
            "model": model,
            "threads": settings.threads,
            "rounds": settings.rounds,
            "quick": settings.quick,
            "prompt_tokens": sizes.prompt,
            "tokens": sizes.tokens,
            "streams": sizes.streams,
        },
        [
            f"Model {model}; threads: {settings.threads}; rounds: {settings.rounds} after a warm-up.",
            *_first_token_notes(names, variants, results, sizes),
            *NOTES,
        ],
    )


def _rows(
    names: Names, variants: Sequence[Variant], results: Results, targets: dict[str, float]
) -> list[Row]:
    """Every peer's, and the cached prompt beside our own uncached one, which is measured in the same rounds."""
    uncached = next(one for one in variants if one.ours and one.work == names.prompt)
    twin = replace(uncached, name=UNCACHED, work=names.cached, ours=False)
    return make_rows([*variants, twin], {**results, twin.label: results[uncached.label]}, targets)


def _with_first_token_times(rows: Sequence[Row], sizes: Sizes) -> list[Row]:
    """Adds ours_seconds and theirs_seconds, the times to the first token, where the work is a prompt."""
    found = []
    for row in rows:
        if row.name in (sizes.names.prompt, sizes.names.cached):
            theirs = None if row.theirs is None else sizes.prompt / row.theirs
            details = {"ours_seconds": sizes.prompt / row.ours, "theirs_seconds": theirs}
            row = replace(row, details=details)
        found.append(row)
    return found


def _first_token_notes(
    names: Names, variants: Sequence[Variant], results: Results, sizes: Sizes
) -> list[str]:
    parts = []
    for variant in variants:
        if variant.work in (names.prompt, names.cached):
            seconds = statistics.median(one.seconds for one in results[variant.label])
            kind = "cached" if variant.work == names.cached else "not cached"
            parts.append(f"{variant.name} {seconds * 1000:,.0f} ms ({kind})")
    return [f"Time to the first token of {sizes.prompt:,}: {', '.join(parts)}."]
