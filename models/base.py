"""The contracts between models, the programs that drive them, and the engine.

The engine knows no model and a model knows no request: they meet in the types of this file.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..processors.inputs import MultiModalFeature, MultiModalInputs
from ..processors.text import TextTokenizer

if TYPE_CHECKING:
    from ..kernels.attention import ForwardContext


class ModelError(Exception):
    """A model is absent, damaged or of an architecture that is not supported; the text is one line for users."""


@dataclass(frozen=True)
class KVGroupSpec:
    """The cache of one group of layers that share a page table.

    kind "full": blocks of 16 tokens, each [16, num_layers, planes, num_kv_heads, head_dim]. planes is 2 (key
        and value), or 1 if `latent`: latent attention keeps one vector a token (num_kv_heads 1).
        With `window`, a token sees at most so many keys, itself included, and pages behind it are given back.
    kind "cross": one block a layer and encoder item, head-contiguous, [2, num_kv_heads, encoder_len, head_dim].
    kind "state": one float32 block a layer and sequence, [state_size].
    """

    name: str
    kind: Literal["full", "cross", "state"]
    num_layers: int
    num_kv_heads: int = 0
    head_dim: int = 0
    dtype: torch.dtype = torch.float32
    encoder_len: int = 0
    latent: bool = False
    window: int | None = None
    state_size: int = 0


@dataclass(frozen=True)
class KVCacheSpec:
    """Every cache group of a model, and the longest sequence (tokens) that it can serve."""

    groups: tuple[KVGroupSpec, ...]
    max_model_len: int

    def of_kind(self, kind: str) -> tuple[KVGroupSpec, ...]:
        return tuple(group for group in self.groups if group.kind == kind)


class LogitsProcessor(Protocol):
    """Changes logits in place before sampling; knows nothing of requests.

    Processors are hashable values: requests whose processors are equal are filtered in one call.
    """

    def __call__(self, logits: Tensor, outputs: Sequence[Sequence[int]]) -> None:
        """logits: float32 [rows, vocab], changed in place. outputs: per row, the ids sampled so far."""

    def __hash__(self) -> int: ...


class LogitsProbe(Protocol):
    """Asks for raw (unfiltered) logits at prompt positions, reduced at once to what the caller needs."""

    @property
    def positions(self) -> Sequence[int]:
        """Ascending prompt positions; position p holds the logits that predict the token at p + 1."""

    def reduce(self, positions: Sequence[int], logits: Tensor) -> Tensor:
        """logits: float32 [len(positions), vocab]. Returns [len(positions), ...]; may be called in pieces."""


class GrammarMatcher(Protocol):
    """The state of one sequence within a grammar."""

    def fill_bitmask(self, bitmask: Tensor, row: int) -> None:
        """Writes which tokens may come next into int32 [rows, ceil(vocab / 32)], a bit a token."""

    def accept(self, token_id: int) -> bool:
        """Advances by a token; False if the grammar does not allow it."""

    def fork(self) -> GrammarMatcher: ...

    @property
    def is_terminated(self) -> bool: ...


class Grammar(Protocol):
    """A compiled grammar; hands out a matcher for each sequence."""

    def matcher(self) -> GrammarMatcher: ...


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen.

    num_sequences > 1 with beam_size 1 samples that many continuations of one prompt (best_of, n).
    beam_size > 1 (temperature 0 only) is the reference's beam search with `patience`.
    max_tokens 0 runs the prompt only: nothing is sampled, probe and alignment are still returned.
    top_k 0, top_p 1 and min_p 0 keep every token; they apply after the temperature, in this order.
    stop: strings that end the text and are not part of it; they need a detokenizer (`detokenize`).
    min_tokens: stop tokens and strings are out of the question before so many were sampled.
    logprobs: None, or how many of the likeliest tokens to report at each step beside the chosen one.
    alignment_heads: (layer, head) pairs whose raw cross-attention scores over the prompt are returned.
    pooling: with max_tokens 0, the last or the mean hidden state of the prompt is returned (embeddings).
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    num_sequences: int = 1
    beam_size: int = 1
    patience: float = 1.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    detokenize: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    logits_processors: tuple[LogitsProcessor, ...] = ()
    grammar: Grammar | None = None
    probe: LogitsProbe | None = None
    alignment_heads: tuple[tuple[int, int], ...] = ()
    pooling: Literal["last", "mean"] | None = None

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether every prompt token has to pass through the model, cached or not."""
        return bool(self.alignment_heads) or self.pooling == "mean"


