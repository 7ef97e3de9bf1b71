"""Reader of GGUF files (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), versions 2 and 3.

Little-endian: magic "GGUF"; uint32 version; uint64 tensor count; uint64 count of key-value pairs; the pairs;
the table of tensors (name, dimensions innermost first, type, offset); padding; the tensors' data. A string is
uint64 length and UTF-8. Whatever a header claims, nothing is allocated before the file is known to hold it.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..kernels.quant import GGUF_FORMATS, BlockFormat, dequantize
from . import gguf_config as configs
from . import gguf_names
from .base import ModelError

VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 16
MAX_PAIRS = 1 << 16
MAX_TENSORS = 1 << 18
MAX_STRINGS = 1 << 22  # of one array; the largest vocabularies have 262,144 tokens and twice as many merges
MAX_RANK = 4
MAX_PARTS = 1000
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")

NUMBERS: Mapping[int, np.dtype[Any]] = {
    **{0: np.dtype("<u1"), 1: np.dtype("<i1"), 2: np.dtype("<u2"), 3: np.dtype("<i2"), 4: np.dtype("<u4")},
    **{5: np.dtype("<i4"), 6: np.dtype("<f4"), 7: np.dtype("?"), 10: np.dtype("<u8"), 11: np.dtype("<i8")},
    12: np.dtype("<f8"),
}
STRING, ARRAY = 8, 9

# Types that files have and that are not read, for the message.
OTHER_TYPES = {
    **{9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS"},
    **{19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32"},
    **{27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"},
}


@dataclass(frozen=True)
class GGUFTensor:
    """Where one tensor's data lie. shape: outermost dimension first. offset: from the file's beginning."""

    name: str
    shape: tuple[int, ...]
    format: BlockFormat
    offset: int
    path: Path

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.format.size * self.format.num_bytes

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True)
class GGUFFile:
    """The header of a model, of all its parts together if it is split.

    metadata: numbers, strings, truth values, lists of strings, NumPy arrays of numbers.
    """

    label: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]

    def load(self, name: str, index: int | None = None, data: Tensor | None = None) -> Tensor:
        """A tensor in float32, or a view of the mapped file where it is stored as F32, F16 or BF16.

        index: only this entry of the outermost dimension (one expert of many).
        data: the bytes of the tensor's file, if it is mapped already.
        """
        tensor = self.tensors[name]
        data = _map(tensor.path) if data is None else data
        shape, start, num_bytes = tensor.shape, tensor.offset, tensor.num_bytes
        if index is not None:
            num_bytes //= shape[0]
            start += index * num_bytes
            shape = shape[1:]
        rows = data[start : start + num_bytes].view(-1, tensor.row_bytes)
        return dequantize(rows, tensor.format).view(shape)


class _Reader:
    """Bounded reads of one file's header."""

    def __init__(self, data: mmap.mmap, label: str) -> None:
        self.data = data
        self.size = len(data)
        self.label = label
        self.position = 0

    def damaged(self, what: str) -> ModelError:
        return ModelError(f"{self.label} is damaged: {what}")

    def take(self, count: int) -> bytes:
        if count > self.size - self.position:
            raise self.damaged("it ends early")
        start = self.position
        self.position += count
        return self.data[start : self.position]

    def integer(self, code: str = "Q") -> int:
        layout = struct.Struct("<" + code)
        return int(layout.unpack(self.take(layout.size))[0])

    def string(self) -> str:
        try:
            return self.take(self.integer()).decode()
        except UnicodeDecodeError:
            raise self.damaged("a string is not UTF-8") from None

    def value(self) -> Any:
        kind = self.integer("I")
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self.array()
        return self.numbers(kind, 1)[0].item()

    def numbers(self, kind: int, count: int) -> np.ndarray:
        if kind not in NUMBERS:
            raise self.damaged(f"a value is of the unknown type {kind}")
        return np.frombuffer(self.take(count * NUMBERS[kind].itemsize), NUMBERS[kind])

    def array(self) -> list[str] | np.ndarray:
        kind, count = self.integer("I"), self.integer()
        if kind != STRING:
            return self.numbers(kind, count)
        if count > MAX_STRINGS:
            raise self.damaged(f"a list has {count} strings")
        return [self.string() for _ in range(count)]

    def count(self, limit: int, what: str) -> int:
        count = self.integer()
        if count > limit:
            raise self.damaged(f"it claims to have {count} {what}")
        return count


def _read_part(path: Path, label: str) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelError(f"{label} is not a GGUF file")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _read_header(_Reader(data, label), path)
    except OSError as error:
        raise ModelError(f"{label} cannot be read: {error.strerror}") from None


