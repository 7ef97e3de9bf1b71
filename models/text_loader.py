"""Text checkpoints of any format as one thing: configuration, weights, tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from ..processors.chat_template import ChatTemplate, TemplateError
from ..processors.text import TextTokenizer, TokenizerError
from .base import ModelError
from .gguf import gguf_config, gguf_weights, read_gguf
from .gguf_tokenizer import gguf_chat_templates, gguf_tokenizer
from .weights import detect_format, read_config, read_json, safetensors_weights


@dataclass(frozen=True)
class TextCheckpoint:
    """config has the keys of transformers; weights stream (hub name, tensor); chat_template may be empty."""

    config: Mapping[str, Any]
    weights: Iterator[tuple[str, Tensor]]
    tokenizer: TextTokenizer
    chat_template: ChatTemplate
    generation_config: Mapping[str, Any] = field(default_factory=dict)


def open_text(path: Path) -> TextCheckpoint:
    """A safetensors directory or a GGUF file. Raises ModelError, while the weights are read as well."""
    try:
        return _open_gguf(path) if detect_format(path) == "gguf" else _open_directory(path)
    except (TokenizerError, TemplateError) as error:
        raise ModelError(str(error)) from None


def _open_gguf(path: Path) -> TextCheckpoint:
    file = read_gguf(path)
    config, tokenizer = gguf_config(file), gguf_tokenizer(file)
    texts = tokenizer.special_texts
    named = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    special = {name: texts[token] for name, token in named.items() if token is not None and token in texts}
    template = ChatTemplate(gguf_chat_templates(file), special)
    return TextCheckpoint(config, gguf_weights(file, config), tokenizer, template)


def _open_directory(path: Path) -> TextCheckpoint:
    generation_file = path / "generation_config.json"
    return TextCheckpoint(
        read_config(path),
        safetensors_weights(path),
        TextTokenizer.from_directory(path),
        ChatTemplate.from_directory(path),
        read_json(generation_file) if generation_file.is_file() else {},
    )
