"""What a completion request may say."""

from __future__ import annotations

from typing import Annotated, Any

from annotated_types import Ge, Le, Len

from . import errors
from .json_body import ONE_FAULT
from .text_protocol import MAX_LOGPROBS, MAX_PROMPT_TOKENS, Count, SamplingBody, TokenId, check_sampling

MAX_PROMPTS = 2048
DEFAULT_MAX_TOKENS = 16  # as with OpenAI

Ids = Annotated[list[TokenId], Len(1, MAX_PROMPT_TOKENS), ONE_FAULT]
Texts = Annotated[list[str], Len(1, MAX_PROMPTS), ONE_FAULT]
Prompt = str | Ids | Texts | Annotated[list[Ids], Len(1, MAX_PROMPTS), ONE_FAULT]


def prompts_of(prompt: Any) -> list[str | list[int]]:
    """The prompts of a `Prompt`, one or several."""
    single = isinstance(prompt, str) or isinstance(prompt[0], int)
    return [prompt] if single else prompt


class CompletionBody(SamplingBody):
    """POST /v1/completions. The defaults are OpenAI's, in both senses."""

    prompt: Prompt
    max_tokens: Count | None = DEFAULT_MAX_TOKENS
    echo: bool = False
    logprobs: Annotated[int, Ge(0), Le(MAX_LOGPROBS)] | None = None
    best_of: Annotated[int, Ge(1), Le(128)] | None = None
    add_special_tokens: bool = True
    suffix: str | None = None
    prompt_embeds: Any = None

    @property
    def prompts(self) -> list[str | list[int]]:
        return prompts_of(self.prompt)


def check_completion(body: CompletionBody) -> None:
    """Checks what parameters say together, and refuses what is not there. Raises ApiError 400."""
    check_sampling(body)
    if body.suffix:
        raise errors.invalid("suffix", "suffix is not supported.", "unsupported_value")
    if body.prompt_embeds is not None:
        raise errors.invalid("prompt_embeds", "prompt_embeds is not supported.", "unsupported_value")
    if body.best_of is not None and body.best_of < body.n:
        raise errors.invalid("best_of", "best_of must be at least n.")
    if body.best_of is not None and body.best_of > body.n and body.stream:
        raise errors.invalid("best_of", "best_of above n cannot be streamed.")
    if body.echo and body.logprobs is not None and body.stream:
        raise errors.invalid("logprobs", "logprobs of an echoed prompt cannot be streamed.")
    if body.max_tokens == 0 and not body.echo:
        raise errors.invalid("max_tokens", "max_tokens=0 needs echo=true: nothing would be answered.")
    sequences = len(body.prompts) * max(body.n, body.best_of or 1)
    if sequences > MAX_PROMPTS:
        raise errors.invalid("prompt", f"A request may ask for at most {MAX_PROMPTS} texts, not {sequences}.")