def _read_header(reader: _Reader, path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    reader.take(4)
    version = reader.integer("I")
    if version not in VERSIONS:
        raise ModelError(f"{reader.label} is of GGUF version {version}; supported: 2 and 3, little-endian")
    num_tensors = reader.count(MAX_TENSORS, "tensors")
    metadata: dict[str, Any] = {}
    for _ in range(reader.count(MAX_PAIRS, "keys")):
        key = reader.string()
        if key in metadata:
            raise reader.damaged(f"the key {key[:80]} occurs twice")
        metadata[key] = reader.value()
    entries = [_tensor_entry(reader) for _ in range(num_tensors)]

    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    valid = isinstance(alignment, int) and 8 <= alignment <= MAX_ALIGNMENT
    if not valid or alignment & (alignment - 1):
        raise reader.damaged("its alignment is not a power of two")
    data_start = -(-reader.position // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, block_format, offset in entries:
        tensor = GGUFTensor(name, shape, block_format, data_start + offset, path)
        if name in tensors:
            raise reader.damaged(f"the tensor {name[:80]} occurs twice")
        if offset % alignment:
            raise reader.damaged(f"the tensor {name[:80]} is not aligned")
        if tensor.offset + tensor.num_bytes > reader.size:
            raise reader.damaged("it ends early")
        tensors[name] = tensor
    return metadata, tensors


def _tensor_entry(reader: _Reader) -> tuple[str, tuple[int, ...], BlockFormat, int]:
    name = reader.string()
    rank = reader.integer("I")
    if not 1 <= rank <= MAX_RANK:
        raise reader.damaged(f"the tensor {name[:80]} has {rank} dimensions")
    shape = tuple(reversed([reader.integer() for _ in range(rank)]))
    kind, offset = reader.integer("I"), reader.integer()
    if kind not in GGUF_FORMATS:
        kind_name = OTHER_TYPES.get(kind, str(kind))
        known = ", ".join(entry.name for entry in GGUF_FORMATS.values())
        raise ModelError(f"{reader.label}: the tensor {name[:80]} is of type {kind_name}; supported: {known}")
    block_format = GGUF_FORMATS[kind]
    if 0 in shape or shape[-1] % block_format.size:
        raise reader.damaged(f"the tensor {name[:80]} has no whole blocks of {block_format.name}")
    return name, shape, block_format, offset


def gguf_path(path: Path) -> Path:
    """The file of a path that is a GGUF file or the directory of one (the first part of a split one).

    Raises ModelError where there is none, or more than one.
    """
    if not path.is_dir():
        return path
    files = [file for file in sorted(path.glob("*.gguf")) if "mmproj" not in file.name.lower()]
    parts = [PART.fullmatch(file.name) for file in files]
    firsts = [file for file, part in zip(files, parts, strict=True) if not part or int(part[2]) == 1]
    if len(firsts) != 1:
        found = ", ".join(file.name for file in firsts[:4])
        raise ModelError(f"{path.name} has " + (f"several GGUF files: {found}" if firsts else "no GGUF file"))
    return firsts[0]


def read_gguf(path: Path) -> GGUFFile:
    """The header of a GGUF file (of all parts of a split one, named by its first). Raises ModelError."""
    path = gguf_path(path)
    label = path.name
    metadata, tensors = _read_part(path, label)
    part = PART.fullmatch(path.name)
    if part is None:
        count = metadata.get("split.count", 1)
        if not isinstance(count, int) or count > 1:
            raise ModelError(f"{label} is one part of a split model and not named so")
        return GGUFFile(label, metadata, tensors)
    if int(part[2]) != 1 or int(part[3]) > MAX_PARTS:
        raise ModelError(f"{label} is not the first part of its model")
    for number in range(2, int(part[3]) + 1):
        sibling = path.with_name(f"{part[1]}-{number:05}-of-{part[3]}.gguf")
        if not sibling.is_file():
            raise ModelError(f"{sibling.name} is missing")
        _, more = _read_part(sibling, sibling.name)
        if tensors.keys() & more.keys():
            raise ModelError(f"{sibling.name} repeats tensors of another part")
        tensors |= more
    return GGUFFile(label, metadata, tensors)


def _map(path: Path) -> Tensor:
    """A file's bytes, uint8 [size], read as they are used; the file is not changed."""
    try:
        return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    except (OSError, RuntimeError):
        raise ModelError(f"{path.name} cannot be read") from None


def gguf_config(file: GGUFFile) -> dict[str, Any]:
    """The configuration under the keys of the transformers library, model_type included. Raises ModelError."""
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    factors = file.load(configs.ROPE_FACTORS) if configs.ROPE_FACTORS in shapes else None
    return configs.config(configs.Metadata(file.label, file.metadata), shapes, factors)


def gguf_weights(file: GGUFFile, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Streams (name, tensor) under the names of a hub checkpoint, made one at a time.

    Tensors are float32, or in the stored type where that is F16 or BF16; some are views of the mapped file.
    Raises ModelError for a tensor that the architecture does not have, before the first one is read.
    """
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    mapped: dict[Path, Tensor] = {}
    for target in gguf_names.plan(file.label, shapes, config):
        sources = []
        for name in target.sources:
            path = file.tensors[name].path
            if path not in mapped:
                mapped[path] = _map(path)
            sources.append(file.load(name, target.index, mapped[path]))
        yield target.name, target.transform(*sources) if target.transform else sources[0]


def open_gguf(path: Path) -> tuple[dict[str, Any], Iterator[tuple[str, Tensor]]]:
    """Configuration and weights of a GGUF file or the directory of one. Raises ModelError."""
    file = read_gguf(path)
    config = gguf_config(file)
    return config, gguf_weights(file, config)
