"""Writes small GGUF files, with the `gguf` package where it can, byte by byte where it would refuse."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

LLAMA = {
    "block_count": 2,
    "context_length": 64,
    "embedding_length": 32,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def dense_tensors(
    hidden: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    inner: int = 64,
    vocab: int = 16,
    layers: int = 2,
    **more: tuple[int, ...],
) -> dict[str, np.ndarray]:
    """Random weights under GGUF names; more: shapes of further tensors of each layer."""
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (vocab, hidden),
        "output_norm.weight": (hidden,),
    }
    for layer in range(layers):
        leaves = {
            "attn_norm": (hidden,),
            "ffn_norm": (hidden,),
            "attn_q": (heads * head_dim, hidden),
            "attn_k": (kv_heads * head_dim, hidden),
            "attn_v": (kv_heads * head_dim, hidden),
            "attn_output": (hidden, heads * head_dim),
            "ffn_gate": (inner, hidden),
            "ffn_up": (inner, hidden),
            "ffn_down": (hidden, inner),
        }
        shapes |= {f"blk.{layer}.{leaf}.weight": shape for leaf, shape in (leaves | more).items() if shape}
    return {name: random(*shape, seed=index) for index, (name, shape) in enumerate(shapes.items())}


def write(
    path: Path,
    architecture: str,
    keys: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    kinds: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    tokenizer: Mapping[str, Any] | None = None,
) -> Path:
    """keys: under the architecture's prefix. kinds: how a tensor is stored, float32 by default."""
    writer = gguf.GGUFWriter(path, architecture)
    pairs = {f"{architecture}.{key}": value for key, value in keys.items()}
    for key, value in (pairs | {f"tokenizer.{k}": v for k, v in (tokenizer or {}).items()}).items():
        add(writer, key, value)
    for name, data in tensors.items():
        kind = (kinds or {}).get(name)
        if kind is None:
            writer.add_tensor(name, data)
        else:
            writer.add_tensor(name, gguf.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, list(value))


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def header(
    pairs: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    *,
    version: int = 3,
    num_pairs: int | None = None,
    num_tensors: int | None = None,
    data: bytes = b"",
) -> bytes:
    """A file of these raw entries, whose counts may lie."""
    pairs = [string("general.architecture") + struct.pack("<I", 8) + string("llama"), *pairs]
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(pairs) if num_pairs is None else num_pairs,
    )
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


def tensor(name: str, dims: Sequence[int], kind: int = 0, offset: int = 0, rank: int | None = None) -> bytes:
    """An entry of the table of tensors; dims: innermost first."""
    entry = string(name) + struct.pack("<I", len(dims) if rank is None else rank)
    return entry + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", kind, offset)
