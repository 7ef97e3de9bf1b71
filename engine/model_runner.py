"""Executes one model's share of a step: encode what is new, fill its cross pages, run the decoder."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from ..models.base import Model, MultiModalFeature
from .encoder_cache import EncoderCache
from .input_batch import InputBatch, ProbeRows, make_input_batch
from .kv_cache_manager import CacheGroups
from .metrics import EngineMetrics
from .request import Request
from .scheduler import SchedulerOutput

logger = logging.getLogger(__name__)

PROBE_ROWS = 64  # logits rows held at once for a probe: 64 x 150,000 float32 are 38 MB


def _identity(data: Tensor) -> Tensor:
    return data


def _pool(request: Request, hidden: Tensor) -> None:
    """Takes a piece of a prompt's hidden states, float32 [tokens, hidden], into the request's pooled vector."""
    if request.params.pooling == "last":
        request.pooled = hidden[-1].clone()
    else:
        total = hidden.sum(dim=0) / len(request.work.inputs.prompt_token_ids)
        request.pooled = total if request.pooled is None else request.pooled + total


@dataclass
class StepResult:
    """logits: float32 [len(batch.sampled), vocab], raw, one row a sequence that samples now.

    failed: requests whose media could not be encoded, with the cause; they took no part in the step.
    """

    batch: InputBatch | None
    logits: Tensor | None
    failed: dict[Request, Exception] = field(default_factory=dict)


class ModelRunner:
    """Runs one loaded model on the engine's thread."""

    def __init__(
        self,
        name: str,
        model: Model,
        groups: CacheGroups,
        encoder_cache: EncoderCache,
        metrics: EngineMetrics,
    ) -> None:
        self.name = name
        self.model = model
        self.groups = groups
        self.encoder_cache = encoder_cache
        self.metrics = metrics
        self.num_encoded = 0

    @torch.no_grad()
    def execute(self, output: SchedulerOutput) -> StepResult:
        """Runs the step. Side effects: cache pages, probe rows and alignment scores of the requests."""
        failed: dict[Request, Exception] = {}
        if output.encoder_requests:
            with self.metrics.stage("encode"):
                failed = self._fill_cross_pages(output.encoder_requests)
        if failed:
            # Whoever was admitted to share the pages of a failed item would read what was never written.
            bad = {r.cross_blocks[0] for r in failed if r.cross_blocks}
            for item in output.sequences:
                request = item.sequence.request
                if request.cross_blocks and request.cross_blocks[0] in bad and request not in failed:
                    failed[request] = RuntimeError("its media could not be encoded")
        sequences = [s for s in output.sequences if s.sequence.request not in failed]
        if not sequences:
            return StepResult(None, None, failed)
        batch = make_input_batch(sequences, self.groups)
        with self.metrics.stage("decode" if len(batch.input_ids) == len(sequences) else "prefill"):
            hidden = self.model.forward(batch.input_ids, batch.positions, batch.context)
            logits = None
            if batch.sampled:
                logits = self.model.compute_logits(hidden[batch.logits_rows[: len(batch.sampled)]])
        for probe in batch.probes:
            self._probe(probe, hidden[batch.logits_rows[probe.start : probe.start + len(probe.positions)]])
        for request, first, last in batch.pooled:
            _pool(request, hidden[first:last].float())
        for request, capture in batch.captures:
            request.alignment.append(capture.stacked())
        return StepResult(batch, logits, failed)

    def _probe(self, probe: ProbeRows, hidden: Tensor) -> None:
        """Reduces the logits of a request's probe, a slice at a time: never [prompt, vocab] at once."""
        wanted = probe.request.params.probe
        assert wanted is not None
        for first in range(0, len(probe.positions), PROBE_ROWS):
            positions = probe.positions[first : first + PROBE_ROWS]
            rows = self.model.compute_logits(hidden[first : first + PROBE_ROWS])
            reduced = wanted.reduce(positions, rows)
            probe.request.probe_rows.update(zip(positions, reduced, strict=True))

    def _fill_cross_pages(self, requests: list[Request]) -> dict[Request, Exception]:
        """Encodes the items of these requests, as far as no output is cached, and writes their cross pages."""
        failed: dict[Request, Exception] = {}
        outputs: dict[str, Tensor] = {}
        features: dict[str, MultiModalFeature] = {}
        for request in requests:
            item = request.encoder_item
            assert item is not None
            cached = self.encoder_cache.get((self.name, item.mm_hash))
            if cached is not None:
                outputs[item.mm_hash] = cached
                continue
            try:
                data = item.data()
            except Exception as error:
                logger.exception("media of a request could not be prepared")
                failed[request] = error
                continue
            features[item.mm_hash] = replace(item, data=partial(_identity, data))
        if features:
            encoded = self.model.embed_multimodal(list(features.values()))
            self.num_encoded += len(features)
            for mm_hash, embedding in zip(features, encoded, strict=True):
                # A copy of its own: a view would keep the whole batch alive in the cache.
                outputs[mm_hash] = embedding = embedding.clone() if len(features) > 1 else embedding
                self.encoder_cache.put((self.name, mm_hash), embedding)
        cross = self.groups.cross
        for request in requests:
            if request in failed or cross is None:
                continue
            item = request.encoder_item
            assert item is not None
            for layer, block in enumerate(request.cross_blocks):
                keys, values = self.model.cross_kv(outputs[item.mm_hash], layer)
                target = cross.view[block.slab, block.index]
                target[0].copy_(keys)
                target[1].copy_(values)
        return failed
