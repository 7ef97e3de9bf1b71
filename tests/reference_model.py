"""Our checkpoints as the openai-whisper package's own model: the truth that transcription has to equal."""

from __future__ import annotations

from pathlib import Path

import torch
from sensorium.models.weights import open_whisper
from torch import Tensor
from whisper.model import ModelDimensions, Whisper

# Module names of transformers → those of openai-whisper, tried in this order.
_NAMES = (
    ("model.", ""),
    (".layers.", ".blocks."),
    (".embed_positions.weight", ".positional_embedding"),
    (".embed_tokens.", ".token_embedding."),
    (".self_attn_layer_norm.", ".attn_ln."),
    (".encoder_attn_layer_norm.", ".cross_attn_ln."),
    (".final_layer_norm.", ".mlp_ln."),
    (".self_attn.", ".attn."),
    (".encoder_attn.", ".cross_attn."),
    (".q_proj.", ".query."),
    (".k_proj.", ".key."),
    (".v_proj.", ".value."),
    (".out_proj.", ".out."),
    (".fc1.", ".mlp.0."),
    (".fc2.", ".mlp.2."),
    ("encoder.layer_norm.", "encoder.ln_post."),
    ("decoder.layer_norm.", "decoder.ln."),
)


def reference_name(name: str) -> str:
    """model.encoder.layers.0.fc1.weight → encoder.blocks.0.mlp.0.weight"""
    for ours, theirs in _NAMES:
        name = name.replace(ours, theirs)
    return name


def load_reference(directory: Path) -> Whisper:
    """A checkpoint directory of either format as openai-whisper's model: float32, in evaluation mode."""
    config, weights = open_whisper(directory)
    model = Whisper(
        ModelDimensions(
            n_mels=config["num_mel_bins"],
            n_audio_ctx=config["max_source_positions"],
            n_audio_state=config["d_model"],
            n_audio_head=config["encoder_attention_heads"],
            n_audio_layer=config["encoder_layers"],
            n_vocab=config["vocab_size"],
            n_text_ctx=config["max_target_positions"],
            n_text_state=config["d_model"],
            n_text_head=config["decoder_attention_heads"],
            n_text_layer=config["decoder_layers"],
        )
    )
    state: dict[str, Tensor] = {reference_name(name): tensor.float() for name, tensor in weights}
    model.load_state_dict(state, strict=True)
    set_alignment_heads(model, [(layer, head) for layer, head in config["alignment_heads"]])
    return model.eval()


def set_alignment_heads(model: Whisper, heads: list[tuple[int, int]]) -> None:
    mask = torch.zeros(model.dims.n_text_layer, model.dims.n_text_head, dtype=torch.bool)
    for layer, head in heads:
        mask[layer, head] = True
    model.register_buffer("alignment_heads", mask.to_sparse(), persistent=False)
