"""What requests for text may say about sampling: OpenAI's fields and vLLM's extra ones."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Len
from pydantic import Field, field_validator, model_validator

from . import errors
from .json_body import ONE_FAULT, Body

MAX_SEQUENCES = 128  # of one request, as with OpenAI
MAX_PROMPT_TOKENS = 1 << 21
MAX_LOGPROBS = 20
MAX_STOPS = 64
MAX_BIASES = 4096
MAX_BAD_WORDS = 1024
MAX_TOKEN_ID = 2**31 - 1

Seed = Annotated[int, Ge(-(2**63)), Le(2**64 - 1)]
TokenId = Annotated[int, Ge(0), Le(MAX_TOKEN_ID)]
Count = Annotated[int, Ge(0), Le(MAX_TOKEN_ID)]
Word = Annotated[str, Len(1, 4096)]
Penalty = Annotated[float, Ge(-2.0), Le(2.0)]
Probability = Annotated[float, Ge(0.0), Le(1.0)]
Bias = Annotated[float, Ge(-100.0), Le(100.0)]


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # accepted: nothing is padded here


class StructuredOutputs(Body):
    """vLLM's field of the same name: exactly one of its kinds."""

    json_: Annotated[str | dict[str, Any] | bool | None, Field(alias="json")] = None
    regex: Annotated[str | None, Len(1, 65_536)] = None
    choice: Annotated[list[Word] | None, Len(1, 1024), ONE_FAULT] = None
    grammar: Annotated[str | None, Len(1, 262_144)] = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        given = [v for v in self.__dict__.values() if v is not None and v is not False]
        if len(given) != 1:
            raise ValueError("give exactly one of json, regex, choice, grammar, json_object, structural_tag")
        return self


class JsonSchemaFormat(Body):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")] = Field(default_factory=dict)
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with type json_schema, and only with it")
        return self


class SamplingBody(Body):
    """The fields that chat completions and completions share."""

    model: Annotated[str, Len(1, 1024)]
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Ge(1), Le(MAX_SEQUENCES)] = 1
    seed: Seed | None = None
    max_tokens: Annotated[Count | None, Field(description="Most tokens to sample.")] = None
    temperature: Annotated[float, Ge(0.0), Le(2.0)] | None = None
    top_p: Annotated[float, Gt(0.0), Le(1.0)] | None = None
    top_k: Annotated[int, Ge(-1), Le(MAX_TOKEN_ID)] | None = None
    min_p: Probability | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Gt(0.0), Le(100.0)] | None = None
    logit_bias: Annotated[dict[str, Bias], Len(0, MAX_BIASES)] = Field(default_factory=dict)
    bad_words: Annotated[list[Word], Len(0, MAX_BAD_WORDS), ONE_FAULT] = Field(default_factory=list)
    min_tokens: Count = 0
    allowed_token_ids: Annotated[list[TokenId] | None, Len(1, MAX_BIASES), ONE_FAULT] = None
    ignore_eos: bool = False
    stop: str | Annotated[list[Word], Len(0, MAX_STOPS), ONE_FAULT] = Field(default_factory=list)
    stop_token_ids: Annotated[list[TokenId], Len(0, MAX_BIASES), ONE_FAULT] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: Annotated[str, Len(1, 1024)] | None = None
    priority: Annotated[int, Ge(-(2**31)), Le(2**31 - 1)] = 0
    truncate_prompt_tokens: Annotated[int, Ge(1), Le(MAX_TOKEN_ID)] | None = None
    # Read by nothing here; declared so that they are not called unknown.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_logprobs: Annotated[int, Ge(0), Le(MAX_LOGPROBS)] | None = None
    # Known and refused: silently doing something else would be worse.
    use_beam_search: Literal[False] = False

    @field_validator("logit_bias")
    @classmethod
    def _ids(cls, value: dict[str, float]) -> dict[str, float]:
        for key in value:
            if not (key.isascii() and key.isdecimal() and len(key) < 11):
                raise ValueError("keys must be token ids")
        return value

    @property
    def stops(self) -> tuple[str, ...]:
        given = [self.stop] if isinstance(self.stop, str) else self.stop
        return tuple(dict.fromkeys(text for text in given if text))

    @property
    def asks_for_structure(self) -> bool:
        plain = self.response_format is None or self.response_format.type == "text"
        return not plain or self.structured_outputs is not None

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def counts_all_along(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


def check_sampling(body: SamplingBody) -> None:
    """Checks what the shared parameters say together. Raises ApiError 400."""
    if body.stream_options is not None and not body.stream:
        raise errors.invalid("stream_options", "stream_options goes with stream=true only.")
    if body.prompt_logprobs is not None and body.stream:
        raise errors.invalid("prompt_logprobs", "prompt_logprobs cannot be streamed.")
    if body.response_format is not None and body.structured_outputs is not None:
        raise errors.invalid("structured_outputs", "Give response_format or structured_outputs, not both.")
