"""Checkpoint readers: formats, safetensors in one file and in shards, strict loading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from sensorium.models import weights
from sensorium.models.base import ModelError
from sensorium.models.weights import (
    ALIGNMENT_HEADS,
    detect_format,
    load_strict,
    open_whisper,
    read_config,
    safetensors_weights,
    tokenizer_file,
)
from transformers import WhisperConfig, WhisperForConditionalGeneration

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.ones(2)}


def sharded(folder: Path, shards: dict[str, list[str]], weight_map: dict[str, str] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    for shard, names in shards.items():
        save_file({name: TENSORS[name] for name in names}, folder / shard)
    if weight_map is None:
        weight_map = {name: shard for shard, names in shards.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def whisper_sizes(**changes: int) -> dict[str, int]:
    return {
        **{"vocab_size": 60, "num_mel_bins": 4, "d_model": 16, "max_source_positions": 6},
        **{"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 8, "decoder_layers": 2},
        **{"decoder_attention_heads": 2, "decoder_ffn_dim": 8, "max_target_positions": 5},
        **changes,
    }


def save_whisper(
    folder: Path, generation: dict[str, Any] | None = None, **save: Any
) -> dict[str, torch.Tensor]:
    """A tiny random Whisper in the hub's layout; returns the tensors that a reader must yield."""
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0)
    model = WhisperForConditionalGeneration(
        WhisperConfig(**whisper_sizes(), **special, begin_suppress_tokens=[1])
    )
    model.save_pretrained(folder, **save)
    (folder / "generation_config.json").write_text(json.dumps(generation or {}))
    return {name: tensor for name, tensor in model.state_dict().items() if name != "proj_out.weight"}


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_single_file(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    assert detect_format(tmp_path) == "safetensors"
    assert same(dict(safetensors_weights(tmp_path)), TENSORS)


def test_shards(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m", {"x.safetensors": ["a"], "y.safetensors": ["c", "b"]})
    assert detect_format(folder) == "safetensors"
    assert same(dict(safetensors_weights(folder)), TENSORS)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "x.safetensors"}, r"x\.safetensors disagrees with the index on b"),
        ({"a": "x.safetensors", "b": "x.safetensors", "c": "x.safetensors"}, "on c"),
        ({"a": "x.safetensors", "b": "x.safetensors", "c": "z.safetensors"}, r"m/z\.safetensors is missing"),
        ({"a": "../x.safetensors"}, "outside"),
        ({"a": "/etc/x.safetensors"}, "outside"),
        ({"a": "pytorch_model.bin"}, "outside"),
        ({"a": 3}, "outside"),
        ({}, "no weight_map"),
    ],
)
def test_wrong_index(tmp_path: Path, weight_map: dict[str, Any], message: str) -> None:
    save_file(TENSORS, tmp_path / "x.safetensors")
    folder = sharded(tmp_path / "m", {"x.safetensors": ["a", "b"]}, weight_map)
    with pytest.raises(ModelError, match=message):
        list(safetensors_weights(folder))


