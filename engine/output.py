"""The third verb of a step: turns logits into tokens, ends what is finished, branches what must branch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..models.base import Completion, GenerationOutput, TextTokenizer, TokenDelta
from .beam import BeamState
from .detokenizer import SequenceText
from .input_batch import InputBatch
from .request import Request, RequestStatus, Sequence
from .sampler import apply_processors, sample, token_logprobs, top_logprobs
from .scheduler import Scheduler
from .structured import constrain


class OutputProcessor:
    """Updates requests after a step and delivers those that are done."""

    def __init__(
        self,
        scheduler: Scheduler,
        deliver: Callable[[Request, GenerationOutput], None],
        fail: Callable[[Request, str], None],
    ) -> None:
        """fail: tells a request's owner why it ended; the request has been taken out by then."""
        self.scheduler = scheduler
        self.deliver = deliver
        self.fail = fail
        self.tokenizers: dict[str, TextTokenizer | None] = {}
        self.num_generated = 0

    def withdraw(self, request: Request) -> None:
        """Takes out a request whose new cross pages were not written, and the name of those pages."""
        if request.status is RequestStatus.FINISHED:
            return
        self.scheduler.kv.unname_cross(request)
        self.scheduler.finish(request)

    def update(self, batch: InputBatch, logits: Tensor | None) -> None:
        """logits: float32 [len(batch.sampled), vocab], raw; changed in place."""
        for scheduled in batch.scheduled:
            self.scheduler.kv.advance(scheduled.sequence, scheduled.end)
        if logits is not None and batch.sampled:
            sequences, logits = self._expand(batch.sampled, logits)
            sequences, logits = self._filter(sequences, logits)
            plain = [i for i, s in enumerate(sequences) if s.request.params.beam_size == 1]
            if plain:
                rows = logits if len(plain) == len(sequences) else logits[plain]
                self._append(rows, [sequences[i] for i in plain])
            for row, sequence in enumerate(sequences):
                if sequence.request.params.beam_size > 1:
                    sequence.waiting_logprobs = logits[row].log_softmax(dim=-1)
        for request in dict.fromkeys(s.sequence.request for s in batch.scheduled):
            if request.params.beam_size > 1 and all(
                s.waiting_logprobs is not None for s in request.sequences
            ):
                self._step_beams(request)
            if self._is_done(request):
                self._finish(request)

    def _expand(self, sampled: list[Sequence], logits: Tensor) -> tuple[list[Sequence], Tensor]:
        """Branches each prompt that has just been computed into as many sequences as were asked for."""
        sequences: list[Sequence] = []
        rows: list[int] = []
        for row, sequence in enumerate(sampled):
            request = sequence.request
            sequences.append(sequence)
            rows.append(row)
            if not request.expanded:
                request.expanded = True
                self._begin_text(sequence)
                for index in range(1, request.params.num_sequences):
                    child = self.scheduler.fork(sequence, index)
                    child.generator = request.make_generator(index)
                    self._begin_text(child)
                    request.sequences.append(child)
                    sequences.append(child)
                    rows.append(row)
        return sequences, logits if len(rows) == len(sampled) else logits[rows]

    def _filter(self, sequences: list[Sequence], logits: Tensor) -> tuple[list[Sequence], Tensor]:
        """Applies rules and grammars; requests that are left without a token to choose end here."""
        apply_processors(logits, sequences)
        reasons: dict[int, str] = {}
        if any(s.matcher is not None for s in sequences):
            failed = constrain(logits, [s.matcher for s in sequences])
            reasons = {row: str(error) for row, error in failed.items()}
        # -inf: everything is forbidden; NaN: the weights or the input were broken.
        for row in (~logits.amax(dim=-1).isfinite()).nonzero().flatten().tolist():
            reasons.setdefault(row, "no token is left to choose from")
        if not reasons:
            return sequences, logits
        ended = {sequences[row].request: reason for row, reason in reasons.items()}
        for request, reason in ended.items():
            self.scheduler.finish(request)
            self.fail(request, reason)
        kept = [row for row, s in enumerate(sequences) if s.request not in ended]
        return [sequences[row] for row in kept], logits[kept]

    def _begin_text(self, sequence: Sequence) -> None:
        params = sequence.request.params
        if params.detokenize:
            tokenizer = self.tokenizers[sequence.request.model]
            assert tokenizer is not None, "text was asked for from a model without a tokenizer"
            sequence.detokenizer = SequenceText(tokenizer, params)

    def _append(self, logits: Tensor, sequences: list[Sequence]) -> None:
        tokens = sample(logits, sequences)
        self.num_generated += len(tokens)
        logprobs = token_logprobs(logits, tokens)
        for row, (sequence, token, logprob) in enumerate(zip(sequences, tokens, logprobs, strict=True)):
            params = sequence.request.params
            sequence.cumulative_logprob += logprob
            if sequence.matcher is not None:
                sequence.matcher.accept(token)
            stopped = token in params.stop_token_ids
            if not stopped:
                sequence.token_ids.append(token)
                if params.logprobs is not None:
                    sequence.logprobs.append(top_logprobs(logits[row], token, logprob, params.logprobs))
            self._conclude(sequence, token, stopped)

    def _conclude(self, sequence: Sequence, token: int, stopped: bool) -> None:
        """Makes text of the new token, decides whether the sequence ends, and publishes what is new."""
        request, params = sequence.request, sequence.request.params
        fresh, stop_string = "", None
        text = sequence.detokenizer
        if text is not None and not stopped:
            fresh, stop_string = text.add((token,), watch=sequence.num_outputs > params.min_tokens)
        if stop_string is not None:
            sequence.finish_reason, sequence.stop_reason = "stop", stop_string
        elif stopped:
            sequence.finish_reason = "stop"
            sequence.stop_reason = None if token == params.stop_token_ids[0] else token
        elif sequence.num_outputs >= params.max_tokens:
            sequence.finish_reason = "length"
        if text is not None and sequence.finish_reason is not None and stop_string is None:
            fresh += text.finish()
        if request.work.stream:
            request.owner.publish(
                TokenDelta(
                    request.work.key,
                    sequence.index,
                    () if stopped else (token,),
                    fresh,
                    sequence.finish_reason,
                    sequence.stop_reason,
                    tuple(sequence.logprobs[-1:]) if params.logprobs is not None and not stopped else None,
                )
            )
        if sequence.finish_reason is not None:
            self.scheduler.kv.release(sequence)
            request.sequences.remove(sequence)
            request.finished.append(sequence)

    def _step_beams(self, request: Request) -> None:
        params = request.params
        if request.beam is None:
            request.beam = BeamState(params.beam_size, params.patience, frozenset(params.stop_token_ids))
        state = request.beam
        beams = list(request.sequences)
        scores = [s.cumulative_logprob for s in beams]
        rows = [s.waiting_logprobs for s in beams if s.waiting_logprobs is not None]
        branches = state.step([s.output_ids for s in beams], scores, rows)
        places: dict[int, list[int]] = {}
        for place, branch in enumerate(branches):
            places.setdefault(branch.source, []).append(place)
        successors: dict[int, Sequence] = {}
        for source, sequence in enumerate(beams):
            sequence.waiting_logprobs = None
            if source not in places:
                self.scheduler.kv.release(sequence)
                continue
            # Forks first: the pages of the parent go on as those of its best child.
            best, *others = places[source]
            successors |= {place: self.scheduler.fork(sequence, 0) for place in others}
            successors[best] = sequence
        request.sequences = [successors[place] for place in range(len(branches))]
        for branch, sequence in zip(branches, request.sequences, strict=True):
            sequence.token_ids.append(branch.token)
            sequence.cumulative_logprob = branch.score
        length = request.sequences[0].num_outputs if branches else 0
        if state.complete or not branches or length >= params.max_tokens:
            outputs = [s.output_ids for s in request.sequences]
            state.close(outputs, [s.cumulative_logprob for s in request.sequences])
            for sequence in request.sequences:
                self.scheduler.kv.release(sequence)
            request.sequences = []

    def _is_done(self, request: Request) -> bool:
        if request.status is RequestStatus.FINISHED:
            return False
        if request.params.max_tokens == 0:
            return request.sequences[0].num_uncomputed == 0
        return not request.sequences

    def _finish(self, request: Request) -> None:
        params = request.params
        if request.beam is not None:
            completions = tuple(
                Completion(ids, score, "length" if len(ids) >= params.max_tokens else "stop")
                for ids, score in request.beam.finished.items()
            )
        else:
            completions = tuple(
                Completion(
                    tuple(s.output_ids),
                    s.cumulative_logprob,
                    "stop" if s.finish_reason == "stop" else "length",
                    s.detokenizer.text if s.detokenizer else "",
                    s.stop_reason,
                    tuple(s.logprobs) if params.logprobs is not None else None,
                )
                for s in sorted(request.finished, key=lambda s: s.index)
            )
        probe = None
        if params.probe is not None:
            probe = torch.stack([request.probe_rows[p] for p in params.probe.positions])
        alignment = torch.cat(request.alignment, dim=1) if request.alignment else None
        output = GenerationOutput(
            request.work.key, completions, probe, alignment, request.pooled, request.num_cached_tokens or 0
        )
        self.scheduler.finish(request)
        self.deliver(request, output)
