"""Chooses tokens from logits. It knows no model: rules come as logits processors, seeds from the requests."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from ..models.base import LogitsProcessor, SamplingParams, TokenLogprob
from .request import Sequence

NUCLEUS_GUESS = 1024  # likeliest tokens that nearly always hold a nucleus: spares sorting the vocabulary


def apply_processors(logits: Tensor, sequences: SequenceOf[Sequence]) -> None:
    """Filters logits, float32 [rows, vocab], in place; rows with equal processors are filtered together."""
    chains: dict[tuple[LogitsProcessor, ...], list[int]] = {}
    for row, sequence in enumerate(sequences):
        chains.setdefault(sequence.request.params.logits_processors, []).append(row)
    for chain, rows in chains.items():
        if not chain:
            continue
        outputs = [sequences[row].output_ids for row in rows]
        everything = len(rows) == len(sequences)
        part = logits if everything else logits[rows]
        for processor in chain:
            processor(part, outputs)
        if not everything:
            logits[rows] = part


def sample(logits: Tensor, sequences: SequenceOf[Sequence]) -> list[int]:
    """One token a row: the best one at temperature 0, else drawn with the sequence's own generator."""
    tokens = logits.argmax(dim=-1).tolist()
    for row, sequence in enumerate(sequences):
        params = sequence.request.params
        if params.temperature > 0:
            tokens[row] = draw(logits[row], params, sequence.generator)
    return tokens


def draw(logits: Tensor, params: SamplingParams, generator: torch.Generator | None) -> int:
    """Draws from softmax(logits / temperature), cut by top_k, then top_p, then min_p.

    Uncut, it is torch's multinomial over the whole vocabulary, so that a seed gives the tokens that
    torch.distributions.Categorical gives with it.
    """
    scaled = logits / params.temperature
    if params.top_k <= 0 and params.top_p >= 1 and params.min_p <= 0:
        return int(torch.multinomial(torch.softmax(scaled, dim=-1), 1, True, generator=generator))
    values, ids = candidates(scaled, params)
    probabilities = torch.softmax(values, dim=-1)
    return int(ids[torch.multinomial(probabilities, 1, True, generator=generator)])


def candidates(scaled: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """The tokens that remain, likeliest first: (scaled logits, ids). At least one always remains."""
    vocab = scaled.shape[-1]
    if 0 < params.top_k < vocab:
        values, ids = scaled.topk(params.top_k)
        total = values.logsumexp(dim=-1)
    else:
        total = scaled.logsumexp(dim=-1)
        values, ids = scaled.topk(min(NUCLEUS_GUESS, vocab))
        mass = float((values - total).exp().sum())
        cut_by_min_p = params.min_p > 0 and float((values[-1] - values[0]).exp()) < params.min_p
        if len(values) < vocab and mass < params.top_p and not (cut_by_min_p and params.top_p >= 1):
            values, ids = scaled.sort(descending=True)
    if params.top_p < 1:
        probabilities = (values - total).exp()
        before = probabilities.cumsum(dim=-1) - probabilities
        keep = max(1, int((before < params.top_p).sum()))
        values, ids = values[:keep], ids[:keep]
    if params.min_p > 0:
        keep = max(1, int(((values - values[0]).exp() >= params.min_p).sum()))
        values, ids = values[:keep], ids[:keep]
    return values, ids


def token_logprobs(logits: Tensor, tokens: SequenceOf[int]) -> list[float]:
    """Log-probability of one token a row, without holding a normalised copy of the logits."""
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return (chosen - logits.logsumexp(dim=-1)).tolist()


def top_logprobs(row: Tensor, token: int, logprob: float, count: int) -> TokenLogprob:
    """The chosen token's log-probability and the `count` likeliest of its row, float32 [vocab]."""
    if count == 0:
        return TokenLogprob(token, logprob)
    values, ids = row.topk(min(count, len(row)))
    normalised = (values - row.logsumexp(dim=-1)).tolist()
    return TokenLogprob(token, logprob, tuple(zip(ids.tolist(), normalised, strict=True)))