@pytest.mark.parametrize("content", [b"", b"garbage", b"\xff" * 100, None])
def test_damaged_safetensors(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "model.safetensors"
    save_file(TENSORS, file)
    file.write_bytes(file.read_bytes()[:-1] if content is None else content)
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged") as caught:
        list(safetensors_weights(tmp_path))
    assert str(tmp_path) not in str(caught.value)


def test_formats_that_are_not_read(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no model at nothing"):
        detect_format(tmp_path / "nothing")
    with pytest.raises(ModelError, match="no model weights"):
        detect_format(tmp_path)
    for name in ("pytorch_model.bin", "base.pt"):
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(ModelError, match="never opened"):
            detect_format(tmp_path)
        (tmp_path / name).unlink()
    torch.save(TENSORS, tmp_path / "model.bin")
    with pytest.raises(ModelError, match="not a CTranslate2 model"):
        detect_format(tmp_path)
    with pytest.raises(ModelError, match="expected a directory or a GGUF file"):
        detect_format(tmp_path / "model.bin")


def test_gguf(tmp_path: Path, whisper_base_dir: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF\x03\0\0\0")
    assert detect_format(file) == detect_format(tmp_path) == "gguf"
    with pytest.raises(ModelError, match="not a Whisper model"):
        open_whisper(file)
    file.write_bytes(b"no")
    with pytest.raises(ModelError, match="not a model"):
        detect_format(file)
    assert detect_format(whisper_base_dir) == "ctranslate2"


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe", b"[" * 100_000])
def test_bad_json(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json is not"):
        read_config(tmp_path)


def test_absent_and_huge_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"config\.json cannot be read: No such file"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert read_config(tmp_path) == {}
    monkeypatch.setattr(weights, "MAX_JSON_BYTES", 1)
    with pytest.raises(ModelError, match="larger than"):
        read_config(tmp_path)


def parameters() -> dict[str, torch.Tensor]:
    return {"a": torch.zeros(2, 3, requires_grad=True), "b": torch.zeros(4), "c": torch.zeros(2)}


def test_strict_loading_converts() -> None:
    loaded = parameters()
    load_strict(loaded, TENSORS.items())
    assert same({k: v.detach() for k, v in loaded.items()}, {k: v.float() for k, v in TENSORS.items()})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a": None}, "lacks the tensors a$"),
        ({"a": None, "b": None, "c": None}, "lacks the tensors a, b, c$"),
        ({"x": torch.ones(1)}, "unknown tensors x$"),
        ({f"x{i}": torch.ones(1) for i in range(6)}, "unknown tensors x0, x1, x2, x3 and 2 more$"),
        ({"a": torch.ones(3, 2)}, r"a has shape \[3, 2\], expected \[2, 3\]"),
        ({"c": torch.ones(1)}, r"c has shape \[1\], expected \[2\]"),
        ({"c": torch.ones(2, dtype=torch.int8)}, "c has type int8, expected float32"),
    ],
)
def test_strict_loading_names_what_is_wrong(changes: dict[str, torch.Tensor | None], message: str) -> None:
    stream = {name: tensor for name, tensor in (TENSORS | changes).items() if tensor is not None}
    with pytest.raises(ModelError, match=message):
        load_strict(parameters(), stream.items())


def test_strict_loading_refuses_doubles() -> None:
    with pytest.raises(ModelError, match="the tensor a twice"):
        load_strict(parameters(), [*TENSORS.items(), ("a", TENSORS["a"])])


@pytest.mark.parametrize("save", [{}, {"max_shard_size": "4KB"}])
def test_whisper_from_the_hub(tmp_path: Path, save: dict[str, str]) -> None:
    generation = {
        **{"alignment_heads": [[1, 0], [0, 1]], "suppress_tokens": [3, 4], "begin_suppress_tokens": [5]},
        "lang_to_id": {"<|de|>": 8, "<|en|>": 7},
    }
    expected = save_whisper(tmp_path, generation, **save)
    assert (tmp_path / "model.safetensors").exists() != bool(save)
    config, stream = open_whisper(tmp_path)
    assert {key: config[key] for key in whisper_sizes()} == whisper_sizes()
    assert config["alignment_heads"] == [(1, 0), (0, 1)]
    assert (config["suppress_ids"], config["suppress_ids_begin"]) == ([3, 4], [5])
    assert config["lang_ids"] == [7, 8]
    assert same(dict(stream), expected)


def test_without_generation_config(tmp_path: Path) -> None:
    save_whisper(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    config, _ = open_whisper(tmp_path)
    assert config["alignment_heads"] == [(1, 0), (1, 1)]
    assert config["suppress_ids_begin"] == [1]
    assert "lang_ids" not in config


def test_output_projection(tmp_path: Path) -> None:
    expected = save_whisper(tmp_path)
    projection = expected["model.decoder.embed_tokens.weight"].clone()
    save_file(expected | {"proj_out.weight": projection}, tmp_path / "model.safetensors")
    assert same(dict(open_whisper(tmp_path)[1]), expected)
    save_file(expected | {"proj_out.weight": projection + 1}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="differs from its token embeddings"):
        list(open_whisper(tmp_path)[1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "bert"}, "type 'bert', not Whisper"),
        ({"activation_function": "relu"}, "activation"),
        ({"scale_embedding": True}, "embedding scale"),
        ({"d_model": "16"}, "no usable d_model"),
        ({"encoder_layers": True}, "no usable encoder_layers"),
        ({"decoder_ffn_dim": 0}, "no usable decoder_ffn_dim"),
        ({"decoder_attention_heads": 3}, "do not divide"),
        ({"suppress_tokens": [60]}, "wrong suppress_ids"),
        ({"begin_suppress_tokens": "1"}, "wrong suppress_ids_begin"),
    ],
)
def test_wrong_whisper_config(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    save_whisper(tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(ModelError, match=message):
        open_whisper(tmp_path)


@pytest.mark.parametrize("heads", [[[2, 0]], [[0, 2]], [[0]], [3], "no", [[0, "1"]], [[-1, 0]], {"a": 1}])
def test_wrong_alignment_heads(tmp_path: Path, heads: object) -> None:
    save_whisper(tmp_path, {"alignment_heads": heads})
    with pytest.raises(ModelError, match="wrong alignment_heads"):
        open_whisper(tmp_path)


@pytest.mark.parametrize("size", ALIGNMENT_HEADS)
def test_known_alignment_heads(tmp_path: Path, size: tuple[int, int, int]) -> None:
    save_whisper(tmp_path)
    layers, width, vocabulary = size
    heads = width // 64
    change_config(
        tmp_path, decoder_layers=layers, d_model=width, vocab_size=vocabulary, decoder_attention_heads=heads
    )
    assert open_whisper(tmp_path)[0]["alignment_heads"] == list(ALIGNMENT_HEADS[size])


def test_tokenizer_file(tmp_path: Path, whisper_tiny_en_dir: Path) -> None:
    assert tokenizer_file(whisper_tiny_en_dir) == whisper_tiny_en_dir / "tokenizer.json"
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        tokenizer_file(tmp_path)
