"""Grammars that requests ask for: one compiler a model, compiled apart from the other work."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from ..engine.engine import LoadedModel
from ..engine.structured import GrammarCompiler, GrammarError
from ..models.base import Grammar
from . import errors
from .chat_protocol import ChatBody
from .limits import WorkerPool
from .sampling import text_processor
from .text_protocol import SamplingBody, StructuredOutputs

WORKERS = 4  # a grammar may take seconds; those of others wait no longer for it than they must


class Grammars:
    """Compilers of the loaded models, made when first needed."""

    def __init__(self) -> None:
        self._workers = WorkerPool(WORKERS, "grammar")
        self._compilers: dict[str, GrammarCompiler] = {}
        self._lock = threading.Lock()

    async def wanted(self, body: SamplingBody, model: LoadedModel) -> Grammar | None:
        """The grammar that a request's output has to follow, None if it is free. Raises ApiError 400."""
        found = _wanted(body)
        if found is None:
            return None
        return await self._workers.call(self._compile, model, *found)

    def forget(self, model: str) -> None:
        """Gives up what is held for a model: another of its name may have other tokens."""
        with self._lock:
            compiler = self._compilers.pop(model, None)
        if compiler is not None:
            compiler.close()

    def close(self) -> None:
        self._workers.shutdown()
        for compiler in self._compilers.values():
            compiler.close()

    def _compile(
        self, model: LoadedModel, param: str, compile_with: Callable[[GrammarCompiler], Grammar]
    ) -> Grammar:
        try:
            return compile_with(self._compiler(model))
        except GrammarError as error:
            raise errors.invalid(param, f"{param}: {error}", "invalid_value") from None

    def _compiler(self, model: LoadedModel) -> GrammarCompiler:
        processor = text_processor(model)
        with self._lock:
            if model.name not in self._compilers:
                # Checkpoints round the width of their logits up; the tokenizer does not know of it.
                width = processor.info.config.get("vocab_size")
                known = processor.tokenizer.vocab_size
                vocab_size = max(known, width) if isinstance(width, int) else known
                self._compilers[model.name] = GrammarCompiler(
                    processor.tokenizer, vocab_size, processor.stop_ids
                )
            return self._compilers[model.name]


Wanted = tuple[str, Callable[[GrammarCompiler], Grammar]]


def _wanted(body: SamplingBody) -> Wanted | None:
    """What to compile, and the parameter that asks for it. Raises ApiError 400."""
    if isinstance(body, ChatBody) and body.forces_calls:
        if body.asks_for_structure:
            raise errors.invalid("tool_choice", "tool_choice and a form of the answer exclude each other.")
        schema = calls_schema(body)
        return "tools", lambda compiler: compiler.compile_json_schema(schema, strict=False)
    if body.response_format is not None:
        return _of_response_format(body)
    return _of_structured_outputs(body)


def _of_response_format(body: SamplingBody) -> Wanted | None:
    form = body.response_format
    assert form is not None
    if form.type == "text":
        return None
    if form.json_schema is None:
        return "response_format", lambda compiler: compiler.compile_json_object()
    schema, strict = form.json_schema.schema_, form.json_schema.strict is not False
    return "response_format", lambda compiler: compiler.compile_json_schema(schema, strict)


def _of_structured_outputs(body: SamplingBody) -> Wanted | None:
    wanted = body.structured_outputs
    if wanted is None:
        return None
    return "structured_outputs", partial(_compile_structured, wanted)


def _compile_structured(wanted: StructuredOutputs, compiler: GrammarCompiler) -> Grammar:
    if wanted.json_ is not None:
        return compiler.compile_json_schema(wanted.json_)
    if wanted.regex is not None:
        return compiler.compile_regex(wanted.regex)
    if wanted.choice is not None:
        return compiler.compile_choice(wanted.choice)
    if wanted.grammar is not None:
        return compiler.compile_ebnf(wanted.grammar)
    if wanted.structural_tag is not None:
        return compiler.compile_structural_tag(wanted.structural_tag)
    return compiler.compile_json_object()


def calls_schema(body: ChatBody) -> dict[str, Any]:
    """The schema of a forced call: one tool's arguments, or a list of named calls."""
    tools = {tool.function.name: tool.function.parameters or {"type": "object"} for tool in body.tools}
    if body.forced_tool is not None:
        return tools[body.forced_tool]
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": parameters},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for name, parameters in tools.items()
    ]
    most = {} if body.parallel_tool_calls else {"maxItems": 1}
    return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **most}
