"""Logits processors for every model: what users may ask of sampling beyond temperature and truncation.

Each is a hashable value; rows whose processors are equal are filtered in one call. The order that matters
(bias before penalties, masks last) is the caller's. Formulas: OpenAI's API reference for the bias and for
presence and frequency penalties; Keskar et al. 2019 (CTRL), section 4.1, for the repetition penalty, with the
sign rule of the field (negative logits are multiplied).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor


def _rows_and_ids(outputs: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """All sampled ids with the row of each, both int64 [total]."""
    lengths = [len(sampled) for sampled in outputs]
    rows = np.repeat(np.arange(len(outputs)), lengths)
    ids = np.fromiter(itertools.chain.from_iterable(outputs), np.int64, sum(lengths))
    return torch.from_numpy(rows).to(device), torch.from_numpy(ids).to(device)


def ends_with(sampled: Sequence[int], ids: Sequence[int]) -> bool:
    """Whether a list of ids ends in `ids`; every list ends in an empty one."""
    return len(ids) <= len(sampled) and list(sampled[len(sampled) - len(ids) :]) == list(ids)


@dataclass(frozen=True)
class _IdSet:
    """A processor about a fixed set of ids, whose index tensor is made once."""

    ids: tuple[int, ...]

    @cached_property
    def index(self) -> Tensor:
        return torch.tensor(self.ids, dtype=torch.int64)


@dataclass(frozen=True)
class LogitBias:
    """Adds to logits: `biases` holds (token id, bias) pairs with distinct ids."""

    biases: tuple[tuple[int, float], ...]

    @cached_property
    def _tensors(self) -> tuple[Tensor, Tensor]:
        ids = torch.tensor([token for token, _ in self.biases], dtype=torch.int64)
        return ids, torch.tensor([bias for _, bias in self.biases], dtype=torch.float32)

    def __call__(self, logits: Tensor, outputs: Sequence[Sequence[int]]) -> None:
        ids, values = (part.to(logits.device) for part in self._tensors)
        logits[:, ids] += values


@dataclass(frozen=True)
class AllowedTokens(_IdSet):
    """Nothing but `ids` is ever sampled."""

    def __call__(self, logits: Tensor, outputs: Sequence[Sequence[int]]) -> None:
        ids = self.index.to(logits.device)
        kept = logits[:, ids]
        logits.fill_(-math.inf)
        logits[:, ids] = kept


@dataclass(frozen=True)
class MinTokens(_IdSet):
    """`ids`, the stop tokens, are not sampled before `min_tokens` others were."""

    min_tokens: int

    def __call__(self, logits: Tensor, outputs: Sequence[Sequence[int]]) -> None:
        rows = [row for row, sampled in enumerate(outputs) if len(sampled) < self.min_tokens]
        if rows:
            early = torch.tensor(rows, device=logits.device)
            logits[early[:, None], self.index.to(logits.device)[None]] = -math.inf


@dataclass(frozen=True)
class BadWords:
    """No word of `words`, each a sequence of at least one id, is ever completed in the output."""

    words: tuple[tuple[int, ...], ...]

    def __call__(self, logits: Tensor, outputs: Sequence[Sequence[int]]) -> None:
        banned = [
            (row, word[-1])
            for row, sampled in enumerate(outputs)
            for word in self.words
            if ends_with(sampled, word[:-1])
        ]
        if banned:
            rows, ids = torch.tensor(banned, device=logits.device).T
            logits[rows, ids] = -math.inf


@dataclass(frozen=True)
class PresenceFrequencyPenalty:
    """logit[t] -= frequency · count(t) + presence · [count(t) > 0], counts over the output alone."""

    presence: float
    frequency: float

    def __call__(self, logits: Tensor, outputs: Sequence[Sequence[int]]) -> None:
        rows, ids = _rows_and_ids(outputs, logits.device)
        places, counts = torch.unique(rows * logits.shape[1] + ids, return_counts=True)
        penalty = self.frequency * counts.to(logits.dtype) + self.presence
        logits[places // logits.shape[1], places % logits.shape[1]] -= penalty


@dataclass(frozen=True)
class RepetitionPenalty:
    """Divides positive logits of tokens seen in the prompt or the output by `penalty`, multiplies others.

    penalty > 0; above 1 it discourages repetition. prompt_ids: distinct ids of the prompt, ascending.
    """

    penalty: float
    prompt_ids: tuple[int, ...]

    @classmethod
    def of(cls, penalty: float, prompt: Iterable[int]) -> RepetitionPenalty:
        return cls(penalty, tuple(sorted(set(prompt))))

    @cached_property
    def _prompt(self) -> Tensor:
        return torch.tensor(self.prompt_ids, dtype=torch.int64)

    def __call__(self, logits: Tensor, outputs: Sequence[Sequence[int]]) -> None:
        prompt = self._prompt.to(logits.device)
        rows, ids = _rows_and_ids(outputs, logits.device)
        # Both are read before either is written: what is in both is penalised once.
        asked, said = self._penalised(logits[:, prompt]), self._penalised(logits[rows, ids])
        logits[:, prompt] = asked
        logits[rows, ids] = said

    def _penalised(self, values: Tensor) -> Tensor:
        return torch.where(values > 0, values / self.penalty, values * self.penalty)


@dataclass(frozen=True)
class PromptLogprobs:
    """A probe: how likely each prompt token after the first was, without keeping a row of the vocabulary.

    It reduces each position to float32 [2 + 2 · top]: the token's log-probability, its rank (1 is the
    likeliest), then the likeliest ids, then their log-probabilities. Ids up to 2^24 are exact in float32.
    """

    token_ids: tuple[int, ...]
    top: int = 0

    @property
    def positions(self) -> Sequence[int]:
        return range(len(self.token_ids) - 1)

    def reduce(self, positions: Sequence[int], logits: Tensor) -> Tensor:
        following = torch.tensor([self.token_ids[p + 1] for p in positions], device=logits.device)
        chosen = logits.gather(1, following[:, None])
        total = logits.logsumexp(dim=-1, keepdim=True)
        rank = (logits > chosen).sum(dim=-1, keepdim=True) + 1
        best = logits.topk(self.top, dim=-1)
        return torch.cat([chosen - total, rank, best.indices, best.values - total], dim=-1).float()
