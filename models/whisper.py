"""Whisper (Radford et al. 2022): an audio encoder and a decoder with cross-attention over its output."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..encoders.base import encode_by_shape
from ..encoders.whisper import WhisperEncoder, WhisperEncoderConfig
from ..kernels.attention import (
    AttentionMetadata,
    CrossAttentionMetadata,
    ForwardContext,
    attention,
    cross_attention,
    store_kv,
)
from ..kernels.layers import MLP, LayerNorm, Linear, parameter
from ..processors.inputs import MultiModalFeature
from .base import KVCacheSpec, KVGroupSpec
from .weights import load_strict

MAX_ENCODER_BATCH = 4  # windows: more brings no speed on a CPU and costs 50 MB each in the base size


@dataclass(frozen=True)
class WhisperConfig:
    """Sizes of one checkpoint; every published size from tiny to large-v3 and turbo differs only in these."""

    encoder: WhisperEncoderConfig
    hidden_size: int
    num_layers: int
    num_heads: int
    ffn_size: int
    vocab_size: int
    max_target_positions: int

    @classmethod
    def from_checkpoint(cls, config: Mapping[str, Any]) -> WhisperConfig:
        return cls(
            encoder=WhisperEncoderConfig(
                num_mel_bins=config["num_mel_bins"],
                hidden_size=config["d_model"],
                num_layers=config["encoder_layers"],
                num_heads=config["encoder_attention_heads"],
                ffn_size=config["encoder_ffn_dim"],
                num_positions=config["max_source_positions"],
            ),
            hidden_size=config["d_model"],
            num_layers=config["decoder_layers"],
            num_heads=config["decoder_attention_heads"],
            ffn_size=config["decoder_ffn_dim"],
            vocab_size=config["vocab_size"],
            max_target_positions=config["max_target_positions"],
        )


class WhisperDecoderLayer(nn.Module):
    def __init__(self, config: WhisperConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        size = config.hidden_size
        self.index = index
        self.num_heads = config.num_heads
        self.attention_norm = LayerNorm(size, dtype=dtype)
        self.qkv = Linear(size, 3 * size, dtype=dtype, parts=("q", "k", "v"), biased_parts=("q", "v"))
        self.out = Linear(size, size, dtype=dtype)
        self.cross_norm = LayerNorm(size, dtype=dtype)
        self.cross_q = Linear(size, size, dtype=dtype)
        self.cross_kv = Linear(size, 2 * size, dtype=dtype, parts=("k", "v"), biased_parts=("v",))
        self.cross_out = Linear(size, size, dtype=dtype)
        self.mlp_norm = LayerNorm(size, dtype=dtype)
        self.mlp = MLP(size, config.ffn_size, dtype=dtype)

    def forward(self, x: Tensor, attn: AttentionMetadata, cross: CrossAttentionMetadata) -> Tensor:
        tokens, size = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(tokens, 3, self.num_heads, -1)
        store_kv(qkv[:, 1:], self.index, attn)
        x = x + self.out(attention(qkv[:, 0], self.index, attn).reshape(tokens, size))
        q = self.cross_q(self.cross_norm(x)).view(tokens, self.num_heads, -1)
        x = x + self.cross_out(cross_attention(q, self.index, cross).reshape(tokens, size))
        return x + self.mlp(self.mlp_norm(x))

    def named_weights(self, prefix: str) -> Mapping[str, Tensor]:
        return {
            **self.attention_norm.named_weights(f"{prefix}.self_attn_layer_norm"),
            **self.qkv.named_weights(prefix + ".self_attn.{}_proj"),
            **self.out.named_weights(f"{prefix}.self_attn.out_proj"),
            **self.cross_norm.named_weights(f"{prefix}.encoder_attn_layer_norm"),
            **self.cross_q.named_weights(f"{prefix}.encoder_attn.q_proj"),
            **self.cross_kv.named_weights(prefix + ".encoder_attn.{}_proj"),
            **self.cross_out.named_weights(f"{prefix}.encoder_attn.out_proj"),
            **self.mlp_norm.named_weights(f"{prefix}.final_layer_norm"),
            **self.mlp.named_weights(prefix),
        }


class WhisperModel(nn.Module):
    """The weights and the forward pass; see models/base.py for the contract."""

    def __init__(self, config: WhisperConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.vocab_size = config.vocab_size
        self.encoder = WhisperEncoder(config.encoder, dtype)
        self.embed_tokens = parameter(config.vocab_size, config.hidden_size, dtype=dtype)
        self.embed_positions = parameter(config.max_target_positions, config.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(WhisperDecoderLayer(config, i, dtype) for i in range(config.num_layers))
        self.norm = LayerNorm(config.hidden_size, dtype=dtype)
        head_dim = config.hidden_size // config.num_heads
        sizes = (config.num_layers, config.num_heads, head_dim, dtype)
        self.kv_cache_spec = KVCacheSpec(
            groups=(
                KVGroupSpec("self", "full", *sizes),
                KVGroupSpec("cross", "cross", *sizes, encoder_len=config.encoder.num_positions),
            ),
            max_model_len=config.max_target_positions,
        )

    def embed_multimodal(self, features: Sequence[MultiModalFeature]) -> list[Tensor]:
        """Log-mel windows [n_mels, 2 * positions] → encoder outputs [positions, hidden]."""
        return encode_by_shape([f.data() for f in features], self.encoder, MAX_ENCODER_BATCH)

    def cross_kv(self, encoder_output: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        decoder_layer = self.layers[layer]
        assert isinstance(decoder_layer, WhisperDecoderLayer)
        kv = decoder_layer.cross_kv(encoder_output)
        keys, values = kv.view(len(encoder_output), 2, self.config.num_heads, -1).permute(1, 2, 0, 3)
        return keys, values

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        context: ForwardContext,
    ) -> Tensor:
        attn, cross = context.attn["self"], context.cross
        assert cross is not None, "Whisper's decoder attends to an encoder item"
        x = self.embed_tokens[input_ids] + self.embed_positions[positions]
        for layer in self.layers:
            x = layer(x, attn, cross)
        return self.norm(x)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return (hidden @ self.embed_tokens.T).float()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        expected: dict[str, Tensor] = {
            **self.encoder.named_weights("model.encoder"),
            "model.decoder.embed_tokens.weight": self.embed_tokens.data,
            "model.decoder.embed_positions.weight": self.embed_positions.data,
            **self.norm.named_weights("model.decoder.layer_norm"),
        }
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, WhisperDecoderLayer)
            expected |= layer.named_weights(f"model.decoder.layers.{index}")
        load_strict(expected, weights)
