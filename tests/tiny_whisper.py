"""A Whisper checkpoint with random weights in the hub's layout, small enough to run hundreds of steps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from sensorium.models.whisper import WhisperConfig, WhisperDecoderLayer, WhisperModel

SIZES = {
    "model_type": "whisper",
    "num_mel_bins": 80,
    "d_model": 64,
    "vocab_size": 51865,
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "encoder_layers": 1,
    "encoder_attention_heads": 1,
    "encoder_ffn_dim": 64,
    "decoder_layers": 2,
    "decoder_attention_heads": 1,
    "decoder_ffn_dim": 128,
}


def write_tiny_whisper(directory: Path, tokenizer: Path, seed: int = 0, **sizes: int) -> Path:
    """Writes config.json, model.safetensors and tokenizer.json; returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {**SIZES, **sizes}
    (directory / "config.json").write_text(json.dumps(config))
    shutil.copy(tokenizer, directory / "tokenizer.json")
    generator = torch.Generator().manual_seed(seed)
    names = weight_names(WhisperModel(WhisperConfig.from_checkpoint(config)))
    weights = {}
    for name, empty in names.items():
        # Large next to the embeddings, or the tied head would echo the last token for ever.
        scale = 0.1 if "embed_tokens" in name else 0.4
        weights[name] = torch.randn(empty.shape, generator=generator) * scale
        if "norm.weight" in name:
            weights[name] = torch.ones(empty.shape)
    save_file(weights, directory / "model.safetensors")
    return directory


def weight_names(model: WhisperModel) -> dict[str, torch.Tensor]:
    """Every tensor that a checkpoint of this model must have."""
    names = {
        **model.encoder.named_weights("model.encoder"),
        "model.decoder.embed_tokens.weight": model.embed_tokens.data,
        "model.decoder.embed_positions.weight": model.embed_positions.data,
        **model.norm.named_weights("model.decoder.layer_norm"),
    }
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, WhisperDecoderLayer)
        names |= layer.named_weights(f"model.decoder.layers.{index}")
    return names
