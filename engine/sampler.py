"""Chooses tokens from logits. It knows no model: rules come as logits processors, seeds from the requests."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from ..models.base import LogitsProcessor
from .request import Sequence


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
    """One token a row: the best one at temperature 0, else drawn with the sequence's own generator.

    Drawing follows torch's multinomial over softmax(logits / temperature), so that a seed gives the tokens
    that torch.distributions.Categorical gives with it.
    """
    tokens = logits.argmax(dim=-1).tolist()
    for row, sequence in enumerate(sequences):
        temperature = sequence.request.params.temperature
        if temperature > 0:
            probabilities = torch.softmax(logits[row] / temperature, dim=-1)
            tokens[row] = int(torch.multinomial(probabilities, 1, True, generator=sequence.generator))
    return tokens


def token_logprobs(logits: Tensor, tokens: SequenceOf[int]) -> list[float]:
    """Log-probability of one token a row, without holding a normalised copy of the logits."""
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return (chosen - logits.logsumexp(dim=-1)).tolist()
