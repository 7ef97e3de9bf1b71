"""The work of the speech benchmark, shared by all who do it; imports nothing that one of them might not."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from .bench_rounds import WARM_UP, Measurement
from .bench_worker import peak_rss

WARM_UP_SECONDS = 15.0  # of audio, at most, unless the shortest recording is longer
LOWEST_BIT = np.float32(1 / 32768)


@dataclass(frozen=True, eq=False)
class Recording:
    """samples: float32 [n], mono in [-1, 1). text: what is said in it, None if that is not known."""

    name: str
    samples: np.ndarray
    text: str | None = None


@dataclass(frozen=True, eq=False)
class SpeechTask:
    """Recordings, in the order in which clients take them, and how many clients there are."""

    recordings: tuple[Recording, ...]
    sample_rate: int
    clients: int

    def measure(self, number: int, transcribe: Callable[[np.ndarray], str]) -> Measurement:
        """Transcribes everything once; each client takes the next recording as soon as it is done with one.

        transcribe: samples → text; it is called from `clients` threads. The warm-up takes short recordings.
        """
        chosen = self._warm_up() if number == WARM_UP else self.recordings
        audio = [vary(recording.samples, self.sample_rate, number) for recording in chosen]
        with ThreadPoolExecutor(self.clients, thread_name_prefix="client") as clients:
            start, cpu_start = time.perf_counter(), time.process_time()
            texts = tuple(clients.map(transcribe, audio))
            seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        amount = sum(len(samples) for samples in audio) / self.sample_rate
        return Measurement(amount, seconds, cpu_seconds, texts, peak_rss())

    def _warm_up(self) -> list[Recording]:
        chosen: list[Recording] = []
        left = WARM_UP_SECONDS * self.sample_rate
        for recording in sorted(self.recordings, key=lambda one: len(one.samples)):
            left -= len(recording.samples)
            if chosen and left < 0:
                break
            chosen.append(recording)
        return chosen


def vary(samples: np.ndarray, sample_rate: int, number: int) -> np.ndarray:
    """The same sound with one sample in every second changed by its lowest bit, another one each round.

    Nobody hears it, but nothing that was cached by content in an earlier round is found again.
    """
    varied = samples.copy()
    changed = varied[number % sample_rate :: sample_rate]
    changed += np.where(changed < 0, LOWEST_BIT, -LOWEST_BIT)
    return varied
