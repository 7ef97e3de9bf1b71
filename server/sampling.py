"""From what a request says of sampling to the model's own checks and the engine's SamplingParams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..engine.engine import LoadedModel
from ..models.base import GenerationRequest, Grammar, LogitsProbe, TextTokenizer
from ..models.logits import PromptLogprobs
from ..models.speech import OptionError
from ..models.text import TextProcessor
from ..models.text_sampling import ContextLengthError, SamplingOptions
from ..processors.inputs import MultiModalInputs
from . import errors
from .completions_protocol import CompletionBody
from .text_protocol import SamplingBody


def text_processor(model: LoadedModel) -> TextProcessor:
    """Raises ApiError 400 for a model of another kind."""
    processor = model.processor
    if not isinstance(processor, TextProcessor):
        message = f"The model {errors.shown(model.name)} does not generate text from text."
        raise errors.invalid("model", message, "unsupported_model")
    return processor


@contextmanager
def option_errors() -> Iterator[None]:
    """Says in the API's terms what a model's processor refuses."""
    try:
        yield
    except ContextLengthError as error:
        raise errors.invalid(error.param, str(error), error.code) from None
    except OptionError as error:
        raise errors.invalid(error.param, str(error), "invalid_value") from None


def sampling_options(body: SamplingBody, **more: Any) -> SamplingOptions:
    """The fields that all bodies share, and further ones."""
    return SamplingOptions(
        **{
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "min_p": body.min_p,
            "repetition_penalty": body.repetition_penalty,
            "presence_penalty": body.presence_penalty,
            "frequency_penalty": body.frequency_penalty,
            "logit_bias": tuple((int(token), bias) for token, bias in body.logit_bias.items()),
            "allowed_token_ids": None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
            "bad_words": tuple(body.bad_words),
            "seed": None if body.seed is None else body.seed % 2**63,
            "num_sequences": body.n,
            "min_tokens": body.min_tokens,
            "stop": body.stops,
            "stop_token_ids": tuple(body.stop_token_ids),
            "ignore_eos": body.ignore_eos,
            "include_stop": body.include_stop_str_in_output,
            "skip_special_tokens": body.skip_special_tokens,
            **more,
        }
    )


def checked_prompt(
    ids: Sequence[int], truncate: int | None, model: LoadedModel, param: str
) -> tuple[int, ...]:
    """A prompt's ids, cut to so many at its end where that was asked for. Raises ApiError 400."""
    vocab_size = text_processor(model).tokenizer.vocab_size
    if truncate is not None:
        ids = ids[-truncate:]
    if not ids:
        raise errors.invalid(param, f"{param} is empty: it has no tokens.")
    if max(ids) >= vocab_size:
        raise errors.invalid(param, f"{param} holds a token id that is not below {vocab_size}.")
    return tuple(ids)


def prompt_probe(ids: tuple[int, ...], *tops: int | None) -> LogitsProbe | None:
    """What reads a prompt's log-probabilities, as many of the likeliest as the most that any wants of `tops`;
    None where none wants any, or there is nothing to predict."""
    wanted = [top for top in tops if top is not None]
    return PromptLogprobs(ids, max(wanted)) if wanted and len(ids) > 1 else None


def prompt_ids(tokenizer: TextTokenizer, prompt: str | list[int], add_special_tokens: bool) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    return tokenizer.encode_prompt(prompt) if add_special_tokens else tokenizer.encode(prompt)


PromptText = tuple[tuple[int, ...], str]


def completion_requests(
    body: CompletionBody, model: LoadedModel, grammar: Grammar | None
) -> tuple[tuple[PromptText, ...], tuple[GenerationRequest, ...]]:
    """(ids and echoed text of each prompt, a request each). Raises ApiError 400."""
    processor = text_processor(model)
    tokenizer = processor.tokenizer
    sequences = (body.best_of or body.n) if body.max_tokens else 1
    options = sampling_options(
        body, max_tokens=body.max_tokens, num_sequences=sequences, logprobs=body.logprobs
    )
    prompts, requests = [], []
    for index, prompt in enumerate(body.prompts):
        ids = prompt_ids(tokenizer, prompt, body.add_special_tokens)
        checked = checked_prompt(ids, body.truncate_prompt_tokens, model, "prompt")
        echoed_logprobs = body.logprobs if body.echo else None
        probe = prompt_probe(checked, echoed_logprobs, body.prompt_logprobs)
        with option_errors():
            params = processor.sampling(
                options, checked, model.max_model_len, what="prompt", grammar=grammar, probe=probe
            )
        request = GenerationRequest(
            index, MultiModalInputs(checked), params, stream=True, cache_salt=body.cache_salt or ""
        )
        requests.append(request)
        echoed = ""
        if body.echo:
            echoed = prompt if isinstance(prompt, str) else tokenizer.decode(checked)
        prompts.append((checked, echoed))
    return tuple(prompts), tuple(requests)
