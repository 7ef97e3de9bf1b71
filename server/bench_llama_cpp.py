"""llama.cpp as a peer of the text benchmark, on the same GGUF file; its server, called in this process.

torch stays out of this module: llama.cpp does not use it, and its memory would be counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .bench_rounds import Measurement
from .bench_text_task import Prompt, Task

CONTEXT_UNIT = 256  # llama.cpp rounds a slot's context up to a multiple of this
QUIET = -1


@dataclass(frozen=True)
class LlamaCppRunner:
    """model: path of a GGUF file. Every stream has a slot of its own."""

    model: Path
    threads: int
    task: Task

    def open(self) -> LlamaCppSession:
        # Optional: only the bench extra installs it, and only this process needs it.
        import xllamacpp

        slot = -(-(self.task.context + 1) // CONTEXT_UNIT) * CONTEXT_UNIT
        params = xllamacpp.CommonParams()
        params.model.path = str(self.model)
        params.n_gpu_layers = 0
        params.cpuparams.n_threads = self.threads
        params.cpuparams_batch.n_threads = self.threads
        params.n_parallel = self.task.streams
        params.n_ctx = slot * self.task.streams
        params.cache_ram_mib = 0  # prompts of slots that others take are not set aside, which takes time
        params.verbosity = QUIET
        return LlamaCppSession(xllamacpp.Server(params), self.task)


class LlamaCppSession:
    def __init__(self, server: Any, task: Task) -> None:
        """server: what has xllamacpp.Server's `handle_completions`."""
        self._server = server
        self._task = task

    def run(self, number: int) -> Measurement:
        return self._task.measure(number, self._generate)

    def _generate(self, prompt: Prompt, num_tokens: int, reuse: bool, arrived: Callable[[], None]) -> str:
        """Raises RuntimeError with the server's own words, or if it made another number of tokens."""
        chunks: list[Mapping[str, Any]] = []

        def take(chunk: Mapping[str, Any]) -> bool:
            if _is_token(chunk):
                arrived()
            chunks.append(chunk)
            return False  # go on

        request = {
            "prompt": list(prompt),
            "n_predict": num_tokens,
            "temperature": 0,
            "top_k": 1,
            "ignore_eos": True,
            "cache_prompt": reuse,
            "stream": True,
        }
        self._server.handle_completions(request, take)
        for chunk in chunks:
            if "choices" not in chunk:
                raise RuntimeError(_reason(chunk))
        made = chunks[-1]["usage"]["completion_tokens"]
        if made != num_tokens:
            raise RuntimeError(f"{made} tokens were made where {num_tokens} were asked for")
        return "".join(chunk["choices"][0]["text"] for chunk in chunks)


def _is_token(chunk: Mapping[str, Any]) -> bool:
    """Whether a piece of a stream brings a token; the last one brings the reason of the end."""
    return bool(chunk.get("choices")) and chunk["choices"][0]["finish_reason"] is None


def _reason(chunk: Mapping[str, Any]) -> str:
    error = chunk.get("error", chunk)
    return str(error.get("message", error))
