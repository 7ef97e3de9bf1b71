"""Tries grammars in processes of their own, so that no schema can hold or exhaust the server.

xgrammar compiles in C++ and cannot be interrupted; some short grammars keep it busy for hours. A helper process
loads it once and forks a worker for every job: the worker has a wall-clock alarm and a memory limit, compiles the
grammar, tries it on some tokens, answers, and ends. What has passed is compiled again where it is used: that is
the same bounded work, and several times cheaper than sending the compiled grammar (0.04 s against 0.76 s for an
object of 100 properties). The helper lives as long as the connection to its parent.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from .structured_schema import normalize_schema
from .structured_text import GrammarError, check_text, normalize_regex, parse_document

START_SECONDS = 120.0  # for the helper to load, on a machine that is busy
MEMORY_BYTES = 2 << 30  # that a worker may take beyond what the helper holds
MAX_GRAMMAR_BYTES = 64 << 20  # of a compiled grammar
TRIAL_STEPS = 32
TRIAL_SECONDS = 1.0
STEP_SECONDS = 0.1  # CPU time that masks may take per token on average, in the trial and while decoding

TOO_AMBIGUOUS = "the grammar is too ambiguous: finding the next token takes too long"
_PLACE = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: (?:Check failed: \(.*?\) is false: )?")


class Sandbox:
    """The helper process of one tokenizer. Thread-safe."""

    def __init__(self, tokenizer_info: str, limit_seconds: float) -> None:
        """tokenizer_info: xgrammar's serialisation. limit_seconds: wall time that one grammar may take."""
        self.limit_seconds = limit_seconds
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno()), str(limit_seconds)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # an interrupt of the terminal is the server's business
                env={**os.environ, "OMP_NUM_THREADS": "1"},  # a process that forks must have one thread
            )
        self._finalizer = weakref.finalize(self, _stop, self._control, self._process)
        assert self._process.stdin is not None
        with self._process.stdin as stdin:
            stdin.write(tokenizer_info.encode())

    def check(self, kind: str, text: str, strict: bool) -> str:
        """The text that `build` compiles, safe to compile in this process. Raises GrammarError."""
        ours, theirs = socket.socketpair()
        with Connection(ours.detach()) as connection:
            with theirs:
                socket.send_fds(self._control, [b"j"], [theirs.fileno()])
            connection.send_bytes(json.dumps([kind, text, strict]).encode())
            try:
                if not connection.poll(START_SECONDS):
                    raise RuntimeError("the grammar compiler does not answer")
                started = time.monotonic()
                connection.recv_bytes()  # the worker is there, and its alarm is set
            except (EOFError, ConnectionResetError) as error:
                raise RuntimeError("the grammar compiler could not be started") from error
            try:
                answer = connection.recv_bytes()
            except (EOFError, ConnectionResetError) as error:
                late = time.monotonic() - started >= self.limit_seconds * 0.95
                reason = f"took longer than {self.limit_seconds:g} s" if late else "took too much memory"
                raise GrammarError(f"the grammar is too complex: compiling it {reason}") from error
        if answer[:1] == b"!":
            raise GrammarError(answer[1:].decode())
        return answer[1:].decode()

    def close(self) -> None:
        self._finalizer()


def _stop(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    control.close()
    process.wait()


def serve(control: socket.socket, tokenizer_info: str, limit_seconds: float) -> None:
    """The helper's loop: a worker for every socket that arrives, until the parent is gone."""
    import xgrammar  # loads transformers: only this process and one that decodes with a grammar need it

    info = xgrammar.TokenizerInfo.deserialize_json(tokenizer_info)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended workers need no wait
    while True:
        _, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not fds:
            return
        if os.fork() == 0:
            control.close()
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, limit_seconds)
            with Connection(fds[0]) as connection:
                connection.send_bytes(b"")
                kind, text, strict = json.loads(connection.recv_bytes())
                _limit_memory()
                connection.send_bytes(_answer(info, kind, text, strict))
            os._exit(0)
        os.close(fds[0])


def _limit_memory() -> None:
    statistics = Path("/proc/self/statm")
    if statistics.exists():  # elsewhere the address space in use is not known: the time limit has to do
        used = int(statistics.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))


