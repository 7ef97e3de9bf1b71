"""From a user's wishes about sampling to SamplingParams: defaults of the model, ids of words, bounds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..processors.text import TextTokenizer
from .base import Grammar, LogitsProbe, LogitsProcessor, SamplingParams
from .logits import (
    AllowedTokens,
    BadWords,
    LogitBias,
    MinTokens,
    PresenceFrequencyPenalty,
    RepetitionPenalty,
)
from .speech import OptionError


class ContextLengthError(OptionError):
    """A prompt, or a prompt and what is to follow it, is longer than the model's context."""

    code = "context_length_exceeded"


@dataclass(frozen=True)
class SamplingDefaults:
    """What holds where a user says nothing: OpenAI's values, unless the checkpoint recommends others."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> SamplingDefaults:
        """config: of generation_config.json. Values that are no numbers in range are not taken over."""
        bounds = {
            "temperature": (0.0, math.inf),
            "top_p": (1e-9, 1.0),
            "top_k": (0, math.inf),
            "min_p": (0.0, 1.0),
            "repetition_penalty": (1e-9, math.inf),
        }
        found: dict[str, Any] = {}
        for key, (low, high) in bounds.items():
            value = config.get(key)
            if not isinstance(value, int | float) or isinstance(value, bool):
                continue
            if low <= value <= high and math.isfinite(value):
                found[key] = int(value) if key == "top_k" else float(value)
        return cls(**found)


@dataclass(frozen=True)
class SamplingOptions:
    """A user's wishes in the terms of OpenAI's API and of vLLM's additions. None: the model's default.

    max_tokens: None for the rest of the context. logit_bias: (id, bias) pairs. stop: strings, stop_token_ids:
    further ids. logprobs: as in SamplingParams.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    seed: int | None = None
    num_sequences: int = 1
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None


def sampling_params(
    options: SamplingOptions,
    defaults: SamplingDefaults,
    tokenizer: TextTokenizer,
    prompt: Sequence[int],
    max_model_len: int,
    *,
    what: str = "messages",
    last: Iterable[LogitsProcessor] = (),
    grammar: Grammar | None = None,
    probe: LogitsProbe | None = None,
) -> SamplingParams:
    """what: the parameter that holds the prompt, for errors. last: processors behind all others.

    Raises OptionError, ContextLengthError.
    """
    max_tokens = _max_tokens(options, len(prompt), max_model_len, what)
    if options.min_tokens > max_tokens:
        raise OptionError("min_tokens", f"min_tokens is above the {max_tokens} tokens that may be sampled")
    _require_ids("stop_token_ids", options.stop_token_ids, tokenizer)
    stop_ids = end_ids(tokenizer) if not options.ignore_eos else ()
    stop_ids = tuple(dict.fromkeys((*stop_ids, *options.stop_token_ids)))
    chosen = {
        name: getattr(defaults if getattr(options, name) is None else options, name)
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    }
    penalty = chosen.pop("repetition_penalty")
    processors = _processors(options, penalty, tokenizer, prompt)
    if options.min_tokens and stop_ids:
        processors.append(MinTokens(stop_ids, options.min_tokens))
    return SamplingParams(
        max_tokens=max_tokens,
        **{**chosen, "top_k": max(chosen["top_k"], 0)},
        seed=options.seed,
        num_sequences=options.num_sequences,
        min_tokens=options.min_tokens,
        stop_token_ids=stop_ids,
        stop=tuple(dict.fromkeys(filter(None, options.stop))),
        include_stop=options.include_stop,
        detokenize=True,
        skip_special_tokens=options.skip_special_tokens,
        logprobs=options.logprobs,
        logits_processors=(*processors, *last),
        grammar=grammar,
        probe=probe,
    )


def end_ids(tokenizer: TextTokenizer) -> tuple[int, ...]:
    """The ids that end a generation, the text's own end first: the engine reports no stop reason for it."""
    first = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    return tuple(dict.fromkeys((*first, *tokenizer.stop_ids)))


def _max_tokens(options: SamplingOptions, num_prompt: int, max_model_len: int, what: str) -> int:
    limit = options.max_tokens
    if limit == 0 and num_prompt <= max_model_len:
        return 0
    if num_prompt >= max_model_len:
        raise ContextLengthError(
            what,
            f"This model's maximum context length is {max_model_len} tokens. However, your {what} resulted in "
            f"{num_prompt} tokens. Please reduce the length of the {what}.",
        )
    room = max_model_len - num_prompt
    if limit is not None and limit > room:
        raise ContextLengthError(
            what,
            f"This model's maximum context length is {max_model_len} tokens. However, you requested "
            f"{num_prompt + limit} tokens ({num_prompt} in the {what}, {limit} in the completion). "
            f"Please reduce the length of the {what} or completion.",
        )
    return room if limit is None else limit


def _require_ids(param: str, ids: Iterable[int], tokenizer: TextTokenizer) -> None:
    if any(not 0 <= token < tokenizer.vocab_size for token in ids):
        raise OptionError(param, f"{param} holds a token id that is not below {tokenizer.vocab_size}")


def _processors(
    options: SamplingOptions, repetition_penalty: float, tokenizer: TextTokenizer, prompt: Sequence[int]
) -> list[LogitsProcessor]:
    """Bias before penalties, masks last."""
    found: list[LogitsProcessor] = []
    if options.logit_bias:
        _require_ids("logit_bias", (token for token, _ in options.logit_bias), tokenizer)
        found.append(LogitBias(tuple(sorted(dict(options.logit_bias).items()))))
    if repetition_penalty != 1.0:
        found.append(RepetitionPenalty.of(repetition_penalty, prompt))
    if options.presence_penalty or options.frequency_penalty:
        found.append(PresenceFrequencyPenalty(options.presence_penalty, options.frequency_penalty))
    if options.allowed_token_ids is not None:
        _require_ids("allowed_token_ids", options.allowed_token_ids, tokenizer)
        found.append(AllowedTokens(tuple(sorted(set(options.allowed_token_ids)))))
    words = [ids for word in options.bad_words for ids in word_ids(word, tokenizer)]
    if words:
        found.append(BadWords(tuple(dict.fromkeys(words))))
    return found


def word_ids(word: str, tokenizer: TextTokenizer) -> list[tuple[int, ...]]:
    """The ids of a word at the beginning of a text and after a space."""
    texts = (word, " " + word.lstrip())
    return list(dict.fromkeys(ids for text in texts if (ids := tuple(tokenizer.encode(text)))))
