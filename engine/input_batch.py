"""One model's share of a step as tensors."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..kernels.attention import (
    AttentionMetadata,
    CrossAttentionMetadata,
    CrossCapture,
    ForwardContext,
    StateMetadata,
)
from .block_pool import BLOCK_SIZE, LayerGroup
from .kv_cache_manager import CacheGroups
from .request import Request, Sequence
from .scheduler import ScheduledSequence


@dataclass
class ProbeRows:
    """Logits rows `start`… belong to these prompt positions of a request's probe."""

    request: Request
    positions: list[int]
    start: int


@dataclass
class InputBatch:
    """input_ids, positions: int64 [tokens]. logits_rows: int64, the tokens whose logits are needed.

    Of the logits rows the first len(sampled) belong to the sequences that sample, then follow the probes'.
    pooled: (request, first token, end token) of prompts whose hidden states are pooled.
    """

    scheduled: list[ScheduledSequence]
    input_ids: Tensor
    positions: Tensor
    context: ForwardContext
    logits_rows: Tensor
    sampled: list[Sequence] = field(default_factory=list)
    probes: list[ProbeRows] = field(default_factory=list)
    captures: list[tuple[Request, CrossCapture]] = field(default_factory=list)
    pooled: list[tuple[Request, int, int]] = field(default_factory=list)


def make_input_batch(sequences: SequenceOf[ScheduledSequence], groups: CacheGroups) -> InputBatch:
    """Lays the scheduled tokens out flat; sequences that read one encoder item stand side by side."""
    scheduled = sorted(sequences, key=_cross_order)
    ids: list[int] = []
    positions: list[int] = []
    starts, lengths = [0], []
    sample_rows: list[int] = []
    probe_rows: list[int] = []
    sampled: list[Sequence] = []
    probes: list[ProbeRows] = []
    captures: list[tuple[Request, CrossCapture]] = []
    pooled: list[tuple[Request, int, int]] = []
    spans: list[tuple[int, int, list[tuple[int, int]]]] = []

    for item in scheduled:
        sequence, request = item.sequence, item.sequence.request
        first, begin, end = len(ids), sequence.num_computed, item.end
        ids += sequence.token_ids[begin:end]
        positions += range(begin, end)
        starts.append(len(ids))
        lengths.append(end)
        if end == sequence.num_tokens and request.params.max_tokens > 0:
            sampled.append(sequence)
            sample_rows.append(len(ids) - 1)
        wanted = _probe_positions(sequence, begin, end)
        if wanted:
            probes.append(ProbeRows(request, wanted, len(probe_rows)))
            probe_rows += [first + p - begin for p in wanted]
        if request.params.pooling is not None:
            pooled.append((request, first, len(ids)))
        if request.params.alignment_heads:
            captures.append((request, CrossCapture(first, len(ids), request.params.alignment_heads)))
        if request.cross_blocks:
            blocks = [(b.slab, b.index) for b in request.cross_blocks]
            if spans and spans[-1][2] == blocks:
                spans[-1] = (spans[-1][0], len(ids), blocks)
            else:
                spans.append((first, len(ids), blocks))

    for probe in probes:
        probe.start += len(sample_rows)
    cross = None
    if groups.cross is not None:
        cross = CrossAttentionMetadata(groups.cross.view, spans, [c for _, c in captures])
    context = ForwardContext(
        {name: _paged(group, name, scheduled, starts, lengths) for name, group in groups.paged.items()},
        cross,
        {name: _states(group, name, scheduled, starts) for name, group in groups.states.items()},
    )
    return InputBatch(
        scheduled,
        torch.tensor(ids),
        torch.tensor(positions),
        context,
        torch.tensor(sample_rows + probe_rows, dtype=torch.int64),
        sampled,
        probes,
        captures,
        pooled,
    )


def _paged(
    group: LayerGroup,
    name: str,
    scheduled: SequenceOf[ScheduledSequence],
    starts: list[int],
    lengths: list[int],
) -> AttentionMetadata:
    """Where one paged group keeps this step's tokens and what they look back on."""
    slabs: list[int] = []
    rows: list[int] = []
    runs, first_keys = [], []
    for item in scheduled:
        pages = item.sequence.pages[name]
        for position in range(item.sequence.num_computed, item.end):
            page = pages[position // BLOCK_SIZE]
            assert page is not None
            slabs.append(page.slab)
            rows.append(page.index * BLOCK_SIZE + position % BLOCK_SIZE)
        first_key, stretches = item.sequence.runs(name, item.end)
        first_keys.append(first_key)
        runs.append(stretches)
    return AttentionMetadata(
        cache=group.view,
        query_start_loc=starts,
        seq_lens=lengths,
        slot_slabs=torch.tensor(slabs),
        slot_rows=torch.tensor(rows),
        runs=runs,
        first_keys=first_keys,
        window=group.spec.window,
    )


def _states(
    group: LayerGroup, name: str, scheduled: SequenceOf[ScheduledSequence], starts: list[int]
) -> StateMetadata:
    return StateMetadata(
        cache=group.view,
        query_start_loc=starts,
        blocks=[[(b.slab, b.index) for b in item.sequence.states[name]] for item in scheduled],
        fresh=[item.sequence.num_computed == 0 for item in scheduled],
    )


def _cross_order(item: ScheduledSequence) -> tuple[int, int]:
    blocks = item.sequence.request.cross_blocks
    return (blocks[0].slab, blocks[0].index) if blocks else (-1, -1)


def _probe_positions(sequence: Sequence, begin: int, end: int) -> list[int]:
    """The prompt positions in [begin, end) whose raw logits the request asked for and lacks."""
    request = sequence.request
    probe = request.params.probe
    if probe is None or request.expanded or sequence is not request.sequences[0]:
        return []
    return [
        p
        for p in probe.positions
        if begin <= p < min(end, sequence.num_prompt) and p not in request.probe_rows
    ]
