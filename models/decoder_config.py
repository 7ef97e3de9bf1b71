"""What a decoder is made of: records of its layers, and the readers of config.json that families share.

A family is a function from the dict of a checkpoint's config.json to a DecoderConfig. The keys are those of
transformers, in its present form (rope_parameters) and the older one (rope_theta, rope_scaling).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..kernels.moe import MoEConfig
from ..kernels.ops import ACTIVATIONS, Rope
from .base import ModelError
from .gated_delta_net import GatedDeltaNetConfig
from .mla import MLAConfig

CheckpointConfig = Mapping[str, Any]
# How checkpoints name the kinds of attention in layer_types.
FULL = "full_attention"
SLIDING = "sliding_attention"


@dataclass(frozen=True)
class QueryScale:
    """Queries grow with their position: 1 + beta * ln(1 + floor(position / period)) (Llama 4)."""

    beta: float
    period: int


@dataclass(frozen=True)
class AttentionConfig:
    """Grouped-query attention over paged keys and values.

    window: at most so many keys back, itself included. scale: of the scores, None for head_dim^-0.5.
    qk_norm: RMS norm of every query and key head, before or after they are turned.
    gated: the output is multiplied by the sigmoid of a gate; each query head of the checkpoint is followed by
    its gate's head.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope | None
    window: int | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["none", "before", "after"] = "none"
    scale: float | None = None
    query_scale: QueryScale | None = None
    gated: bool = False

    @property
    def group(self) -> str:
        """The name of the cache group of such layers."""
        return "full" if self.window is None else "sliding"


@dataclass(frozen=True)
class MLPConfig:
    """A gated MLP."""

    hidden: int
    activation: str
    bias: bool = False


@dataclass(frozen=True)
class NormConfig:
    """kind "layer" is without a bias. offset is added to the stored weights."""

    kind: Literal["rms", "layer"]
    eps: float
    offset: float = 0.0


# The kind of a mixer or feed-forward is the type of its record; `decoder` has a module for each.
MixerConfig = AttentionConfig | MLAConfig | GatedDeltaNetConfig
FeedForwardConfig = MLPConfig | MoEConfig


