"""Readers of checkpoints: what format a path holds, its configuration, and a stream of (name, tensor).

Formats: safetensors directories (one file, or shards with an index), CTranslate2 Whisper directories, GGUF
files. Pickled checkpoints are never opened.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from . import ctranslate2
from .base import ModelError

Format = Literal["safetensors", "ctranslate2", "gguf"]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_JSON_BYTES = 64 << 20
SHOWN_NAMES = 4

# Cross-attention heads that follow the audio (openai/whisper), by (decoder layers, width, vocabulary).
ALIGNMENT_HEADS: Mapping[tuple[int, int, int], tuple[tuple[int, int], ...]] = {
    (4, 384, 51865): ((2, 2), (3, 0), (3, 2), (3, 3), (3, 4), (3, 5)),
    (4, 384, 51864): ((1, 0), (2, 0), (2, 5), (3, 0), (3, 1), (3, 2), (3, 3), (3, 4)),
    (6, 512, 51865): ((3, 1), (4, 2), (4, 3), (4, 7), (5, 1), (5, 2), (5, 4), (5, 6)),
    (6, 512, 51864): ((3, 3), (4, 7), (5, 1), (5, 5), (5, 7)),
    (12, 768, 51865): (
        *((5, 3), (5, 9), (8, 0), (8, 4), (8, 7)),
        *((8, 8), (9, 0), (9, 7), (9, 9), (10, 5)),
    ),
    (24, 1024, 51865): ((13, 15), (15, 4), (15, 15), (16, 1), (20, 0), (23, 4)),
    (32, 1280, 51866): (
        *((7, 0), (10, 17), (12, 18), (13, 12), (16, 1)),
        *((17, 14), (19, 11), (21, 4), (24, 1), (25, 6)),
    ),
    (4, 1280, 51866): ((2, 4), (2, 11), (3, 3), (3, 6), (3, 11), (3, 14)),
}
WHISPER_SIZES = (
    "num_mel_bins",
    "d_model",
    "vocab_size",
    "max_source_positions",
    "max_target_positions",
    "encoder_layers",
    "encoder_attention_heads",
    "encoder_ffn_dim",
    "decoder_layers",
    "decoder_attention_heads",
    "decoder_ffn_dim",
)
EMBEDDINGS = "model.decoder.embed_tokens.weight"
PROJECTION = "proj_out.weight"


def detect_format(path: Path) -> Format:
    """What a model's directory or file holds. Raises ModelError if nothing that can be read."""
    if not path.exists():
        raise ModelError(f"there is no model at {path.name}")
    if path.is_file():
        if path.suffix == ".gguf" and _starts_with(path, b"GGUF"):
            return "gguf"
        raise ModelError(f"{path.name} is not a model: expected a directory or a GGUF file")
    if (path / SINGLE_FILE).is_file() or (path / INDEX_FILE).is_file():
        return "safetensors"
    if (path / ctranslate2.MODEL_FILE).is_file():
        if ctranslate2.is_ctranslate2(path / ctranslate2.MODEL_FILE):
            return "ctranslate2"
        raise ModelError(f"{path.name}/{ctranslate2.MODEL_FILE} is not a CTranslate2 model")
    if any(path.glob("*.gguf")):
        return "gguf"
    if any(path.glob("*.bin")) or any(path.glob("*.pt")) or any(path.glob("*.pth")):
        raise ModelError(f"{path.name} has only pickled weights, which are never opened: use safetensors")
    raise ModelError(f"{path.name} has no model weights (safetensors, CTranslate2 or GGUF)")


