"""The engine's configuration: one frozen dataclass, from which the command-line flags are generated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def option(default: Any, help: str, **extra: Any) -> Any:
    """A dataclass field with the help text (and choices) of the flag generated from it."""
    return field(default=default, metadata={"help": help, **extra})


class ConfigError(ValueError):
    """A configuration that cannot work; the text is one line for users."""


@dataclass(frozen=True)
class EngineConfig:
    """How much memory and work the engine may use. Sizes in MiB, counts in tokens or sequences."""

    dtype: str = option(
        "auto",
        "number format of weights and activations; auto is float32 on a CPU",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    kv_cache_mb: int = option(2048, "memory for all cached keys and values, in MiB; touched only as needed")
    slab_mb: int = option(16, "unit in which cache memory moves between models, in MiB")
    encoder_cache_mb: int = option(256, "memory for encoder outputs kept for reuse, in MiB")
    max_num_seqs: int = option(16, "most sequences in one step")
    max_num_batched_tokens: int = option(2048, "most decoder tokens in one step")
    max_num_encoder_tokens: int = option(
        3000, "most encoder positions in one step (a Whisper window has 1500)"
    )
    prefix_caching: bool = option(True, "keep the pages of finished requests for prompts that start alike")
    threads: int = option(0, "CPU threads for tensor work; 0 takes every core this process may use")

    def __post_init__(self) -> None:
        for name in ("kv_cache_mb", "slab_mb", "encoder_cache_mb", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1")
        if self.max_num_encoder_tokens < 1 or self.threads < 0:
            raise ConfigError("--max-num-encoder-tokens must be at least 1 and --threads at least 0")
        if self.kv_cache_mb < self.slab_mb:
            raise ConfigError("--kv-cache-mb must hold at least one --slab-mb")
