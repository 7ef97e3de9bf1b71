"""The table of model families: how a checkpoint of each becomes a Model and a ModelProcessor."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from . import whisper_timing
from .base import Model, ModelError, ModelProcessor
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


@dataclass(frozen=True)
class Family:
    """load: (files, served name, dtype) → model with its weights, and its processor. Raises ModelError."""

    load: Callable[[Path, str, torch.dtype], LoadedFamily]


FAMILIES: Mapping[str, Family] = {
    "whisper": Family(_load_whisper),
}


def model_type(path: Path) -> str:
    """The architecture's name as checkpoints write it. Raises ModelError where none can be read."""
    kind = detect_format(path)
    if kind == "ctranslate2":
        return "whisper"  # the reader refuses CTranslate2 files of other architectures
    if kind == "gguf":
        raise ModelError(f"{path.name}: GGUF models cannot be served yet")
    return str(read_config(path).get("model_type"))


def load(path: Path, name: str, dtype: torch.dtype) -> LoadedFamily:
    """Builds the model that lies at a path. Raises ModelError."""
    family = FAMILIES.get(model_type(path))
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        raise ModelError(f"{name} is of architecture {model_type(path)!r}; supported: {known}")
    return family.load(path, name, dtype)