def _answer(info: Any, kind: str, text: str, strict: bool) -> bytes:
    """ "=" and the text to compile, or "!" and one line that says why there is none."""
    import xgrammar  # loaded already by `serve`

    try:
        source = rewrite(kind, text, strict)
        compiled = build(xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False), kind, source)
        if compiled.memory_size_bytes > MAX_GRAMMAR_BYTES:
            raise GrammarError("the compiled grammar is too large")
        _try_out(compiled, info.vocab_size)
    except MemoryError:
        return b"!the grammar is too complex: compiling it took too much memory"
    except (GrammarError, RuntimeError) as error:
        return b"!" + _readable(str(error)).encode()
    return b"=" + source.encode()


def _readable(message: str) -> str:
    """The compiler's message without the places in its source; one line of at most 300 characters."""
    lines = _PLACE.sub("", message).strip().splitlines() or ["the grammar cannot be compiled"]
    return lines[0][:300]


def rewrite(kind: str, text: str, strict: bool) -> str:
    """What a user has sent → what xgrammar enforces in full. Raises GrammarError."""
    if kind == "json_schema":
        return json.dumps(normalize_schema(text, strict=strict))
    if kind == "regex":
        return normalize_regex(text)
    if kind == "structural_tag":
        return json.dumps(normalize_tag(text, strict))
    return check_text(text, "the grammar")


def build(compiler: Any, kind: str, source: str) -> Any:
    """Compiles a rewritten text with an xgrammar.GrammarCompiler."""
    if kind == "json_schema":
        return compiler.compile_json_schema(source, strict_mode=False)
    if kind == "regex":
        return compiler.compile_regex(source)
    if kind == "structural_tag":
        return compiler.compile_structural_tag(source)
    return compiler.compile_grammar(source)


def normalize_tag(text: str, strict: bool) -> Any:
    """A structural tag whose schemas and regular expressions are rewritten as those that stand alone.

    Takes xgrammar's {"type": "structural_tag", "format": …} and the older {"structures": …, "triggers": …}.
    """
    tag = parse_document(text, "the structural tag")
    if not isinstance(tag, Mapping):
        raise GrammarError("the structural tag must be an object")
    if "structures" in tag:
        structures = tag["structures"]
        if not isinstance(structures, list) or not all(
            isinstance(item, Mapping) and {"begin", "end"} <= item.keys() for item in structures
        ):
            raise GrammarError("structures must be a list of objects with begin, schema and end")
        tags = [
            {
                "begin": item["begin"],
                "content": {"type": "json_schema", "json_schema": item.get("schema", True)},
                "end": item["end"],
            }
            for item in structures
        ]
        tag = {"format": {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}}
    return {"type": "structural_tag", "format": _normalize_format(tag.get("format"), strict)}


def _normalize_format(value: Any, strict: bool) -> Any:
    if isinstance(value, list):
        return [_normalize_format(item, strict) for item in value]
    if not isinstance(value, Mapping):
        return value
    if value.get("type") == "json_schema":
        return {**value, "json_schema": normalize_schema(value.get("json_schema"), strict=strict)}
    if value.get("type") == "regex":
        return {**value, "pattern": normalize_regex(value.get("pattern"))}
    return {name: _normalize_format(item, strict) for name, item in value.items()}


def _try_out(compiled: Any, vocab_size: int) -> None:
    """Walks through the grammar with random tokens; ambiguous grammars show in the time of their masks."""
    import xgrammar  # loaded already by `serve`

    matcher = xgrammar.GrammarMatcher(compiled)
    bitmask = xgrammar.allocate_token_bitmask(1, vocab_size)
    draw = random.Random(0)
    began = time.process_time()
    for step in range(1, TRIAL_STEPS + 1):
        matcher.fill_next_token_bitmask(bitmask, 0)
        allowed = ((bitmask[0, :, None] >> torch.arange(32)) & 1).flatten()[:vocab_size].nonzero()[:, 0]
        if not len(allowed):
            if step == 1:
                raise GrammarError("the grammar matches no text")
            break
        spent = time.process_time() - began
        if spent > max(TRIAL_SECONDS / 2, STEP_SECONDS * step):
            raise GrammarError(TOO_AMBIGUOUS)
        if spent > TRIAL_SECONDS:
            break
        matcher.accept_token(int(allowed[draw.randrange(len(allowed))]))
        if matcher.is_terminated():
            break


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), sys.stdin.read(), float(sys.argv[2]))
