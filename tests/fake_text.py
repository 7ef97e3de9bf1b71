"""An engine whose text models say what a test tells them, through the real seam: programs, runs, stop strings."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from sensorium.engine.config import EngineConfig
from sensorium.engine.detokenizer import SequenceText
from sensorium.engine.engine import EngineDead, LoadedModel
from sensorium.engine.program import ProgramFailed, ProgramRun
from sensorium.models.base import (
    Completion,
    GenerationOutput,
    GenerationRequest,
    SamplingParams,
    TokenDelta,
    TokenLogprob,
)
from sensorium.models.text import GenerationProgram, TextProcessor
from sensorium.processors.chat_template import ChatTemplate
from sensorium.processors.text import TextTokenizer, byte_of_character
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from .fake_engine import FakeEngine
from .live_server import Live

MAX_MODEL_LEN = 512
MAX_NUM_SEQS = 8
HIDDEN = 32
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB = 259
Script = Callable[[GenerationRequest, int], str]


def byte_tokenizer() -> TextTokenizer:
    """One token a byte, ids 0 to 255 in the order of the bytes, then the special ones."""
    vocabulary = dict(byte_of_character())
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    ends = [tokenizer.token_to_id(text) for text in ("<|im_end|>", "<|endoftext|>")]
    return TextTokenizer(tokenizer, eos_id=ends[0], stop_ids=ends)


class FakeTextEngine(FakeEngine):
    """Says `said`, or what a function of (request, sequence) returns, a token every `pace` seconds.

    requests: all that it was given. Every text ends with a stop token, if the token limit lets it.
    """

    def __init__(self, said: str | Script = "Hello, world!", pace: float = 0.0, **processor: Any) -> None:
        super().__init__(pace=pace)
        self.config = EngineConfig(max_num_seqs=MAX_NUM_SEQS)
        self.said = said
        self.requests: list[GenerationRequest] = []
        self.text_runs: list[ProgramRun] = []
        self.num_cached = 0
        self.fail_text: Exception | None = None
        self._executor = ThreadPoolExecutor(4)
        self.add_text("tiny-text", **processor)
        self.counters: dict[str, float] = {
            "requests_running": 3,
            "prefix_hits": 7,
            "stage_decode_seconds": 1.5,
        }
        self.stopped_at: dict[int, float] = {}
        self.sampled = 0

    def add_text(self, name: str, **changes: Any) -> None:
        processor = text_processor(**{"template": ChatML(), **changes}, name=name)
        self._models[name] = LoadedModel(name, 1_700_000_000, processor, MAX_MODEL_LEN, VOCAB)

    def unload(self, name: str) -> None:
        super().unload(name)
        for run in self.text_runs:
            if run.model == name:
                run.fail(ProgramFailed("the model was unloaded"))

    def stats(self) -> dict[str, float]:
        return dict(self.counters)

    def run(self, model: str, program: Any, priority: int = 0) -> Any:
        if not isinstance(program, GenerationProgram):
            return super().run(model, program, priority)
        self.model(model)
        if self.dead:
            raise EngineDead("the engine is not running")
        run = ProgramRun(model, program, priority, self._executor, self._submit, lambda _run: None)
        self.text_runs.append(run)
        run.begin()
        return run

    def _submit(self, run: ProgramRun, requests: list[GenerationRequest]) -> None:
        self.requests += requests
        for request in requests:
            assert request.params.num_sequences <= MAX_NUM_SEQS
            threading.Thread(target=self._generate, args=(run, request), daemon=True).start()

    def _generate(self, run: ProgramRun, request: GenerationRequest) -> None:
        completions = []
        for sequence in range(request.params.num_sequences if request.params.max_tokens else 0):
            completions.append(self._speak(run, request, sequence))
            if run.done:
                self.stopped_at[id(run)] = time.monotonic()
                return
        prompt = request.inputs.prompt_token_ids
        probe = request.params.probe
        rows = None
        if probe is not None:
            rows = probe.reduce(probe.positions, torch.zeros(len(probe.positions), VOCAB))
        cached = min(self.num_cached, len(prompt) - 1)
        pooled = pooled_state(request) if request.params.pooling else None
        run.deliver(
            GenerationOutput(request.key, tuple(completions), rows, pooled=pooled, num_cached_tokens=cached)
        )

    def _speak(self, run: ProgramRun, request: GenerationRequest, sequence: int) -> Completion | None:
        params, tokenizer = request.params, byte_tokenizer()
        said = self.said if isinstance(self.said, str) else self.said(request, sequence)
        text, ids, logprobs = SequenceText(tokenizer, params), [], []
        finish, reason = "stop", None
        ends = [*tokenizer.encode(said, special=True), None]
        for number, token in enumerate(ends):
            if self.pace:
                time.sleep(self.pace)
            if run.done:
                return None
            if self.fail_text is not None and number == 2:
                run.fail(self.fail_text)
                return None
            fresh, stop, over = "", None, token is None or token in params.stop_token_ids
            new: tuple[int, ...] = () if over else (token,)
            entry = TokenLogprob(token, -0.5, likeliest(token, params)) if new else None
            if new:
                self.sampled += 1
                ids.append(token)
                logprobs.append(entry)
                fresh, stop = text.add(new)
            if stop is not None:
                reason, over = stop, True
            elif new and len(ids) >= params.max_tokens:
                finish, over = "length", True
            if over and stop is None:
                fresh += text.finish()
            shown = (entry,) if entry is not None and params.logprobs is not None else None
            run.publish(
                TokenDelta(
                    request.key,
                    sequence,
                    new,
                    fresh,
                    finish if over else None,
                    reason if over else None,
                    shown,
                )
            )
            if over:
                break
        entries = tuple(logprobs) if params.logprobs is not None else None
        return Completion(tuple(ids), -0.5 * len(ids) * (sequence + 1), finish, text.text, reason, entries)


def pooled_state(request: GenerationRequest) -> torch.Tensor:
    """float32 [HIDDEN], for each prompt and each kind of pooling its own; zero where the prompt is "zero"."""
    ids = request.inputs.prompt_token_ids
    if list(ids) == list(b"zero"):
        return torch.zeros(HIDDEN)
    generator = torch.Generator().manual_seed(sum(ids) + (request.params.pooling == "mean"))
    return torch.randn(HIDDEN, generator=generator)


def likeliest(token: int, params: SamplingParams) -> tuple[tuple[int, float], ...]:
    return tuple(((token + i) % 256, -0.5 - i) for i in range(params.logprobs or 0))


CHATML = """{% if tools %}<tools>{{ tools | tojson }}</tools>
{% endif %}
{% for message in messages %}
{% if message.content == 'impossible' %}{{ raise_exception('the roles must alternate') }}{% endif %}
<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}
<|im_end|>
{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


class ChatML(ChatTemplate):
    """The template of many models; remembers what it rendered."""

    def __init__(self, thinks: bool = False) -> None:
        super().__init__(CHATML + ("{# <think></think> #}" if thinks else ""))
        self.rendered: list[dict[str, Any]] = []

    def render(self, messages: Any, tools: Any = None, *options: Any, **arguments: Any) -> str:
        self.rendered.append({"messages": messages, "tools": tools, **arguments})
        return super().render(messages, tools, *options, **arguments)


def text_processor(template: ChatML | None, name: str) -> TextProcessor:
    return TextProcessor({"model_type": "fake", "hidden_size": HIDDEN}, byte_tokenizer(), template, name)


def prompt_of(request: GenerationRequest) -> str:
    """The prompt's text with its special tokens."""
    return byte_tokenizer().decode(request.inputs.prompt_token_ids, skip_special_tokens=False)


def engine_of(server: Live) -> FakeTextEngine:
    """The scripted engine behind a server under test."""
    assert isinstance(server.engine, FakeTextEngine)
    return server.engine
