"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated, Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ..engine.engine import LoadedModel
from . import errors
from .chat_protocol import Messages, TemplateFields, TemplateOptions, check_template
from .context import Context, context_of
from .generation import in_worker, receive
from .json_body import ONE_FAULT, Body, body_schema, parse
from .logprobs import bytes_of
from .prompts import render
from .sampling import text_processor
from .text_protocol import MAX_PROMPT_TOKENS, TokenId

router = APIRouter(tags=["tokenize"])


class TokenizeBody(TemplateOptions):
    """A prompt or messages. model may be left out where one text model is loaded."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeBody(Body):
    model: str | None = None
    tokens: Annotated[list[TokenId], ONE_FAULT]


@router.post("/tokenize", **body_schema(TokenizeBody, "/tokenize"))
async def tokenize(request: Request) -> Response:
    with ExitStack() as resources:
        return errors.json_response(
            await receive(request, context_of(request), in_worker(_tokenize), resources)
        )


@router.post("/detokenize", **body_schema(DetokenizeBody, "/detokenize"))
async def detokenize(request: Request) -> Response:
    with ExitStack() as resources:
        return errors.json_response(
            await receive(request, context_of(request), in_worker(_detokenize), resources)
        )


def _tokenize(context: Context, raw: bytes) -> dict[str, Any]:
    """In a worker thread. Raises ApiError."""
    body = parse(TokenizeBody, raw)
    model = _model(context, body.model)
    tokenizer = text_processor(model).tokenizer
    if (body.prompt is None) == (body.messages is None):
        raise errors.invalid("prompt", "Give either prompt or messages.", "missing_required_parameter")
    if body.messages is not None:
        fields = TemplateFields.model_construct(**{**body.__dict__, "messages": body.messages})
        check_template(fields)
        ids: list[int] = list(render(fields, model).token_ids)
    else:
        text = body.prompt or ""
        ids = tokenizer.encode_prompt(text) if body.add_special_tokens else tokenizer.encode(text)
    texts = [bytes_of(tokenizer, token).decode("utf-8", "replace") for token in ids]
    return {
        "count": len(ids),
        "max_model_len": model.max_model_len,
        "tokens": ids,
        "token_strs": texts if body.return_token_strs else None,
    }


def _detokenize(context: Context, raw: bytes) -> dict[str, Any]:
    """In a worker thread. Raises ApiError."""
    body = parse(DetokenizeBody, raw)
    tokenizer = text_processor(_model(context, body.model)).tokenizer
    if len(body.tokens) > MAX_PROMPT_TOKENS or any(token >= tokenizer.vocab_size for token in body.tokens):
        raise errors.invalid(
            "tokens", f"tokens must be at most {MAX_PROMPT_TOKENS} ids below {tokenizer.vocab_size}."
        )
    return {"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)}


def _model(context: Context, name: str | None) -> LoadedModel:
    """The model asked for, or the only text model. Raises ApiError."""
    if name is not None:
        return context.names.resolve(name)
    texts = [model for model in context.engine.models() if "completion" in model.processor.info.capabilities]
    if len(texts) != 1:
        message = "model is missing: several text models are loaded, or none."
        raise errors.invalid("model", message, "missing_required_parameter")
    return texts[0]
