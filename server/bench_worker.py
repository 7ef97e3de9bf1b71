"""A process that measures one variant: thread pools, memory and libraries of one never meet those of another.

It is driven over its standard input and output, in pickles: first a runner, then numbers of rounds; each is
answered by ("ready" | "done" | "failed", value). The end of its input ends it.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from .bench_rounds import BenchFailed, Measurement, Variant

# Every pool of threads that numpy and the systems under test may make reads one of these when it is loaded.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class WorkerProcess:
    """The near end of a measuring process."""

    def __init__(self, variant: Variant, process: subprocess.Popen[bytes]) -> None:
        self._label = variant.label
        self._process = process

    def run(self, number: int) -> Measurement:
        """Raises BenchFailed."""
        self.send(number)
        measured: Measurement = self.receive("done")
        return measured

    def send(self, message: Any) -> None:
        assert self._process.stdin is not None
        try:
            pickle.dump(message, self._process.stdin)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def receive(self, expected: str) -> Any:
        assert self._process.stdout is not None
        try:
            kind, value = pickle.load(self._process.stdout)
        except EOFError:
            raise self._ended() from None
        if kind != expected:
            raise BenchFailed(f"{self._label}: {value}")
        return value

    def _ended(self) -> BenchFailed:
        return BenchFailed(f"{self._label}: the process ended with {self._process.wait()}")


@contextmanager
def start_worker(variant: Variant, threads: int) -> Iterator[WorkerProcess]:
    """A process with the variant loaded; it ends with the block. Raises BenchFailed."""
    command = [sys.executable, "-P", "-m", __name__]
    environment = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, str(threads))}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            worker = WorkerProcess(variant, process)
            worker.send(variant.runner)
            worker.receive("ready")
            yield worker
        finally:
            process.kill()


def peak_rss() -> int:
    """Most bytes that this process has held in memory. (getrusage would count its parent before exec.)"""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """The far end: opens the runner and does rounds until the input ends."""

    def reply(kind: str, value: Any) -> None:
        pickle.dump((kind, value), replies)
        replies.flush()

    try:
        session = pickle.load(requests).open()
        reply("ready", None)
        while True:
            try:
                number = pickle.load(requests)
            except EOFError:
                return
            reply("done", session.run(number))
    except Exception as error:
        reply("failed", f"{type(error).__name__}: {error}")


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the near end ends this process
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not mix with the replies
    serve(sys.stdin.buffer, replies)


if __name__ == "__main__":
    main()
