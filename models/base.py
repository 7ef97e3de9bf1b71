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

if TYPE_CHECKING:
    from ..kernels.attention import AttentionMetadata, CrossAttentionMetadata


class ModelError(Exception):
    """A model is absent, damaged or of an architecture that is not supported; the text is one line for users."""


@dataclass(frozen=True)
class KVGroupSpec:
    """The cache of one group of layers that share a page table.

    kind "full": blocks of 16 tokens, each [16, num_layers, 2, num_kv_heads, head_dim].
    kind "cross": one block a layer and encoder item, head-contiguous, [2, num_kv_heads, encoder_len, head_dim].
    """

    name: str
    kind: Literal["full", "cross"]
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    encoder_len: int = 0


@dataclass(frozen=True)
class KVCacheSpec:
    """Every cache group of a model, and the longest sequence (tokens) that it can serve."""

    groups: tuple[KVGroupSpec, ...]
    max_model_len: int

    def group(self, kind: str) -> KVGroupSpec | None:
        return next((g for g in self.groups if g.kind == kind), None)


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


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen.

    num_sequences > 1 with beam_size 1 samples that many continuations of one prompt (best_of, n).
    beam_size > 1 (temperature 0 only) is the reference's beam search with `patience`.
    max_tokens 0 runs the prompt only: nothing is sampled, probe and alignment are still returned.
    alignment_heads: (layer, head) pairs whose raw cross-attention scores over the prompt are returned.
    """

    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    num_sequences: int = 1
    beam_size: int = 1
    patience: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    logits_processors: tuple[LogitsProcessor, ...] = ()
    probe: LogitsProbe | None = None
    alignment_heads: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class GenerationRequest:
    """One piece of engine work; `key` is the program's own name for it and comes back with the output."""

    key: Hashable
    inputs: MultiModalInputs
    params: SamplingParams


@dataclass(frozen=True)
class Completion:
    """One sampled continuation.

    token_ids: sampled ids without the stop token. cumulative_logprob: sum of the log-probabilities
    (after the logits processors, before temperature) of every sampled id, the stop token included.
    """

    token_ids: tuple[int, ...]
    cumulative_logprob: float
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True)
class GenerationOutput:
    """What the engine returns for a GenerationRequest.

    probe: [len(positions), ...] as the request's probe reduced it, else None.
    alignment_scores: float32 [heads, prompt tokens, encoder_len], scaled q·k before softmax, else None.
    """

    key: Hashable
    completions: tuple[Completion, ...]
    probe: Tensor | None = None
    alignment_scores: Tensor | None = None


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

    def forward(
        self, input_ids: Tensor, positions: Tensor, attn: AttentionMetadata, cross: CrossAttentionMetadata | None
    ) -> Tensor:
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
