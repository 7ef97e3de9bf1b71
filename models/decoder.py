"""The one decoder: a stack of layers whose records (decoder_config) say what each is made of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.attention import ForwardContext, attention, store_kv
from ..kernels.layers import GatedMLP, LayerNorm, Linear, RMSNorm, RotaryEmbedding, parameter
from ..kernels.moe import MoE, MoEConfig, split_experts
from ..kernels.ops import Rope, apply_rope_
from ..processors.inputs import MultiModalFeature
from .base import KVCacheSpec, KVGroupSpec, ModelError
from .decoder_config import (
    AttentionConfig,
    DecoderConfig,
    FeedForwardConfig,
    LayerConfig,
    NormConfig,
    QueryScale,
)
from .gated_delta_net import GatedDeltaNet, GatedDeltaNetConfig
from .mla import MLAConfig, MLAttention
from .weights import load_strict

EMBEDDINGS = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
NOT_PARAMETERS = (
    ".rotary_emb.inv_freq",
)  # tables that old checkpoints carry, computed from the configuration


@dataclass(frozen=True)
class Step:
    """What all layers share in one forward pass: positions [tokens], and what follows from them alone."""

    context: ForwardContext
    rotations: Mapping[Rope, tuple[Tensor, Tensor]]
    query_scales: Mapping[QueryScale, Tensor]  # float32 [tokens, 1, 1]


class Attention(nn.Module):
    """Grouped-query attention; index counts the layers of its cache group."""

    prefix = "self_attn"

    def __init__(
        self, decoder: DecoderConfig, config: AttentionConfig, index: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.config = config
        self.index = index
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        sizes = (heads * dim * (2 if config.gated else 1), kv_heads * dim, kv_heads * dim)
        self.qkv = Linear(
            decoder.hidden_size, sum(sizes), config.qkv_bias, dtype=dtype, parts=("q", "k", "v"), sizes=sizes
        )
        self.out = Linear(heads * dim, decoder.hidden_size, config.out_bias, dtype=dtype)
        if config.qk_norm != "none":
            self.q_norm = make_norm(decoder.norm, dim, dtype)
            self.k_norm = make_norm(decoder.norm, dim, dtype)

    @staticmethod
    def cache_group(config: AttentionConfig, num_layers: int, dtype: torch.dtype) -> KVGroupSpec:
        sizes = (num_layers, config.num_kv_heads, config.head_dim, dtype)
        return KVGroupSpec(config.group, "full", *sizes, window=config.window)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        config, tokens = self.config, len(x)
        heads, turned = config.num_heads, config.num_heads + config.num_kv_heads
        # One buffer of heads, changed in place: its tail is what the cache stores.
        qkv = self.qkv(x).view(tokens, -1, config.head_dim)
        if config.gated:
            gate = qkv[:, 1 : 2 * heads : 2]
            qkv = torch.cat([qkv[:, : 2 * heads : 2], qkv[:, 2 * heads :]], dim=1)
        if config.qk_norm == "before":
            self._norm_(qkv)
        if config.rope is not None:
            apply_rope_(qkv[:, :turned], step.rotations[config.rope], config.rope.interleaved)
        if config.qk_norm == "after":
            self._norm_(qkv)
        query = qkv[:, :heads]
        if config.query_scale is not None:
            query = (query * step.query_scales[config.query_scale]).to(x.dtype)
        attn = step.context.attn[config.group]
        store_kv(qkv[:, heads:].view(tokens, 2, config.num_kv_heads, config.head_dim), self.index, attn)
        attended = attention(query, self.index, attn, config.scale)
        if config.gated:
            attended = attended * gate.sigmoid()
        return self.out(attended.reshape(tokens, -1))

    def _norm_(self, qkv: Tensor) -> None:
        heads, turned = self.config.num_heads, self.config.num_heads + self.config.num_kv_heads
        qkv[:, :heads] = self.q_norm(qkv[:, :heads])
        qkv[:, heads:turned] = self.k_norm(qkv[:, heads:turned])

    def named_weights(self, prefix: str) -> Mapping[str, Tensor]:
        named = {
            **self.qkv.named_weights(prefix + ".{}_proj"),
            **self.out.named_weights(f"{prefix}.o_proj"),
        }
        if self.config.qk_norm != "none":
            named |= self.q_norm.named_weights(f"{prefix}.q_norm")
            named |= self.k_norm.named_weights(f"{prefix}.k_norm")
        return named


def make_norm(config: NormConfig, size: int, dtype: torch.dtype) -> RMSNorm | LayerNorm:
    if config.kind == "layer":
        return LayerNorm(size, config.eps, bias=False, dtype=dtype)
    return RMSNorm(size, config.eps, config.offset, dtype=dtype)


def make_feed_forward(config: FeedForwardConfig, size: int, dtype: torch.dtype) -> GatedMLP | MoE:
    if isinstance(config, MoEConfig):
        return MoE(size, config, dtype=dtype)
    return GatedMLP(size, config.hidden, config.activation, config.bias, dtype=dtype)


class DecoderLayer(nn.Module):
    def __init__(self, decoder: DecoderConfig, config: LayerConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.block = decoder.block
        self.mixer = MIXERS[type(config.mixer)](decoder, config.mixer, index, dtype)
        self.feed_forward = make_feed_forward(config.feed_forward, decoder.hidden_size, dtype)
        self.norms = nn.ModuleDict(
            {name: make_norm(decoder.norm, decoder.hidden_size, dtype) for name in NORMS[decoder.block]}
        )

    def forward(self, x: Tensor, step: Step) -> Tensor:
        norms = self.norms
        normed = norms["input_layernorm"](x)
        if self.block == "parallel":
            return x + self.mixer(normed, step) + self.feed_forward(normed)
        if self.block == "sandwich":
            x = x + norms["post_attention_layernorm"](self.mixer(normed, step))
            out = self.feed_forward(norms["pre_feedforward_layernorm"](x))
            return x + norms["post_feedforward_layernorm"](out)
        x = x + self.mixer(normed, step)
        return x + self.feed_forward(norms["post_attention_layernorm"](x))

    def named_weights(self, prefix: str) -> Mapping[str, Tensor]:
        named = {
            **self.mixer.named_weights(f"{prefix}.{self.mixer.prefix}"),
            **self.feed_forward.named_weights(f"{prefix}.mlp"),
        }
        for name, norm in self.norms.items():
            assert isinstance(norm, RMSNorm | LayerNorm)
            named |= norm.named_weights(f"{prefix}.{name}")
        return named


# Each class takes the record of its key; the table is what binds the two.
MIXERS: Mapping[type, type[Any]] = {
    AttentionConfig: Attention,
    MLAConfig: MLAttention,
    GatedDeltaNetConfig: GatedDeltaNet,
}
# The norms of a layer by their names in checkpoints.
NORMS: Mapping[str, Sequence[str]] = {
    "pre": ("input_layernorm", "post_attention_layernorm"),
    "sandwich": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    "parallel": ("input_layernorm",),
}


class DecoderModel(nn.Module):
    """The weights and the forward pass; see models/base.py for the contract."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.vocab_size = config.vocab_size
        self.embed_tokens = parameter(config.vocab_size, config.hidden_size, dtype=dtype)
        groups: dict[str, list[LayerConfig]] = {}
        self.layers = nn.ModuleList()
        for layer in config.layers:
            group = groups.setdefault(layer.mixer.group, [])
            self.layers.append(DecoderLayer(config, layer, len(group), dtype))
            group.append(layer)
        self.norm = make_norm(config.norm, config.hidden_size, dtype)
        self.lm_head = None if config.tied else parameter(config.vocab_size, config.hidden_size, dtype=dtype)
        mixers = [layer.mixer for layer in config.layers]
        self.rotary = nn.ModuleList(
            RotaryEmbedding(rope)
            for rope in dict.fromkeys(mixer.rope for mixer in mixers)
            if rope is not None
        )
        self.query_scales = dict.fromkeys(
            mixer.query_scale for mixer in mixers if mixer.query_scale is not None
        )
        self.kv_cache_spec = KVCacheSpec(
            groups=tuple(cache_group(layers, dtype) for layers in groups.values()),
            max_model_len=config.max_positions,
        )

    def embed_multimodal(self, features: Sequence[MultiModalFeature]) -> list[Tensor]:
        raise ModelError("this model reads text only")

    def cross_kv(self, encoder_output: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        raise ModelError("this model has no encoder")

    def forward(self, input_ids: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        x = self.embed_tokens[input_ids]
        if self.config.embed_scale != 1.0:
            # Rounded like the weights, as the published models do.
            x = x * torch.tensor(self.config.embed_scale, dtype=self.dtype)
        step = self._step(positions, context)
        for layer in self.layers:
            x = layer(x, step)
        return self.norm(x)

    def _step(self, positions: Tensor, context: ForwardContext) -> Step:
        rotations = {}
        for rotary in self.rotary:
            assert isinstance(rotary, RotaryEmbedding)
            rotations[rotary.rope] = rotary(positions)
        scales = {scale: query_scale(scale, positions)[:, None, None] for scale in self.query_scales}
        return Step(context, rotations, scales)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        weight = self.embed_tokens if self.lm_head is None else self.lm_head
        logits = F.linear(hidden, weight).float()
        if self.config.logit_scale != 1.0:
            logits *= self.config.logit_scale
        if (bound := self.config.final_softcap) is not None:
            logits = bound * torch.tanh(logits / bound)
        return logits

    def expected_weights(self) -> dict[str, Tensor]:
        """Every tensor that a checkpoint must have, by its name there, as (a view of) the parameter it fills."""
        expected: dict[str, Tensor] = {
            EMBEDDINGS: self.embed_tokens.data,
            **self.norm.named_weights("model.norm"),
        }
        if self.lm_head is not None:
            expected[HEAD] = self.lm_head.data
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            expected |= layer.named_weights(f"model.layers.{index}")
        return {self._stored_name(name): tensor for name, tensor in expected.items()}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        load_strict(self.expected_weights(), self._stream(weights))

    def _stored_name(self, name: str) -> str:
        for ours, stored in self.config.names:
            name = name.replace(ours, stored)
        return name

    def _stream(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The parameters among a checkpoint's tensors; a tied head that was stored must repeat the embeddings."""
        head = None
        for name, tensor in weights:
            if name.endswith(NOT_PARAMETERS):
                continue
            if self.lm_head is None and name == self._stored_name(HEAD):
                head = tensor
                continue
            yield from split_experts(name, tensor)
        if head is not None and not torch.equal(head.to(self.dtype), self.embed_tokens.data):
            raise ModelError(
                "the model's output projection differs from the embeddings that it should repeat"
            )


def query_scale(scale: QueryScale, positions: Tensor) -> Tensor:
    """float32 [tokens]."""
    return 1 + scale.beta * torch.log1p((positions // scale.period).float())


def cache_group(layers: Sequence[LayerConfig], dtype: torch.dtype) -> KVGroupSpec:
    """The cache of the layers of one group. Raises ModelError if they do not fit together."""
    specs = {MIXERS[type(m)].cache_group(m, len(layers), dtype) for m in (layer.mixer for layer in layers)}
    if len(specs) > 1:
        raise ModelError("the model's layers of one kind have caches of different sizes")
    return specs.pop()