@dataclass(frozen=True)
class LayerConfig:
    mixer: MixerConfig
    feed_forward: FeedForwardConfig


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder-only model.

    block: pre (norms before attention and feed-forward), sandwich (before and behind each) or parallel (both
    read one norm and are added together). names: (ours, the checkpoint's) parts of tensor names.
    embed_scale multiplies the embeddings, logit_scale the logits; final_softcap bounds them by tanh.
    """

    hidden_size: int
    vocab_size: int
    max_positions: int
    layers: tuple[LayerConfig, ...]
    norm: NormConfig
    tied: bool
    block: Literal["pre", "sandwich", "parallel"] = "pre"
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    final_softcap: float | None = None
    names: tuple[tuple[str, str], ...] = ()


def integer(config: CheckpointConfig, key: str, default: int | None = None) -> int:
    """A positive integer of a checkpoint's configuration. Raises ModelError."""
    value = config.get(key)
    value = default if value is None else value
    if type(value) is not int or not 0 < value < 2**31:
        raise ModelError(f"the model's configuration has no usable {key}")
    return value


def number(config: CheckpointConfig, key: str, default: float | None = None) -> float:
    """A finite number of a checkpoint's configuration. Raises ModelError."""
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
        raise ModelError(f"the model's configuration has no usable {key}")
    return float(value)


def positive(config: CheckpointConfig, key: str, default: float | None = None) -> float:
    """A number above 0. Raises ModelError."""
    value = number(config, key, default)
    if value <= 0:
        raise ModelError(f"the model's configuration has no usable {key}")
    return value


def flag(config: CheckpointConfig, key: str, default: bool = False) -> bool:
    """A boolean of a checkpoint's configuration. Raises ModelError."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise ModelError(f"the model's configuration has no usable {key}")
    return value


def choice(config: CheckpointConfig, key: str, allowed: Sequence[str], default: str) -> str:
    """One of a few words. Raises ModelError for another one."""
    value = config.get(key)
    value = default if value is None else value
    if value not in allowed:
        raise ModelError(f"the model's {key} {value!r} is not supported")
    return str(value)


def layer_types(
    config: CheckpointConfig, allowed: Sequence[str], key: str = "layer_types"
) -> list[str] | None:
    """A list of one word a layer, or None where the configuration has none. Raises ModelError."""
    value = config.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != integer(config, "num_hidden_layers"):
        raise ModelError(f"the model's {key} do not name every layer")
    for word in value:
        if word not in tuple(allowed):
            raise ModelError(f"the model's {key} {word!r} is not supported")
    return value


def activation(config: CheckpointConfig, key: str = "hidden_act") -> str:
    return choice(config, key, tuple(ACTIVATIONS), "silu")


def rms(config: CheckpointConfig, offset: float = 0.0) -> NormConfig:
    return NormConfig("rms", positive(config, "rms_norm_eps", 1e-6), offset)


def sliding_window(config: CheckpointConfig) -> int | None:
    """The window, or None where it is absent or no sequence is longer."""
    if config.get("sliding_window") is None:
        return None
    window = integer(config, "sliding_window")
    return window if window < integer(config, "max_position_embeddings") else None


def mlp(config: CheckpointConfig, key: str = "intermediate_size", bias: bool = False) -> MLPConfig:
    return MLPConfig(integer(config, key), activation(config), bias)


def attention(config: CheckpointConfig, rope: Rope | None = None, **switches: Any) -> AttentionConfig:
    """The sizes of a checkpoint's attention; rope as `rope` reads it if not given. Raises ModelError."""
    heads = integer(config, "num_attention_heads")
    kv_heads = integer(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelError("the model's key heads do not divide its query heads")
    return AttentionConfig(heads, kv_heads, head_dim(config), rope or read_rope(config), **switches)


def head_dim(config: CheckpointConfig) -> int:
    size, heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    if config.get("head_dim") is None and size % heads:
        raise ModelError("the model's attention heads do not divide its width")
    return integer(config, "head_dim", size // heads)


def rope_parameters(config: CheckpointConfig) -> CheckpointConfig:
    """The table of rotary parameters, or an empty one; older checkpoints call it rope_scaling."""
    value = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(value, Mapping):
        raise ModelError("the model's configuration has no usable rope_parameters")
    return value


def read_rope(
    config: CheckpointConfig,
    parameters: CheckpointConfig | None = None,
    theta: float = 10_000.0,
    interleaved: bool = False,
) -> Rope:
    """The rotary embedding of a configuration, or of one table of it. Raises ModelError.

    "dynamic" scaling changes frequencies only beyond max_position_embeddings, the longest sequence that is
    served: within it, it is the default; with `alpha` it is a fixed stretch of theta at any length.
    """
    table = rope_parameters(config) if parameters is None else parameters
    kind = table.get("rope_type") or table.get("type") or "default"
    theta = number(table, "rope_theta", number(config, "rope_theta", theta))
    partial = number(table, "partial_rotary_factor", number(config, "partial_rotary_factor", 1.0))
    dim = int(head_dim(config) * partial)
    if not 2 < dim <= head_dim(config) or dim % 2 or theta <= 1:
        raise ModelError("the model's rotary embedding has sizes that cannot be used")
    base = Rope(theta, dim, interleaved)
    if kind == "default":
        return base
    if kind == "linear":
        return replace(base, kind="linear", factor=positive(table, "factor"))
    if kind == "dynamic":
        alpha = table.get("alpha")
        return replace(base, kind="ntk_alpha", factor=positive(table, "alpha")) if alpha else base
    if kind == "llama3":
        return _llama3(config, table, base)
    if kind == "yarn":
        return _yarn(config, table, base)
    raise ModelError(f"the model's rotary embedding of type {kind!r} is not supported")


def _original(config: CheckpointConfig, table: CheckpointConfig) -> int:
    longest = integer(config, "max_position_embeddings")
    outer = integer(config, "original_max_position_embeddings", longest)
    return integer(table, "original_max_position_embeddings", outer)


def _llama3(config: CheckpointConfig, table: CheckpointConfig, base: Rope) -> Rope:
    low, high = positive(table, "low_freq_factor"), positive(table, "high_freq_factor")
    if low == high:
        raise ModelError("the model's configuration has no usable high_freq_factor")
    return replace(
        base,
        kind="llama3",
        factor=positive(table, "factor"),
        original_positions=_original(config, table),
        low_freq=low,
        high_freq=high,
    )


def _yarn(config: CheckpointConfig, table: CheckpointConfig, base: Rope) -> Rope:
    original = _original(config, table)
    factor = positive(table, "factor", integer(config, "max_position_embeddings") / original)
    weight, weight_all = (number(table, key, 0.0) for key in ("mscale", "mscale_all_dim"))
    if weight and weight_all:
        magnitude = _yarn_magnitude(factor, weight) / _yarn_magnitude(factor, weight_all)
    else:
        magnitude = _yarn_magnitude(factor)
    return replace(
        base,
        kind="yarn",
        factor=factor,
        original_positions=original,
        beta_fast=positive(table, "beta_fast", 32.0),
        beta_slow=positive(table, "beta_slow", 1.0),
        truncate=flag(table, "truncate", True),
        magnitude=number(table, "attention_factor", magnitude),
    )


def _yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def decoder(
    config: CheckpointConfig,
    layers: Sequence[LayerConfig],
    norm: NormConfig,
    *,
    tied: bool = False,
    **switches: Any,
) -> DecoderConfig:
    """A decoder of a checkpoint's sizes; tied is what the family takes for granted. Raises ModelError."""
    return DecoderConfig(
        hidden_size=integer(config, "hidden_size"),
        vocab_size=integer(config, "vocab_size"),
        max_positions=integer(config, "max_position_embeddings"),
        layers=tuple(layers),
        norm=norm,
        tied=flag(config, "tie_word_embeddings", tied),
        **switches,
    )
