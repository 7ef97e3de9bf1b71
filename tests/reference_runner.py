"""Runs a program on openai-whisper's own model, one request at a time: nothing of ours but the program.

Sampling, beam search and scoring are the reference's decoder classes, so whatever differs from the
reference's transcription comes from the program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numba
import numpy as np
import pytest
import torch
import whisper
from sensorium.models.base import Completion, GenerationOutput, GenerationRequest, Program
from sensorium.models.speech import TranscriptionOptions
from sensorium.models.whisper_seek import WhisperThresholds, temperature_ladder
from torch import Tensor
from whisper import timing
from whisper.decoding import BeamSearchDecoder, GreedyDecoder, PyTorchInference
from whisper.model import Whisper, disable_sdpa

REFERENCE_THRESHOLDS = WhisperThresholds()

# The reference's time warping asks numba for threads without using them; once they run, every later torch call
# of the process is slowed down about tenfold. The same function, compiled without.
serial_dtw = numba.njit(timing.dtw_cpu.py_func)


@dataclass
class ReferenceRunner:
    """`encoded`: the hash of every window that was encoded, in order. `requests`: all that were run."""

    model: Whisper
    encoded: list[str] = field(default_factory=list)
    requests: list[GenerationRequest] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)
    _features: dict[str, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def run(self, program: Program, newest_first: bool = False) -> Any:
        """newest_first: answers the youngest outstanding request first, the oldest otherwise."""
        waiting = list(program.start())
        self.events += program.take_events()
        while waiting:
            request = waiting.pop(-1 if newest_first else 0)
            self.requests.append(request)
            waiting += program.accept(self._answer(request))
            self.events += program.take_events()
        return program.result()

    def _encode(self, request: GenerationRequest) -> Tensor:
        """[1, n_audio_ctx, n_audio_state]"""
        (feature,) = request.inputs.mm_features
        if feature.mm_hash not in self._features:
            self.encoded.append(feature.mm_hash)
            self._features[feature.mm_hash] = self.model.encoder(feature.data()[None])
        return self._features[feature.mm_hash]

    def _answer(self, request: GenerationRequest) -> GenerationOutput:
        params, prompt = request.params, torch.tensor([request.inputs.prompt_token_ids])
        audio = self._encode(request)
        if params.max_tokens == 0:
            logits, scores = self._prompt_pass(prompt, audio, params.alignment_heads)
            completions: tuple[Completion, ...] = ()
        else:
            logits, completions = self._sample(request, prompt, audio)
            scores = None
        probe = None
        if params.probe is not None:
            positions = list(params.probe.positions)
            probe = params.probe.reduce(positions, logits[0, positions].clone())
        return GenerationOutput(request.key, completions, probe, scores)

    def _prompt_pass(
        self, prompt: Tensor, audio: Tensor, heads: tuple[tuple[int, int], ...]
    ) -> tuple[Tensor, Tensor | None]:
        if not heads:
            return self.model.logits(prompt, audio), None
        scores: dict[int, Tensor] = {}
        hooks = [
            block.cross_attn.register_forward_hook(
                lambda _, inputs, outputs, layer=layer: scores.__setitem__(layer, outputs[1][0])
            )
            for layer, block in enumerate(self.model.decoder.blocks)
        ]
        with disable_sdpa():
            logits = self.model.logits(prompt, audio)
        for hook in hooks:
            hook.remove()
        return logits, torch.stack([scores[layer][head] for layer, head in heads])

    def _sample(
        self, request: GenerationRequest, prompt: Tensor, audio: Tensor
    ) -> tuple[Tensor, tuple[Completion, ...]]:
        params = request.params
        (eot,) = params.stop_token_ids
        begin = prompt.shape[1]
        rows = max(params.num_sequences, params.beam_size)
        inference = PyTorchInference(self.model, begin)
        if params.beam_size > 1:
            decoder = BeamSearchDecoder(params.beam_size, eot, inference, params.patience)
        else:
            decoder = GreedyDecoder(params.temperature, eot)
        if params.seed is not None:
            torch.manual_seed(params.seed)
        tokens, sums = prompt.repeat(rows, 1), torch.zeros(rows)
        first_logits = None
        for _ in range(params.max_tokens):
            logits = inference.logits(tokens, audio.expand(rows, -1, -1))
            if first_logits is None:
                first_logits = logits.clone()
            logits = logits[:, -1]
            for processor in params.logits_processors:
                processor(logits, tokens[:, begin:].tolist())
            tokens, completed = decoder.update(tokens, logits, sums)
            if completed:
                break
        inference.cleanup_caching()
        candidates, scores = decoder.finalize(tokens[None], sums[None])
        assert first_logits is not None
        return first_logits, tuple(
            self._completion(candidate[begin:].tolist(), score, eot, params.max_tokens)
            for candidate, score in zip(candidates[0], np.asarray(scores[0]).tolist(), strict=True)
        )

    def _completion(self, ids: list[int], score: float, eot: int, limit: int) -> Completion:
        length = ids.index(eot)
        return Completion(tuple(ids[:length]), score, "length" if length == limit else "stop")


@dataclass(frozen=True)
class Attempt:
    """One try at a window: what it was sampled with."""

    temperature: float
    seed: int | None


def attempts(requests: Sequence[GenerationRequest]) -> list[Attempt]:
    """The tries among a program's requests, in order."""
    return [
        Attempt(request.params.temperature, request.params.seed)
        for request in requests
        if request.key.step == "decode"
    ]


def reference_transcribe(
    model: Whisper,
    audio: np.ndarray,
    options: TranscriptionOptions,
    tries: Sequence[Attempt] = (),
    thresholds: WhisperThresholds = REFERENCE_THRESHOLDS,
) -> dict[str, Any]:
    """openai-whisper's transcription with the same wishes; the speech gate and chunking are not its own.

    tries: the attempts that ours made; the reference is seeded as they were and has to make the same ones.
    """
    remaining = list(tries)
    decode = type(model).decode

    def seeded(segment: Tensor, wishes: whisper.DecodingOptions) -> whisper.DecodingResult:
        ours = remaining.pop(0)
        assert ours.temperature == wishes.temperature
        if ours.seed is not None:
            torch.manual_seed(ours.seed)
        return decode(model, segment, wishes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "dtw_cpu", serial_dtw)
        if tries:
            patch.setattr(model, "decode", seeded)
        result = whisper.transcribe(
            model,
            audio,
            fp16=False,
            task=options.task,
            language=options.language,
            temperature=temperature_ladder(options.temperature, options.temperature_fallback),
            beam_size=options.beam_size if options.beam_size > 1 else None,
            best_of=options.best_of if options.best_of > 1 else None,
            initial_prompt=options.prompt,
            condition_on_previous_text=options.condition_on_previous_text,
            word_timestamps=options.word_timestamps or options.hallucination_silence_threshold is not None,
            hallucination_silence_threshold=options.hallucination_silence_threshold,
            clip_timestamps=list(options.clip_timestamps) or "0",
            compression_ratio_threshold=thresholds.compression_ratio,
            logprob_threshold=thresholds.logprob,
            no_speech_threshold=thresholds.no_speech,
        )
    assert not remaining, "ours tried more often"
    return result
