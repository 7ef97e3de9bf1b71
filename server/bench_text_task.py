"""The work of the text benchmark, shared by all who do it; imports nothing that one of them might not."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from .bench_rounds import WARM_UP, Measurement
from .bench_worker import peak_rss

Prompt = tuple[int, ...]  # token ids
WARM_UP_TOKENS = 16  # of each stream, at most


@dataclass(frozen=True)
class Moment:
    """A point in time. clock: seconds. cpu: seconds of all threads of this process together."""

    clock: float
    cpu: float

    @classmethod
    def now(cls) -> Moment:
        return cls(time.perf_counter(), time.process_time())


class Generate(Protocol):
    """A system's way to continue a prompt greedily; called from several threads."""

    def __call__(self, prompt: Prompt, num_tokens: int, reuse: bool, arrived: Callable[[], None]) -> str:
        """Returns the text of exactly so many tokens, and calls `arrived` as each of them comes.

        reuse: what is kept of earlier prompts that began alike may be used.
        """


@dataclass(frozen=True)
class PromptTask:
    """The time until a prompt's first token; its unit is prompt tokens.

    prompts: of each round, the warm-up first. With reuse there is one: the warm-up computes it, rounds find it
    kept.
    """

    prompts: tuple[Prompt, ...]
    reuse: bool
    streams = 1

    @property
    def context(self) -> int:
        return max(map(len, self.prompts)) + 1

    def measure(self, number: int, generate: Generate) -> Measurement:
        prompt = self.prompts[0 if self.reuse else number]
        arrivals: list[Moment] = []
        start = Moment.now()
        text = generate(prompt, 1, self.reuse, lambda: arrivals.append(Moment.now()))
        return _measurement(len(prompt), start, arrivals[0], (text,))


@dataclass(frozen=True)
class StreamTask:
    """Tokens a second of streams that are under way together: counted from the moment when all have their
    first token until the first of them ends, so that no prompt is in it.

    prompts: of each round (the warm-up first) one a stream.
    """

    prompts: tuple[tuple[Prompt, ...], ...]
    num_tokens: int

    @property
    def streams(self) -> int:
        return len(self.prompts[0])

    @property
    def context(self) -> int:
        return max(len(prompt) for prompts in self.prompts for prompt in prompts) + self.num_tokens

    def measure(self, number: int, generate: Generate) -> Measurement:
        """Raises ValueError if the streams were not under way together."""
        prompts = self.prompts[number]
        num_tokens = min(self.num_tokens, WARM_UP_TOKENS) if number == WARM_UP else self.num_tokens
        arrivals: list[list[Moment]] = [[] for _ in prompts]

        def follow(stream: int) -> str:
            moments = arrivals[stream]
            return generate(prompts[stream], num_tokens, False, lambda: moments.append(Moment.now()))

        with ThreadPoolExecutor(self.streams, thread_name_prefix="stream") as threads:
            texts = tuple(threads.map(follow, range(self.streams)))
        start, end, count = common_time(arrivals)
        return _measurement(count, start, end, texts)


Task = PromptTask | StreamTask


def common_time(arrivals: Sequence[Sequence[Moment]]) -> tuple[Moment, Moment, int]:
    """When the last stream began, when the first one ended, and the tokens that came between.

    Raises ValueError if one ended before another began.
    """
    start = max((moments[0] for moments in arrivals), key=lambda moment: moment.clock)
    end = min((moments[-1] for moments in arrivals), key=lambda moment: moment.clock)
    if end.clock <= start.clock:
        raise ValueError("a stream ended before another began: ask for more --tokens")
    count = sum(start.clock < moment.clock <= end.clock for moments in arrivals for moment in moments)
    return start, end, count


def _measurement(amount: int, start: Moment, end: Moment, texts: tuple[str, ...]) -> Measurement:
    return Measurement(amount, end.clock - start.clock, end.cpu - start.cpu, texts, peak_rss())
