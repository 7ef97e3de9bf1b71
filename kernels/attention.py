"""Attention over paged caches: what a step tells the kernels, and the calls that models make.

The calls choose the backend by the device of their inputs; `attention_torch` is the reference path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from . import attention_torch


@dataclass
class AttentionMetadata:
    """Where the step's tokens live in a paged self-attention cache. Made once a step, read by every layer.

    Attributes
    ----------
    cache: [slabs, rows, layers, 2, kv_heads, head_dim], a strided view of the arena; a row is a token.
    query_start_loc: [sequences + 1], first token of each sequence in the flat batch.
    seq_lens: [sequences], keys of each sequence, this step's tokens included.
    slot_slabs, slot_rows: int64 [tokens], where each token's key and value are stored.
    runs: per sequence the stretches (slab, first row, end row) that hold its keys in order.
    causal: a token attends to nothing behind it. window: at most so many keys back, itself included.
    """

    cache: Tensor
    query_start_loc: Sequence[int]
    seq_lens: Sequence[int]
    slot_slabs: Tensor
    slot_rows: Tensor
    runs: Sequence[Sequence[tuple[int, int, int]]]
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


def store_kv(kv: Tensor, layer: int, attn: AttentionMetadata) -> None:
    """Writes this step's keys and values, [tokens, 2, kv_heads, head_dim], into the cache."""
    attention_torch.store_kv(kv, layer, attn)


def attention(query: Tensor, layer: int, attn: AttentionMetadata) -> Tensor:
    """Self-attention of [tokens, heads, head_dim] queries over the cache; returns the same shape.

    Heads are grouped over kv_heads (grouped-query attention); the scale is head_dim ** -0.5.
    """
    return attention_torch.attention(query, layer, attn)


def cross_attention(query: Tensor, layer: int, cross: CrossAttentionMetadata) -> Tensor:
    """Attention of [tokens, heads, head_dim] queries over encoder items; returns the same shape."""
    return attention_torch.cross_attention(query, layer, cross)
