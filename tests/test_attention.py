"""Paged attention against dense attention, over random page layouts."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sensorium.kernels.attention import (
    AttentionMetadata,
    CrossAttentionMetadata,
    CrossCapture,
    attention,
    cross_attention,
    store_kv,
)
from torch import Tensor

BLOCK = 4


def dense(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """float64 causal attention of the last len(q) positions; [tokens, heads, dim] each."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1).transpose(0, 1) for x in (k, v))
    scores = q.double().transpose(0, 1) @ k.transpose(1, 2) * q.shape[-1] ** -0.5
    position = torch.arange(k.shape[1] - q.shape[0], k.shape[1])[:, None]
    key = torch.arange(k.shape[1])
    hidden = key > position
    if window is not None:
        hidden |= key <= position - window
    return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v).transpose(0, 1)


def runs_of(blocks: list[tuple[int, int]], length: int) -> list[tuple[int, int, int]]:
    runs: list[tuple[int, int, int]] = []
    for number, (slab, index) in enumerate(blocks):
        count = min(BLOCK, length - number * BLOCK)
        if runs and runs[-1][0] == slab and runs[-1][2] == index * BLOCK:
            runs[-1] = (slab, runs[-1][1], index * BLOCK + count)
        else:
            runs.append((slab, index * BLOCK, index * BLOCK + count))
    return runs


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 21), st.integers(1, 24)), min_size=1, max_size=4),
    kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 3]),
    shuffle=st.booleans(),
    window=st.sampled_from([None, 1, 5]),
    seed=st.integers(0, 1000),
)
def test_any_page_layout_equals_dense_attention(
    lengths: list[tuple[int, int]], kv_heads: int, group: int, shuffle: bool, window: int | None, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    layers, dim = 2, 8
    cache = torch.full((2, 50 * BLOCK, layers, 2, kv_heads, dim), float("nan"))
    pages = [(slab, index) for slab in range(2) for index in range(50)]
    if shuffle:
        pages = [pages[i] for i in torch.randperm(len(pages), generator=generator)]
    full_q, full_kv, starts, runs, slots, totals = [], [], [0], [], [], []
    for context, fresh in lengths:
        total = context + fresh
        blocks = [pages.pop() for _ in range(-(-total // BLOCK))]
        kv = torch.randn(total, 2, kv_heads, dim, generator=generator)
        where = [(blocks[p // BLOCK][0], blocks[p // BLOCK][1] * BLOCK + p % BLOCK) for p in range(total)]
        for position in range(context):
            cache[where[position][0], where[position][1], 1] = kv[position]
        slots += where[context:]
        full_q.append(torch.randn(fresh, kv_heads * group, dim, generator=generator))
        full_kv.append(kv)
        starts.append(starts[-1] + fresh)
        totals.append(total)
        runs.append(runs_of(blocks, total))
    slab, row = (torch.tensor(x) for x in zip(*slots, strict=True))
    attn = AttentionMetadata(cache, starts, totals, slab, row, runs, window=window)
    store_kv(torch.cat([kv[c:] for kv, (c, _) in zip(full_kv, lengths, strict=True)]), 1, attn)
    got = attention(torch.cat(full_q), 1, attn)
    for number, (q, kv) in enumerate(zip(full_q, full_kv, strict=True)):
        want = dense(q, kv[:, 0], kv[:, 1], window)
        torch.testing.assert_close(
            got[starts[number] : starts[number + 1]].double(), want, atol=1e-5, rtol=1e-4
        )
    assert attn.max_query_len == max(f for _, f in lengths)
    assert attn.max_seq_len == max(totals)


def test_cross_attention_reads_each_spans_item_and_captures_scores() -> None:
    torch.manual_seed(0)
    heads, dim, length, layers = 3, 8, 50, 2
    cache = torch.randn(2, 4, 2, heads, length, dim)
    spans = [(0, 2, [(0, 1), (1, 3)]), (2, 5, [(1, 0), (0, 2)])]
    capture = CrossCapture(2, 5, ((1, 2), (0, 0), (1, 0)))
    cross = CrossAttentionMetadata(cache, spans, [capture])
    queries = [torch.randn(5, heads, dim) for _ in range(layers)]
    for layer, q in enumerate(queries):
        out = cross_attention(q, layer, cross)
        for first, last, blocks in spans:
            keys, values = cache[blocks[layer]]
            scores = torch.einsum("thd,hsd->hts", q[first:last], keys) * dim**-0.5
            want = torch.einsum("hts,hsd->thd", scores.softmax(-1), values)
            torch.testing.assert_close(out[first:last], want, atol=1e-5, rtol=1e-4)
    for got, (layer, head) in zip(capture.stacked(), capture.heads, strict=True):
        keys = cache[spans[1][2][layer]][0]
        torch.testing.assert_close(got, queries[layer][2:5, head] @ keys[head].T * dim**-0.5)
