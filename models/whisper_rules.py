"""Whisper's rules on what may be sampled next, and the questions asked of unfiltered logits.

The rules are those of Radford et al. 2022, section 4.5, and of the reference decoder; they are applied in the
order SuppressBlank, SuppressTokens, TimestampRules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .base import LogitsProcessor
from .whisper_tokenizer import WhisperTokenizer

MAX_INITIAL_TIMESTAMP_INDEX = 50  # 1.00 s: speech has to begin within the window's first second


@lru_cache(maxsize=64)
def _index(ids: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64, device=device)


@dataclass(frozen=True)
class SuppressBlank:
    """The first token is neither of `ids` (a lone space, the end of text)."""

    ids: tuple[int, ...]

    def __call__(self, logits: Tensor, outputs: Sequence[Sequence[int]]) -> None:
        for row, sampled in enumerate(outputs):
            if not sampled:
                logits[row, _index(self.ids, logits.device)] = -math.inf


@dataclass(frozen=True)
class SuppressTokens:
    """`ids` are never sampled."""

    ids: tuple[int, ...]

    def __call__(self, logits: Tensor, outputs: Sequence[Sequence[int]]) -> None:
        logits.index_fill_(1, _index(self.ids, logits.device), -math.inf)


@dataclass(frozen=True)
class TimestampRules:
    """Timestamps come in pairs that close one segment and open the next, and never go back.

    All ids from `timestamp_begin` on are timestamps; text ids lie below `eot`.
    """

    eot: int
    no_timestamps: int
    timestamp_begin: int
    max_initial_index: int | None = MAX_INITIAL_TIMESTAMP_INDEX

    def __call__(self, logits: Tensor, outputs: Sequence[Sequence[int]]) -> None:
        begin = self.timestamp_begin
        logits[:, self.no_timestamps] = -math.inf
        for row, sampled in enumerate(outputs):
            if sampled:
                self._continue(logits[row], sampled)
            else:
                logits[row, :begin] = -math.inf
                if self.max_initial_index is not None:
                    logits[row, begin + self.max_initial_index + 1 :] = -math.inf

        # When time as a whole is likelier than the likeliest other token, it has to be a timestamp. Both
        # sides share the softmax's denominator, so logits are compared.
        time_mass = logits[:, begin:].logsumexp(dim=-1)
        best_other = logits[:, :begin].amax(dim=-1)
        for row in torch.nonzero(time_mass > best_other).flatten().tolist():
            logits[row, :begin] = -math.inf

    def _continue(self, logits: Tensor, sampled: Sequence[int]) -> None:
        """logits: float32 [vocab], changed in place. sampled: at least one id."""
        begin = self.timestamp_begin
        after_timestamp = sampled[-1] >= begin
        closes_segment = after_timestamp and len(sampled) >= 2 and sampled[-2] < begin
        if closes_segment:
            logits[: self.eot] = -math.inf
        elif after_timestamp:
            logits[begin:] = -math.inf

        last = next((token for token in reversed(sampled) if token >= begin), None)
        if last is not None:
            # The pair that opens right where a segment closed may repeat its time; else time must pass, or
            # an empty segment could be sampled for ever.
            logits[begin : last if closes_segment else last + 1] = -math.inf


def decoding_rules(tokenizer: WhisperTokenizer) -> tuple[LogitsProcessor, ...]:
    """The rules of every transcription with one model."""
    return (
        SuppressBlank((*tokenizer.encode(" "), tokenizer.eot)),
        SuppressTokens(tokenizer.suppressed_tokens),
        TimestampRules(tokenizer.eot, tokenizer.no_timestamps, tokenizer.timestamp_begin),
    )


@dataclass(frozen=True)
class NoSpeechProbe:
    """Probability of <|nospeech|> right after <|startoftranscript|>: reduces to float32 [1]."""

    position: int
    no_speech: int

    @property
    def positions(self) -> Sequence[int]:
        return (self.position,)

    def reduce(self, positions: Sequence[int], logits: Tensor) -> Tensor:
        return logits.float().softmax(dim=-1)[:, self.no_speech]


@dataclass(frozen=True)
class LanguageProbe:
    """Logits of the language tokens, `first` … `first + count - 1`: reduces to float32 [1, count]."""

    position: int
    first: int
    count: int

    @property
    def positions(self) -> Sequence[int]:
        return (self.position,)

    def reduce(self, positions: Sequence[int], logits: Tensor) -> Tensor:
        return logits[:, self.first : self.first + self.count].float()


@dataclass(frozen=True)
class TokenProbabilityProbe:
    """Probability of each text token among all text tokens: reduces to float32 [len(token_ids)].

    first_position: the prompt position that predicts token_ids[0]. Ids from `eot` on take no part.
    """

    first_position: int
    token_ids: tuple[int, ...]
    eot: int

    @property
    def positions(self) -> Sequence[int]:
        return range(self.first_position, self.first_position + len(self.token_ids))

    def reduce(self, positions: Sequence[int], logits: Tensor) -> Tensor:
        ids = [self.token_ids[position - self.first_position] for position in positions]
        probabilities = logits[:, : self.eot].float().softmax(dim=-1)
        return probabilities.gather(1, torch.tensor(ids, device=logits.device)[:, None])[:, 0]