def _starts_with(path: Path, magic: bytes) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(magic)) == magic
    except OSError as error:
        raise ModelError(f"{path.name} cannot be read: {error.strerror}") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a checkpoint. Raises ModelError if absent, too large or anything else."""
    label = f"{path.parent.name}/{path.name}"
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelError(f"{label} is larger than {MAX_JSON_BYTES >> 20} MiB")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{label} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ModelError(f"{label} is not valid JSON") from None
    if not isinstance(value, dict):
        raise ModelError(f"{label} is not a JSON object")
    return value


def read_config(directory: Path) -> dict[str, Any]:
    """`config.json` of a model directory."""
    return read_json(directory / "config.json")


def safetensors_weights(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Streams (name, tensor) in the stored types, shard by shard. Raises ModelError.

    Every tensor of the index must be in its shard, and no shard may hold a tensor that the index lacks.
    """
    if (directory / SINGLE_FILE).is_file():
        yield from _file_weights(directory / SINGLE_FILE, None)
        return
    weight_map = read_json(directory / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{directory.name}/{INDEX_FILE} has no weight_map")
    shards: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ModelError(f"{directory.name}/{INDEX_FILE} names a file outside the model's directory")
        shards.setdefault(shard, set()).add(name)
    for shard, names in sorted(shards.items()):
        yield from _file_weights(directory / shard, names)


def _file_weights(path: Path, expected: Collection[str] | None) -> Iterator[tuple[str, Tensor]]:
    label = f"{path.parent.name}/{path.name}"
    if not path.is_file():
        raise ModelError(f"{label} is missing")
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            if expected is not None and set(names) != set(expected):
                raise ModelError(f"{label} disagrees with the index on {_some(set(names) ^ set(expected))}")
            for name in names:
                yield name, file.get_tensor(name)
    except (SafetensorError, OSError):
        raise ModelError(f"{label} is damaged or cannot be read") from None


def _some(names: Collection[str]) -> str:
    shown = ", ".join(sorted(names)[:SHOWN_NAMES])
    return f"{shown} and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else shown


def load_strict(expected: Mapping[str, Tensor], weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copies a stream of weights into `expected`, converting to the type and device of each parameter.

    Shapes must be equal and the kind of number (floating or integer) the same; every parameter must be
    given once and nothing else. Raises ModelError naming what is missing, left over, double or wrong.
    """
    missing = dict(expected)
    left_over: list[str] = []
    seen: set[str] = set()
    with torch.no_grad():
        for name, tensor in weights:
            if name in seen:
                raise ModelError(f"the model has the tensor {name} twice")
            seen.add(name)
            parameter = missing.pop(name, None)
            if parameter is None:
                left_over.append(name)
                continue
            if parameter.shape != tensor.shape:
                shapes = f"{list(tensor.shape)}, expected {list(parameter.shape)}"
                raise ModelError(f"the tensor {name} has shape {shapes}")
            if parameter.is_floating_point() != tensor.is_floating_point():
                types = f"{tensor.dtype}, expected {parameter.dtype}".replace("torch.", "")
                raise ModelError(f"the tensor {name} has type {types}")
            parameter.copy_(tensor)
    if missing:
        raise ModelError(f"the model lacks the tensors {_some(missing.keys())}")
    if left_over:
        raise ModelError(f"the model has unknown tensors {_some(left_over)}")


def open_whisper(directory: Path) -> tuple[dict[str, Any], Iterator[tuple[str, Tensor]]]:
    """A Whisper checkpoint of either format: (configuration, stream of weights).

    The configuration has WHISPER_SIZES under the keys of transformers, and alignment_heads: a list of
    (layer, head). Where the checkpoint tells them, also suppress_ids, suppress_ids_begin and lang_ids: lists
    of token ids. The weights have the names of transformers ("model.encoder.conv1.weight"); the output
    projection is the token embeddings and is not in the stream. Raises ModelError, also while streaming.
    """
    kind = detect_format(directory)
    if kind == "ctranslate2":
        config, weights = ctranslate2.read_whisper_config(directory), ctranslate2.whisper_weights(directory)
    elif kind == "safetensors":
        config, weights = _transformers_config(directory), _tied(directory)
    else:
        raise ModelError(f"{directory.name} is a GGUF file, not a Whisper model")
    _check_whisper_config(config, directory.name)
    return config, weights


def tokenizer_file(directory: Path) -> Path:
    """The `tokenizer.json` of a model directory. Raises ModelError if there is none."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{directory.name} has no tokenizer.json")
    return path


def _transformers_config(directory: Path) -> dict[str, Any]:
    config = read_config(directory)
    if config.get("model_type") != "whisper":
        raise ModelError(f"{directory.name} is a model of type {config.get('model_type')!r}, not Whisper")
    if config.get("activation_function", "gelu") != "gelu" or config.get("scale_embedding"):
        raise ModelError(f"{directory.name} has an activation or embedding scale that is not supported")
    generation_file = directory / "generation_config.json"
    generation = read_json(generation_file) if generation_file.is_file() else {}
    result = {key: config[key] for key in WHISPER_SIZES if key in config}
    result["model_type"] = "whisper"
    languages = generation.get("lang_to_id")
    found = {
        "alignment_heads": generation.get("alignment_heads"),
        "suppress_ids": generation.get("suppress_tokens", config.get("suppress_tokens")),
        "suppress_ids_begin": generation.get("begin_suppress_tokens", config.get("begin_suppress_tokens")),
        "lang_ids": sorted(languages.values()) if isinstance(languages, dict) else None,
    }
    return result | {key: value for key, value in found.items() if value is not None}


def _tied(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Drops an output projection that repeats the embeddings; one that differs is an error."""
    kept: dict[str, Tensor] = {}
    for name, tensor in safetensors_weights(directory):
        if name in (PROJECTION, EMBEDDINGS):
            kept[name] = tensor
        if name != PROJECTION:
            yield name, tensor
    if PROJECTION in kept and EMBEDDINGS in kept and not torch.equal(kept[PROJECTION], kept[EMBEDDINGS]):
        raise ModelError(f"the output projection of {directory.name} differs from its token embeddings")


def _check_whisper_config(config: dict[str, Any], label: str) -> None:
    for key in WHISPER_SIZES:
        value = config.get(key)
        if type(value) is not int or value < 1:
            raise ModelError(f"the configuration of {label} has no usable {key}")
    for side in ("encoder", "decoder"):
        if config["d_model"] % config[f"{side}_attention_heads"]:
            raise ModelError(f"the attention heads of {label} do not divide its width")
    vocab = config["vocab_size"]
    for key in ("suppress_ids", "suppress_ids_begin", "lang_ids"):
        ids = config.get(key, [])
        if not isinstance(ids, list) or any(type(i) is not int or not 0 <= i < vocab for i in ids):
            raise ModelError(f"the configuration of {label} has wrong {key}")
    layers, heads = config["decoder_layers"], config["decoder_attention_heads"]
    known = ALIGNMENT_HEADS.get((layers, config["d_model"], config["vocab_size"]))
    last_half = [(layer, head) for layer in range(layers // 2, layers) for head in range(heads)]
    chosen = config.get("alignment_heads") or known or last_half
    if not isinstance(chosen, (list, tuple)) or not all(_is_head(pair, layers, heads) for pair in chosen):
        raise ModelError(f"the configuration of {label} has wrong alignment_heads")
    config["alignment_heads"] = [(layer, head) for layer, head in chosen]


def _is_head(pair: Any, layers: int, heads: int) -> bool:
    return (
        isinstance(pair, (list, tuple))
        and len(pair) == 2
        and all(type(i) is int for i in pair)
        and 0 <= pair[0] < layers
        and 0 <= pair[1] < heads
    )
