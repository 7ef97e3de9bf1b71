"""Where the engine's time goes: seconds and counts, added up since its start."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class EngineMetrics:
    """Written by the engine's thread, read by any.

    Stages: schedule, encode (encoder and cross pages), prefill and decode (forward passes with and without
    more than one token of a sequence), sample (from logits to tokens, text and finished requests).
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.steps: Counter[str] = Counter()
        self.prompt_tokens = 0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - started
            self.steps[name] += 1

    def snapshot(self) -> dict[str, float]:
        """stage_<name>_seconds and stage_<name>_steps, and tokens."""
        seconds = {f"stage_{name}_seconds": value for name, value in list(self.seconds.items())}
        steps = {f"stage_{name}_steps": float(value) for name, value in list(self.steps.items())}
        return {
            **seconds,
            **steps,
            "prompt_tokens": self.prompt_tokens,
        }
