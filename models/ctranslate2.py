"""Reader of CTranslate2 Whisper directories (`model.bin`, `config.json`), the files of faster-whisper users.

Tensors come out under the names of the transformers layout, so that one loader serves both formats.

`model.bin`, all little-endian; a string is uint16 length (a final NUL counted) and its bytes:
    uint32 binary version (6); string spec name; uint32 spec revision; uint32 variable count;
    a variable: string name; uint8 rank; uint32 dimensions[rank]; uint8 dtype id; uint32 byte count; data;
    uint32 alias count; an alias: string alias, string variable. Nothing follows.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from .base import ModelError

MODEL_FILE = "model.bin"
BINARY_VERSION = 6
HEADER_BYTES = 64
WHISPER_REVISION = 3
MAX_VARIABLES = 65_536  # large-v3 has about 1,100
MAX_RANK = 8

DTYPES = (torch.float32, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16)

# Scalars that would change the forward pass, with the only value that Whisper has.
ARCHITECTURE = {
    "decoder/activation": 3,  # exact GELU
    "decoder/alibi": 0,
    "decoder/pre_norm": 1,
    "decoder/scale_embeddings": 0,
    "decoder/start_from_zero_embedding": 0,
}
IGNORED = (
    *("encoder/num_heads", "decoder/num_heads"),  # read for the configuration
    *("decoder/alignment_heads", "decoder/alignment_layer"),  # stubs; the true ones are in config.json
    *("decoder/scale_alibi", "decoder/alibi_use_positive_positions"),  # without effect where alibi is 0
)

PLAIN = {
    "encoder/conv1/weight": "model.encoder.conv1.weight",
    "encoder/conv1/bias": "model.encoder.conv1.bias",
    "encoder/conv2/weight": "model.encoder.conv2.weight",
    "encoder/conv2/bias": "model.encoder.conv2.bias",
    "encoder/position_encodings/encodings": "model.encoder.embed_positions.weight",
    "encoder/layer_norm/gamma": "model.encoder.layer_norm.weight",
    "encoder/layer_norm/beta": "model.encoder.layer_norm.bias",
    "decoder/embeddings/weight": "model.decoder.embed_tokens.weight",
    "decoder/position_encodings/encodings": "model.decoder.embed_positions.weight",
    "decoder/layer_norm/gamma": "model.decoder.layer_norm.weight",
    "decoder/layer_norm/beta": "model.decoder.layer_norm.bias",
}
# Inside a layer: the modules whose rows are stacked in one variable, in order.
LAYER = {
    "self_attention/layer_norm": ("self_attn_layer_norm",),
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "attention/layer_norm": ("encoder_attn_layer_norm",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
    "ffn/layer_norm": ("final_layer_norm",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
}
LAYER_NAME = re.compile(
    r"(encoder|decoder)/layer_(0|[1-9][0-9]{0,3})/([a-z_]+/[a-z_]+[0-9]?)/(weight|bias|gamma|beta)"
)
PROJECTION = "decoder/projection/weight"
EMBEDDINGS = "decoder/embeddings/weight"


@dataclass(frozen=True)
class Variable:
    """Where one variable's data lie in the file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Index:
    """The directory of a `model.bin`. `variables` maps every name, aliases included, to its variable."""

    path: Path
    spec: str
    revision: int
    variables: Mapping[str, Variable]

    def get(self, name: str) -> Variable:
        if name not in self.variables:
            raise ModelError(f"{self.path.parent.name}/{MODEL_FILE} lacks the variable {name}")
        return self.variables[name]


class _Reader:
    """Bounded reads: nothing is allocated before the file is known to hold it."""

    def __init__(self, file: BinaryIO, label: str) -> None:
        self.file = file
        self.label = label
        self.size = file.seek(0, 2)
        file.seek(0)

    def damaged(self, what: str) -> ModelError:
        return ModelError(f"{self.label} is damaged: {what}")

    def read(self, count: int) -> bytes:
        data = self.file.read(count)
        if len(data) != count:
            raise self.damaged("it ends early")
        return data

    def integer(self, code: str) -> int:
        layout = struct.Struct("<" + code)
        return int(layout.unpack(self.read(layout.size))[0])

    def string(self) -> str:
        raw = self.read(self.integer("H"))
        if not raw.endswith(b"\0"):
            raise self.damaged("a name does not end")
        try:
            return raw[:-1].decode("ascii")
        except UnicodeDecodeError:
            raise self.damaged("a name is not text") from None

    def variable(self) -> Variable:
        name = self.string()
        rank = self.integer("B")
        if rank > MAX_RANK:
            raise self.damaged(f"variable {name} has {rank} dimensions")
        shape = tuple(self.integer("I") for _ in range(rank))
        dtype_id = self.integer("B")
        if dtype_id >= len(DTYPES):
            raise self.damaged(f"variable {name} has the unknown data type {dtype_id}")
        num_bytes = self.integer("I")
        dtype = DTYPES[dtype_id]
        if num_bytes != math.prod(shape) * dtype.itemsize:
            raise self.damaged(f"variable {name} holds {num_bytes} bytes, its shape needs another number")
        offset = self.file.tell()
        if offset + num_bytes > self.size:
            raise self.damaged("it ends early")
        self.file.seek(num_bytes, 1)
        return Variable(name, shape, dtype, offset, num_bytes)