@dataclass(frozen=True)
class GenerationRequest:
    """One piece of engine work; `key` is the program's own name for it and comes back with the output."""

    key: Hashable
    inputs: MultiModalInputs
    params: SamplingParams
    stream: bool = False  # TokenDelta events are published on the run while it is computed
    cache_salt: str = ""  # requests share cached prefixes only under the same salt


@dataclass(frozen=True)
class TokenLogprob:
    """One sampled position: the chosen id with its log-probability, and the likeliest (id, logprob) pairs."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Completion:
    """One sampled continuation.

    token_ids: sampled ids without the stop token. cumulative_logprob: sum of the log-probabilities
    (after the logits processors, before temperature) of every sampled id, the stop token included.
    text: what `detokenize` made of them, cut at a stop string. stop_reason: the stop string or id that ended
    it, None for the model's own end. logprobs: one a token id, if asked for.
    """

    token_ids: tuple[int, ...]
    cumulative_logprob: float
    finish_reason: Literal["stop", "length"]
    text: str = ""
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True)
class TokenDelta:
    """Event of a streaming request: what one sequence gained in a step.

    text may be empty while bytes of a character or a possible stop string are held back; the texts of all
    deltas of a sequence add up to its completion's text. finish_reason is set on the last one only.
    """

    key: Hashable
    sequence: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True)
class GenerationOutput:
    """What the engine returns for a GenerationRequest.

    completions: in the order of the sequences. probe: [len(positions), ...] as the request's probe reduced
    it, else None. num_cached_tokens: prompt tokens that were found in the prefix cache.
    alignment_scores: float32 [heads, prompt tokens, encoder_len], scaled q·k before softmax, else None.
    pooled: float32 [hidden], if pooling was asked for.
    """

    key: Hashable
    completions: tuple[Completion, ...]
    probe: Tensor | None = None
    alignment_scores: Tensor | None = None
    pooled: Tensor | None = None
    num_cached_tokens: int = 0


class Program(Protocol):
    """A state machine over engine work: what to run next, given what came back.

    The engine calls `start` once, then `accept` for every output, never two calls at a time; each returns
    the requests to run next. When nothing is outstanding and nothing new was returned, the program is over
    and `result` is its value. `take_events` hands out, in order and once, what can already be shown.
    """

    def start(self) -> list[GenerationRequest]: ...

    def accept(self, output: GenerationOutput) -> list[GenerationRequest]: ...

    def take_events(self) -> list[Any]: ...

    def result(self) -> Any: ...


@runtime_checkable
class Model(Protocol):
    """Weights and the forward pass. No method keeps state between calls."""

    kv_cache_spec: KVCacheSpec
    vocab_size: int

    def embed_multimodal(self, features: Sequence[MultiModalFeature]) -> list[Tensor]:
        """Encodes items together; returns one [num_embeds, hidden] tensor an item."""

    def cross_kv(self, encoder_output: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one decoder layer over an encoder output, each [kv_heads, encoder_len, head_dim]."""

    def forward(self, input_ids: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """input_ids, positions: int64 [tokens]. Returns hidden states [tokens, hidden] after the final norm."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] → float32 [rows, vocab]."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Strict: a missing, left-over or wrongly shaped tensor raises ModelError and names it."""


@dataclass(frozen=True)
class ModelInfo:
    """What is known of a model without loading its weights."""

    architecture: str
    capabilities: frozenset[str]  # "transcription", "translation", "chat", …
    config: Mapping[str, Any] = field(default_factory=dict)


class ModelProcessor(Protocol):
    """Turns a user's wishes into programs. Called in worker threads: must be thread-safe."""

    info: ModelInfo
    tokenizer: TextTokenizer | None  # None where the engine never has to make text of ids
