"""The table of model families: how a checkpoint of each becomes a Model and a ModelProcessor."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from . import whisper_timing
from .base import Model, ModelError, ModelProcessor
from .decoder import DecoderModel
from .families import DECODERS, decoder_config
from .text import TextProcessor
from .text_loader import open_text
from .weights import detect_format, open_whisper, read_config, tokenizer_file
from .whisper import WhisperConfig, WhisperModel
from .whisper_processor import WhisperProcessor

LoadedFamily = tuple[Model, ModelProcessor]


def _load_whisper(path: Path, name: str, dtype: torch.dtype) -> LoadedFamily:
    # Word alignment compiles for seconds on its first use: beside the loading rather than in a request.
    warming = threading.Thread(target=whisper_timing.warm_up, name="warm-up")
    warming.start()
    try:
        config, weights = open_whisper(path)
        model = WhisperModel(WhisperConfig.from_checkpoint(config), dtype)
        model.load_weights(weights)
        return model, WhisperProcessor(config, tokenizer_file(path), name)
    finally:
        warming.join()


def _load_text(path: Path, name: str, dtype: torch.dtype) -> LoadedFamily:
    checkpoint = open_text(path)
    model = DecoderModel(decoder_config(checkpoint.config), dtype)
    if checkpoint.tokenizer.vocab_size > model.vocab_size:
        raise ModelError(f"{name} has a tokenizer with more tokens than the model has embeddings")
    model.load_weights(checkpoint.weights)
    processor = TextProcessor(
        checkpoint.config, checkpoint.tokenizer, checkpoint.chat_template, name, checkpoint.generation_config
    )
    # It always has a tokenizer, where the protocol's attribute may be None.
    return model, cast(ModelProcessor, processor)


@dataclass(frozen=True)
class Family:
    """load: (files, served name, dtype) → model with its weights, and its processor. Raises ModelError."""

    load: Callable[[Path, str, torch.dtype], LoadedFamily]


FAMILIES: Mapping[str, Family] = {
    "whisper": Family(_load_whisper),
    **dict.fromkeys(DECODERS, Family(_load_text)),
}


def family_of(path: Path, name: str) -> Family:
    """The family of the model that lies at a path. Raises ModelError."""
    kind = detect_format(path)
    if kind == "gguf":
        return Family(_load_text)  # the reader refuses architectures that are no text models
    # The reader of CTranslate2 files refuses other architectures than Whisper.
    model_type = "whisper" if kind == "ctranslate2" else str(read_config(path).get("model_type"))
    family = FAMILIES.get(model_type)
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        raise ModelError(f"{name} is of architecture {model_type!r}; supported: {known}")
    return family


def load(path: Path, name: str, dtype: torch.dtype) -> LoadedFamily:
    """Builds the model that lies at a path. Raises ModelError."""
    return family_of(path, name).load(path, name, dtype)