def is_header(head: bytes) -> bool:
    """Whether the first HEADER_BYTES of a file are CTranslate2's (a pickled checkpoint's are not)."""
    if len(head) < HEADER_BYTES:
        return False
    version, length = struct.unpack_from("<IH", head)
    name = head[6 : 6 + length]
    return 0 < version <= BINARY_VERSION and 1 < length == len(name) and name[-1] == 0 and name[:-1].isalnum()


def is_ctranslate2(path: Path) -> bool:
    """Whether a file begins as a CTranslate2 model does."""
    try:
        with path.open("rb") as file:
            return is_header(file.read(HEADER_BYTES))
    except OSError as error:
        raise ModelError(f"{path.parent.name}/{path.name} cannot be read: {error.strerror}") from None


def read_index(path: Path) -> Index:
    """The variables of a `model.bin` without their data.

    Raises ModelError for a file that is absent, damaged, truncated or of another version; reads a few
    hundred bytes a variable, whatever the counts in the header claim.
    """
    label = f"{path.parent.name}/{path.name}"
    try:
        with path.open("rb") as file:
            return _read_index(_Reader(file, label), path)
    except OSError as error:
        raise ModelError(f"{label} cannot be read: {error.strerror}") from None


def _read_index(reader: _Reader, path: Path) -> Index:
    version = reader.integer("I")
    if version != BINARY_VERSION:
        raise ModelError(f"{reader.label} is not a CTranslate2 model of version {BINARY_VERSION}")
    spec, revision, count = reader.string(), reader.integer("I"), reader.integer("I")
    if count > MAX_VARIABLES:
        raise reader.damaged(f"it claims {count} variables")
    variables: dict[str, Variable] = {}
    for _ in range(count):
        variable = reader.variable()
        if variable.name in variables:
            raise reader.damaged(f"variable {variable.name} appears twice")
        variables[variable.name] = variable
    aliases = reader.integer("I")
    if aliases > MAX_VARIABLES:
        raise reader.damaged(f"it claims {aliases} aliases")
    for _ in range(aliases):
        alias, target = reader.string(), reader.string()
        if alias in variables or target not in variables:
            raise reader.damaged(f"alias {alias} is doubled or stands for no variable")
        variables[alias] = variables[target]
    if reader.file.tell() != reader.size:
        raise reader.damaged("data follow its end")
    return Index(path, spec, revision, variables)


def _read(file: BinaryIO, variable: Variable) -> Tensor:
    """The stored numbers, in the stored type."""
    if variable.num_bytes == 0:
        return torch.empty(variable.shape, dtype=variable.dtype)
    buffer = bytearray(variable.num_bytes)
    file.seek(variable.offset)
    if file.readinto(buffer) != variable.num_bytes:  # type: ignore[attr-defined]
        raise ModelError(f"{MODEL_FILE} is damaged: it ends early")
    return torch.frombuffer(buffer, dtype=variable.dtype).reshape(variable.shape)


def _load(file: BinaryIO, index: Index, name: str) -> Tensor:
    """A variable's values: integers are divided by their `_scale` (one number, or one a row) into float32."""
    tensor = _read(file, index.get(name))
    if tensor.is_floating_point():
        return tensor
    scale = _read(file, index.get(name + "_scale")).float()
    if scale.numel() not in (1, *tensor.shape[:1]) or not bool((scale > 0).all()):
        raise ModelError(f"the scale of variable {name} has a wrong shape or sign")
    return tensor.float() / scale.reshape(-1, *[1] * (tensor.ndim - 1))


def _split(tensor: Tensor, name: str, parts: int) -> tuple[Tensor, ...]:
    if tensor.ndim == 0 or tensor.shape[0] % parts:
        raise ModelError(f"variable {name} has shape {list(tensor.shape)}, which does not split in {parts}")
    return tensor.chunk(parts)


def _layer_tensors(tensor: Tensor, name: str) -> Iterator[tuple[str, Tensor]]:
    match = LAYER_NAME.fullmatch(name)
    if match is None or match[3] not in LAYER:
        raise ModelError(f"variable {name} is no part of a Whisper model")
    modules, kind = LAYER[match[3]], {"gamma": "weight", "beta": "bias"}.get(match[4], match[4])
    for module, part in zip(modules, _split(tensor, name, len(modules)), strict=True):
        if module.endswith("k_proj") and kind == "bias":
            # Whisper's key projection has no bias: the fused bias has zeros in its place.
            if bool(part.count_nonzero()):
                raise ModelError(f"variable {name} has a bias for the keys, which Whisper has not")
            continue
        yield f"model.{match[1]}.layers.{match[2]}.{module}.{kind}", part


