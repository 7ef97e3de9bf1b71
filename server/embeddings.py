"""POST /v1/embeddings."""

from __future__ import annotations

import base64
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Le, Len
from fastapi import APIRouter, Request
from numpy.typing import NDArray
from starlette.responses import Response

from ..engine.engine import LoadedModel
from ..models.base import GenerationOutput, GenerationRequest
from ..models.text_sampling import SamplingOptions
from ..processors.inputs import MultiModalInputs
from . import errors
from .completions_protocol import Prompt, prompts_of
from .context import Context, context_of
from .disconnect import unless_gone
from .generation import Work, in_worker, start
from .json_body import Body, body_schema, parse
from .sampling import checked_prompt, option_errors, prompt_ids, text_processor
from .text_protocol import MAX_TOKEN_ID

logger = logging.getLogger(__name__)
router = APIRouter(tags=["embeddings"])
PATH = "/v1/embeddings"


class EmbeddingsBody(Body):
    """OpenAI's fields, and vLLM's for the prompt. pooling: the last or the mean hidden state of an input;
    models that read from left to right have seen all of it at its last token, which is the default."""

    model: Annotated[str, Len(1, 1024)]
    input: Prompt
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Ge(1), Le(MAX_TOKEN_ID)] | None = None
    pooling: Literal["last", "mean"] = "last"
    add_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int, Ge(1), Le(MAX_TOKEN_ID)] | None = None
    cache_salt: Annotated[str, Len(1, 1024)] | None = None
    priority: Annotated[int, Ge(-(2**31)), Le(2**31 - 1)] = 0
    user: str | None = None  # read by nothing; declared so that it is not called unknown


@dataclass(frozen=True)
class EmbeddingsWork(Work):
    body: EmbeddingsBody


@router.post(PATH, **body_schema(EmbeddingsBody, PATH))
async def embeddings(request: Request) -> Response:
    context = context_of(request)
    with ExitStack() as resources:
        work, generation = await start(request, context, in_worker(_prepare), resources)
        outputs = await unless_gone(request.receive, generation.outputs())
        return await context.text_workers.call(_answer, work, outputs)


def _prepare(context: Context, raw: bytes) -> EmbeddingsWork:
    """In a worker thread. Raises ApiError."""
    body = parse(EmbeddingsBody, raw)
    model = context.names.resolve(body.model)
    context.names.require(model, "embedding")
    _check_dimensions(body, model)
    requests = tuple(_request(body, model, key, text) for key, text in enumerate(prompts_of(body.input)))
    logger.info("task=embedding model=%s inputs=%d pooling=%s", model.name, len(requests), body.pooling)
    return EmbeddingsWork(model, body.model, requests, body.priority, body)


def _check_dimensions(body: EmbeddingsBody, model: LoadedModel) -> None:
    config = model.processor.info.config
    hidden_size = config.get("text_config", config)["hidden_size"]
    if body.dimensions is not None and body.dimensions > hidden_size:
        message = f"dimensions must be at most {hidden_size}, the size of this model's embeddings."
        raise errors.invalid("dimensions", message, "invalid_value")


def _request(
    body: EmbeddingsBody, model: LoadedModel, key: int, prompt: str | list[int]
) -> GenerationRequest:
    processor = text_processor(model)
    ids = prompt_ids(processor.tokenizer, prompt, body.add_special_tokens)
    checked = checked_prompt(ids, body.truncate_prompt_tokens, model, "input")
    with option_errors():
        params = processor.sampling(SamplingOptions(max_tokens=0), checked, model.max_model_len, what="input")
    params = replace(params, pooling=body.pooling)
    return GenerationRequest(key, MultiModalInputs(checked), params, cache_salt=body.cache_salt or "")


def _answer(work: EmbeddingsWork, outputs: Sequence[GenerationOutput]) -> Response:
    """In a worker thread."""
    body, tokens = work.body, work.num_prompt_tokens
    vectors = [unit_vector(output, body.dimensions) for output in outputs]
    data = [
        {
            "object": "embedding",
            "index": index,
            # The array's own bytes, little-endian float32, with no number written out in between.
            "embedding": base64.b64encode(vector.data).decode()
            if body.encoding_format == "base64"
            else vector.tolist(),
        }
        for index, vector in enumerate(vectors)
    ]
    answer: dict[str, Any] = {"object": "list", "data": data, "model": work.name}
    return errors.json_response({**answer, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}})


def unit_vector(output: GenerationOutput, dimensions: int | None) -> NDArray[np.float32]:
    """The first `dimensions` of a pooled state, scaled to length 1; little-endian float32 [dimensions].

    Raises ApiError 500 for a state that has no direction.
    """
    assert output.pooled is not None
    vector = output.pooled.cpu().numpy()[:dimensions].astype("<f4")
    length = np.linalg.norm(vector.astype(np.float64))
    if not np.isfinite(length) or length == 0:
        logger.error("a pooled state has no finite length")
        raise errors.internal()
    return np.ascontiguousarray(vector / length, dtype="<f4")
