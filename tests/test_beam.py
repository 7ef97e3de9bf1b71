"""Beam search against openai/whisper's own decoder, step by step on random log-probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sensorium.engine.beam import BeamState
from whisper.decoding import BeamSearchDecoder

EOT = 0


class Rearranged:
    def rearrange_kv_cache(self, source_indices: list[int]) -> None:
        self.sources = source_indices


def reference(tables: list[torch.Tensor], beam_size: int, patience: float) -> dict[tuple[int, ...], float]:
    decoder = BeamSearchDecoder(beam_size, EOT, Rearranged(), patience)
    tokens = torch.full((beam_size, 1), 7)
    scores = torch.zeros(beam_size)
    for table in tables:
        # The row depends on the last token only, so equal beams see equal rows.
        tokens, completed = decoder.update(tokens, table[tokens[:, -1]], scores)
        if completed:
            break
    ended, sums = decoder.finalize(tokens[None], scores[None])
    result = {}
    for sequence, score in zip(ended[0], sums[0], strict=True):
        ids = sequence.tolist()
        result[tuple(ids[1 : ids.index(EOT)])] = score
    return result


def ours(tables: list[torch.Tensor], beam_size: int, patience: float) -> dict[tuple[int, ...], float]:
    state = BeamState(beam_size, patience, frozenset({EOT}))
    beams: list[tuple[list[int], float]] = [([], 0.0)]
    for table in tables:
        rows = [table[ids[-1] if ids else 7].log_softmax(-1) for ids, _ in beams]
        branches = state.step([ids for ids, _ in beams], [score for _, score in beams], rows)
        beams = [([*beams[b.source][0], b.token], b.score) for b in branches]
        if state.complete:
            break
    state.close([ids for ids, _ in beams], [score for _, score in beams])
    return state.finished


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 10_000),
    steps=st.integers(1, 8),
    beam_size=st.integers(2, 8),
    patience=st.sampled_from([0.5, 1.0, 2.0]),
)
def test_same_candidates_and_scores_as_the_reference(
    seed: int, steps: int, beam_size: int, patience: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tables = [torch.randn(20, 20, generator=generator) * 2 for _ in range(steps)]
    want, got = reference(tables, beam_size, patience), ours(tables, beam_size, patience)
    assert list(got) == list(want)
    assert list(got.values()) == pytest.approx(list(want.values()), abs=1e-5)


def test_close_fills_up_with_the_best_unfinished_beams() -> None:
    state = BeamState(3, 1.0, frozenset({EOT}), {(1,): -1.0})
    state.close([[2], [3], [4]], [-5.0, -2.0, -3.0])
    assert state.finished == {(1,): -1.0, (3,): -2.0, (4,): -3.0}


def test_masked_tokens_are_never_kept_while_others_remain() -> None:
    row = torch.full((10,), -np.inf)
    row[[EOT, 4, 5]] = torch.tensor([-0.1, -1.0, -2.0])
    branches = BeamState(2, 1.0, frozenset({EOT})).step([[]], [0.0], [row])
    assert [b.token for b in branches] == [4, 5]