def whisper_weights(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Streams (name, tensor) of a Whisper model, under the names of the transformers layout.

    The output projection is tied to the token embeddings and is not yielded. Floating-point tensors keep
    their stored type, quantised ones become float32. One tensor is in memory at a time. Raises ModelError.
    """
    index = _whisper_index(directory)
    label = f"{directory.name}/{MODEL_FILE}"
    try:
        with index.path.open("rb") as file:
            _check_architecture(file, index)
            for name in index.variables:
                if name in ARCHITECTURE or name in IGNORED or name == PROJECTION:
                    continue
                if name.endswith("_scale") and name.removesuffix("_scale") in index.variables:
                    continue
                tensor = _load(file, index, name)
                if name in PLAIN:
                    yield PLAIN[name], tensor
                else:
                    yield from _layer_tensors(tensor, name)
    except OSError as error:
        raise ModelError(f"{label} cannot be read: {error.strerror}") from None


def _whisper_index(directory: Path) -> Index:
    index = read_index(directory / MODEL_FILE)
    if index.spec != "WhisperSpec":
        raise ModelError(f"{directory.name} is a CTranslate2 model of kind {index.spec}, not Whisper")
    if index.revision != WHISPER_REVISION:
        raise ModelError(
            f"{directory.name} has revision {index.revision} of CTranslate2's Whisper layout, not 3"
        )
    return index


def _check_architecture(file: BinaryIO, index: Index) -> None:
    for name, value in ARCHITECTURE.items():
        if name in index.variables:
            stored = _read(file, index.get(name))
            if stored.numel() != 1 or int(stored) != value:
                raise ModelError(f"{name} of this model is {stored.tolist()}, only {value} is supported")
    projection = index.variables.get(PROJECTION)
    if (
        projection is not None
        and projection != index.get(EMBEDDINGS)
        and not torch.equal(_load(file, index, PROJECTION), _load(file, index, EMBEDDINGS))
    ):
        raise ModelError("the model's output projection differs from its token embeddings")


def _num_layers(index: Index, side: str) -> int:
    matches = (LAYER_NAME.fullmatch(name) for name in index.variables)
    return 1 + max((int(match[2]) for match in matches if match and match[1] == side), default=-1)


def _num_heads(file: BinaryIO, index: Index, side: str, d_model: int) -> int:
    name = f"{side}/num_heads"
    stored = _read(file, index.get(name)) if name in index.variables else torch.tensor(d_model // 64)
    if stored.numel() != 1 or int(stored) < 1 or d_model % int(stored):
        raise ModelError(f"{name} does not divide the model's width of {d_model}")
    return int(stored)


def _dims(index: Index, name: str, rank: int) -> tuple[int, ...]:
    shape = index.get(name).shape
    if len(shape) != rank:
        raise ModelError(f"variable {name} has shape {list(shape)}, expected {rank} dimensions")
    return shape


def read_whisper_config(directory: Path) -> dict[str, Any]:
    """The model's sizes under the keys of the transformers configuration, read from the tensors' shapes.

    And what CTranslate2's config.json tells: alignment_heads, suppress_ids, suppress_ids_begin, lang_ids.
    """
    index = _whisper_index(directory)
    d_model, num_mel_bins, _ = _dims(index, "encoder/conv1/weight", 3)
    vocab_size, _ = _dims(index, EMBEDDINGS, 2)
    with index.path.open("rb") as file:
        config: dict[str, Any] = {
            "model_type": "whisper",
            "num_mel_bins": num_mel_bins,
            "d_model": d_model,
            "vocab_size": vocab_size,
            "max_source_positions": _dims(index, "encoder/position_encodings/encodings", 2)[0],
            "max_target_positions": _dims(index, "decoder/position_encodings/encodings", 2)[0],
        }
        for side in ("encoder", "decoder"):
            config[f"{side}_layers"] = _num_layers(index, side)
            config[f"{side}_attention_heads"] = _num_heads(file, index, side, d_model)
            config[f"{side}_ffn_dim"] = _dims(index, f"{side}/layer_0/ffn/linear_0/weight", 2)[0]
    return config | _side_config(directory / "config.json")


def _side_config(path: Path) -> dict[str, Any]:
    label = f"{path.parent.name}/{path.name}"
    try:
        stored = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{label} cannot be read: {error.strerror}") from None
    except ValueError:
        raise ModelError(f"{label} is not JSON") from None
    if not isinstance(stored, dict):
        raise ModelError(f"{label} is not a JSON object")
    wanted = ("alignment_heads", "suppress_ids", "suppress_ids_begin", "lang_ids")
    return {key: stored[key] for key in wanted if stored.get(key) is not None}
