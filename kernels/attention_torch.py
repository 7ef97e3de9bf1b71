"""Paged attention in plain torch: the path for CPUs and the truth that other backends are tested against.

Keys and values are read where they lie: a sequence's pages are joined into the fewest contiguous
stretches and each is a view. Decoding never copies a sequence's cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from .attention import AttentionMetadata, CrossAttentionMetadata, CrossCapture


# So many queries pay for one copy of a layer's scattered keys and values, which spares writing out a matrix
# of scores; fewer (decoding, short chunks) read the pages where they lie.
JOIN_QUERIES = 16


def store_kv(kv: Tensor, layer: int, attn: AttentionMetadata) -> None:
    """See `attention.store_kv`."""
    attn.cache[attn.slot_slabs, attn.slot_rows, layer] = kv.to(attn.cache.dtype)


def attention(
    query: Tensor,
    layer: int,
    attn: AttentionMetadata,
    scale: float | None,
    value_dim: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """See `attention.attention`."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    output = query.new_empty(*query.shape[:-1], value_dim or query.shape[-1])
    starts = attn.query_start_loc
    for index, runs in enumerate(attn.runs):
        first, last = starts[index], starts[index + 1]
        first_key = attn.first_keys[index] if attn.first_keys else 0
        queries, seq_len = last - first, attn.seq_lens[index]
        # A whole prompt: the triangle is known to the kernel, which needs no mask and no half of the work.
        triangle = attn.causal and queries == seq_len > 1 and (attn.window is None or seq_len <= attn.window)
        mask = None if triangle else _mask(queries, seq_len, first_key, attn, query.device)
        # [heads, tokens, head_dim]; a run's keys and values are [kv_heads, tokens, head_dim] views.
        q = query[first:last].transpose(0, 1)
        pieces = [attn.cache[slab, start:end, layer] for slab, start, end in runs]
        keys = [p[:, 0].transpose(0, 1) for p in pieces]
        values = [
            k[..., :value_dim] if value_dim else p[:, 1].transpose(0, 1)
            for k, p in zip(keys, pieces, strict=True)
        ]
        if softcap is None and sinks is None and (len(runs) == 1 or queries >= JOIN_QUERIES):
            grouped = q.shape[0] != keys[0].shape[0]
            joined = [part[0] if len(runs) == 1 else torch.cat(part, dim=1) for part in (keys, values)]
            out = F.scaled_dot_product_attention(
                q[None],
                joined[0][None],
                joined[1][None],
                attn_mask=mask,
                is_causal=triangle,
                scale=scale,
                enable_gqa=grouped,
            )[0]
        else:
            if triangle:
                mask = _mask(queries, seq_len, first_key, attn, query.device)
            out = _attend_runs(q, keys, values, mask, scale, softcap, sinks)
        output[first:last] = out.transpose(0, 1)
    return output


def cross_attention(query: Tensor, layer: int, cross: CrossAttentionMetadata) -> Tensor:
    """See `attention.cross_attention`."""
    output = torch.empty_like(query)
    for first, last, blocks in cross.spans:
        slab, index = blocks[layer]
        keys, values = cross.cache[slab, index]
        q = query[first:last].transpose(0, 1)
        output[first:last] = F.scaled_dot_product_attention(q[None], keys[None], values[None])[0].transpose(
            0, 1
        )
        for capture in cross.captures:
            if first <= capture.start and capture.stop <= last:
                _capture_scores(query, keys, layer, capture)
    return output


def _capture_scores(query: Tensor, keys: Tensor, layer: int, capture: CrossCapture) -> None:
    for slot, (head_layer, head) in enumerate(capture.heads):
        if head_layer == layer:
            q = query[capture.start : capture.stop, head].float()
            capture.scores[slot] = (q * q.shape[-1] ** -0.5) @ keys[head].float().T


def _mask(
    queries: int, seq_len: int, first_key: int, attn: AttentionMetadata, device: torch.device
) -> Tensor | None:
    """bool [queries, keys], True where a query may look; None where every query sees every key."""
    window = attn.window
    if (queries == 1 or not attn.causal) and (window is None or seq_len - first_key <= window):
        return None
    key = torch.arange(first_key, seq_len, device=device)
    position = torch.arange(seq_len - queries, seq_len, device=device)[:, None]
    mask = key <= position if attn.causal else torch.ones(queries, len(key), dtype=torch.bool, device=device)
    if window is not None:
        mask = mask & (key > position - window)
    return mask


def _attend_runs(
    q: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention over several stretches of keys as if they were one; q [heads, tokens, head_dim]."""
    heads, tokens, head_dim = q.shape
    kv_heads = keys[0].shape[0]
    # The queries that share a key head stand together as rows: [kv_heads, group * tokens, head_dim].
    rows = (q * scale).reshape(kv_heads, -1, head_dim)
    scores = torch.cat([rows @ k.transpose(1, 2) for k in keys], dim=-1)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.view(kv_heads, -1, tokens, mask.shape[1]).masked_fill(~mask, float("-inf"))
        scores = scores.view(kv_heads, -1, mask.shape[1])
    if sinks is not None:
        sink = sinks.to(scores.dtype).repeat_interleave(tokens).view(kv_heads, -1, 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    parts = weights.split([k.shape[1] for k in keys], dim=-1)
    out = torch.stack([w @ v for w, v in zip(parts, values, strict=True)]).sum(dim=0)
    return out.view(heads, tokens, -1)
