"""The table of text families: model_type, as config.json writes it, to the reader of that configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .base import ModelError
from .cohere2_moe import cohere2_moe_config
from .decoder_config import CheckpointConfig, DecoderConfig
from .deepseek_v3 import deepseek_v3_config
from .gemma3 import gemma3_config
from .hunyuan import hunyuan_config
from .llama import llama_config
from .ministral3 import ministral3_config
from .mistral import mistral_config
from .qwen2 import qwen2_config
from .qwen3 import qwen3_config
from .qwen3_5 import qwen3_5_config
from .qwen3_moe import qwen3_moe_config

DECODERS: Mapping[str, Callable[[CheckpointConfig], DecoderConfig]] = {
    "cohere2_moe": cohere2_moe_config,
    "deepseek_v3": deepseek_v3_config,
    "gemma3_text": gemma3_config,
    "hunyuan_v1_dense": hunyuan_config,
    "llama": llama_config,
    "ministral3": ministral3_config,
    "mistral": mistral_config,
    "qwen2": qwen2_config,
    "qwen3": qwen3_config,
    "qwen3_5": qwen3_5_config,
    "qwen3_5_text": qwen3_5_config,
    "qwen3_moe": qwen3_moe_config,
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
