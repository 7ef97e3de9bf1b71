"""The table of text families: model_type, as config.json writes it, to the reader of that configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .base import ModelError
from .decoder_config import CheckpointConfig, DecoderConfig
from .gemma3 import gemma3_config
from .llama import llama_config
from .qwen2 import qwen2_config
from .qwen3 import qwen3_config

DECODERS: Mapping[str, Callable[[CheckpointConfig], DecoderConfig]] = {
    "gemma3_text": gemma3_config,
    "llama": llama_config,
    "qwen2": qwen2_config,
    "qwen3": qwen3_config,
}


def decoder_config(config: CheckpointConfig) -> DecoderConfig:
    """What the decoder of a checkpoint is made of. Raises ModelError for what is unknown or unusable."""
    family = DECODERS.get(str(config.get("model_type")))
    if family is None:
        known = ", ".join(sorted(DECODERS))
        raise ModelError(
            f"text models of type {config.get('model_type')!r} are not supported; known: {known}"
        )
    return family(config)
