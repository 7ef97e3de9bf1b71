"""Beam search with patience, as openai/whisper does it (Kasai et al. 2022 for patience)."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class Branch:
    """The next step of one beam: which of the present beams it continues, with what token and score."""

    source: int
    token: int
    score: float


@dataclass
class BeamState:
    """Finished candidates of one request: (output ids without the stop token) → cumulative log-probability."""

    beam_size: int
    patience: float
    stop_token_ids: frozenset[int]
    finished: dict[tuple[int, ...], float] = field(default_factory=dict)

    @property
    def max_candidates(self) -> int:
        return max(1, round(self.beam_size * self.patience))

    @property
    def complete(self) -> bool:
        return len(self.finished) >= self.max_candidates

    def step(
        self, outputs: SequenceOf[SequenceOf[int]], scores: SequenceOf[float], logprobs: SequenceOf[Tensor]
    ) -> list[Branch]:
        """From the present beams (ids, cumulative scores, log-probabilities [vocab]) the next beam_size ones."""
        candidates: list[Branch] = []
        for source, (score, row) in enumerate(zip(scores, logprobs, strict=True)):
            values, tokens = row.topk(self.beam_size + 1)
            # Scores add up in float32, as in the reference, so that ties fall the same way.
            sums = np.float32(score) + values.numpy()
            candidates += [Branch(source, int(t), float(s)) for t, s in zip(tokens, sums, strict=True)]
        candidates.sort(key=lambda branch: branch.score, reverse=True)
        kept: list[Branch] = []
        ended: list[Branch] = []
        for branch in candidates:
            if branch.token in self.stop_token_ids:
                ended.append(branch)
                continue
            kept.append(branch)
            if len(kept) == self.beam_size:
                break
        for branch in ended:
            if self.complete:
                break
            self.finished[tuple(outputs[branch.source])] = branch.score
        return kept

    def close(self, outputs: SequenceOf[SequenceOf[int]], scores: SequenceOf[float]) -> None:
        """Fills up with unfinished beams, best first, when the length limit came before enough ended."""
        for index in np.argsort(np.array(scores, dtype=np.float32))[::-1]:
            if len(self.finished) >= self.beam_size:
                return
            self.finished[tuple(outputs[index])] = float(scores[index])
