"""Text checkpoints with random weights in the hub's layout, with a byte tokenizer; no reference needed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from sensorium.models.decoder import DecoderModel
from sensorium.models.families import decoder_config
from sensorium.processors.text import byte_of_character
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 256, 257, 258; the last ends a text
VOCAB = 260
LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
}
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"


def random_weights(config: Mapping[str, Any], std: float = 0.2, seed: int = 0) -> dict[str, Tensor]:
    """Every tensor that a checkpoint of this configuration has; embeddings small, so that tokens vary."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, empty in DecoderModel(decoder_config(config)).expected_weights().items():
        scale = 0.05 if "embed_tokens" in name else std
        weights[name] = torch.randn(empty.shape, generator=generator) * scale
        if "norm" in name:
            weights[name] += 1
    return weights


def write_tiny_text(
    directory: Path, weights: Mapping[str, Tensor], config: Mapping[str, Any] = LLAMA
) -> Path:
    """Writes the configuration, the weights, a tokenizer of single bytes and a chat template."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(dict(weights), directory / "model.safetensors")
    tokenizer = Tokenizer(models.BPE(vocab=dict(byte_of_character()), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE, "eos_token": SPECIAL[2]}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "eos_token_id": 258}))
    return directory
