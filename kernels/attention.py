"""Attention over paged caches: what a step tells the kernels, and the calls that models make.

The calls choose the backend by the device of their inputs; `attention_torch` is the reference path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from . import attention_torch


@dataclass
class AttentionMetadata:
    """Where the step's tokens live in one paged cache. Made once a step, read by every layer of the group.

    Attributes
    ----------
    cache: [slabs, rows, layers, planes, kv_heads, head_dim], a strided view of the arena; a row is a token.
        planes is 2 (key, value), or 1 for latent attention, whose values are the first part of its keys.
    query_start_loc: [sequences + 1], first token of each sequence in the flat batch.
    seq_lens: [sequences], tokens of each sequence, this step's included.
    slot_slabs, slot_rows: int64 [tokens], where each token's key and value are stored.
    runs: per sequence the stretches (slab, first row, end row) that hold its keys in order.
    first_keys: per sequence the position of the first key in its runs; above 0 only where pages behind the
        window were given back.
    causal: a token attends to nothing behind it. window: at most so many keys back, itself included.
    """

    cache: Tensor
    query_start_loc: Sequence[int]
    seq_lens: Sequence[int]
    slot_slabs: Tensor
    slot_rows: Tensor
    runs: Sequence[Sequence[tuple[int, int, int]]]
    first_keys: Sequence[int] = ()
    causal: bool = True
    window: int | None = None

    @property
    def max_query_len(self) -> int:
        starts = self.query_start_loc
        return max(starts[i + 1] - starts[i] for i in range(len(self.seq_lens)))

    @property
    def max_seq_len(self) -> int:
        return max(self.seq_lens)


@dataclass
class CrossCapture:
    """A request for the raw scaled scores q·k of some heads over some of the step's tokens.

    heads: (layer, head) pairs. scores: filled by the kernels, one float32 [tokens, encoder_len] a pair.
    """

    start: int
    stop: int
    heads: tuple[tuple[int, int], ...]
    scores: list[Tensor | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scores = [None] * len(self.heads)

    def stacked(self) -> Tensor:
        """float32 [heads, tokens, encoder_len]."""
        return torch.stack([s for s in self.scores if s is not None])


@dataclass
class CrossAttentionMetadata:
    """Which encoder item each of the step's tokens attends to.

    Attributes
    ----------
    cache: [slabs, blocks, 2, kv_heads, encoder_len, head_dim], a strided view of the arena.
    spans: (first token, end token, blocks), tokens that read the same item; blocks: (slab, index) a layer.
    captures: scores to keep.
    """

    cache: Tensor
    spans: Sequence[tuple[int, int, Sequence[tuple[int, int]]]]
    captures: Sequence[CrossCapture] = ()


@dataclass
class StateMetadata:
    """The recurrent states of the step's sequences, for layers that keep a state instead of keys.

    Attributes
    ----------
    cache: float32 [slabs, blocks, state_size], a strided view of the arena; a block is one layer's state.
    query_start_loc: [sequences + 1], first token of each sequence in the flat batch.
    blocks: per sequence one (slab, index) a layer of the group.
    fresh: per sequence whether it starts here: its blocks then hold nothing yet and the state is zero.
    """

    cache: Tensor
    query_start_loc: Sequence[int]
    blocks: Sequence[Sequence[tuple[int, int]]]
    fresh: Sequence[bool]

    def state(self, sequence: int, layer: int) -> Tensor:
        """float32 [state_size], a view to read and to write in place; zeroed for a fresh sequence."""
        state = self.cache[self.blocks[sequence][layer]]
        return state.zero_() if self.fresh[sequence] else state


@dataclass
class ForwardContext:
    """All that a step tells a model's layers; paged caches and states by the name of their layer group."""

    attn: Mapping[str, AttentionMetadata]
    cross: CrossAttentionMetadata | None = None
    states: Mapping[str, StateMetadata] = field(default_factory=dict)


def store_kv(kv: Tensor, layer: int, attn: AttentionMetadata) -> None:
    """Writes this step's keys and values, [tokens, planes, kv_heads, head_dim]; layer counts in the group."""
    attention_torch.store_kv(kv, layer, attn)


def attention(
    query: Tensor,
    layer: int,
    attn: AttentionMetadata,
    scale: float | None = None,
    value_dim: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Self-attention of [tokens, heads, head_dim] queries over the cache; returns [tokens, heads, value_dim].

    Heads are grouped over kv_heads (grouped-query attention). scale: head_dim ** -0.5 unless given.
    value_dim: for caches with one plane, the values are the first value_dim of each key.
    softcap: scores become softcap * tanh(scores / softcap). sinks: [heads], a logit each that takes part in
    the softmax and has no value.
    """
    return attention_torch.attention(query, layer, attn, scale, value_dim, softcap, sinks)


def cross_attention(query: Tensor, layer: int, cross: CrossAttentionMetadata) -> Tensor:
    """Attention of [tokens, heads, head_dim] queries over encoder items; returns the same shape."""
    return attention_torch.cross_attention(query, layer, cross)
