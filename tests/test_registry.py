"""Every format of a text model, and Whisper, through the one table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from sensorium.models import registry
from sensorium.models.base import ModelError
from sensorium.models.decoder import DecoderModel
from sensorium.models.text import TextProcessor
from sensorium.models.whisper import WhisperModel
from sensorium.processors.text import byte_of_character

from .paged_harness import PagedHarness
from .tiny_text import LLAMA, SPECIAL, TEMPLATE, random_weights, write_tiny_text


def write_gguf(path: Path) -> Path:
    """The same model as that of a directory, as the converter of llama.cpp would write it."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(8)
    writer.add_value_length(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    tokens = [text for text, _ in sorted(byte_of_character().items(), key=lambda item: item[1])]
    writer.add_token_list([*tokens, *SPECIAL, "xy"])
    normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_token_types([*[normal] * len(tokens), *[control] * 3, normal])
    writer.add_token_merges(["x y"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(258)
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, tensor in random_weights(LLAMA).items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = len(tensor) // 8
            tensor = tensor.view(heads, 2, 4, -1).transpose(1, 2).reshape(tensor.shape)
        base, _, suffix = name.rpartition(".")
        writer.add_tensor(f"{names.get_name(base)}.{suffix}", tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def check(path: Path) -> torch.Tensor:
    model, processor = registry.load(path, "tiny", torch.float32)
    assert isinstance(model, DecoderModel)
    assert isinstance(processor, TextProcessor)
    prompt = processor.chat([{"role": "user", "content": "hé"}])
    assert prompt.text == "<|im_start|>hé"
    assert processor.tokenizer.decode(prompt.token_ids, skip_special_tokens=False) == prompt.text
    assert prompt.token_ids[0] == 257
    assert 258 in processor.stop_ids
    assert {"chat", "completion"} <= processor.info.capabilities
    return PagedHarness(model).run([("a", prompt.token_ids)])[0]


def test_a_directory_and_a_gguf_file_of_one_model_are_alike(tmp_path: Path) -> None:
    directory = check(write_tiny_text(tmp_path / "tiny", random_weights(LLAMA)))
    file = check(write_gguf(tmp_path / "tiny.gguf"))
    torch.testing.assert_close(file, directory, atol=1e-5, rtol=1e-5)


def test_whisper_is_still_there(whisper_tiny_en_dir: Path) -> None:
    model, _ = registry.load(whisper_tiny_en_dir, "whisper", torch.float32)
    assert isinstance(model, WhisperModel)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "bert"}, "tiny is of architecture 'bert'; supported: .*llama.*whisper"),
        ({"vocab_size": 200}, "more tokens than the model has embeddings"),
        ({"hidden_size": 16}, "has shape"),
        ({"num_hidden_layers": 3}, r"lacks the tensors model\.layers\.2"),
        ({"num_hidden_layers": 1}, r"unknown tensors model\.layers\.1"),
    ],
)
def test_models_that_cannot_be_served_say_why(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_tiny_text(tmp_path / "tiny", random_weights(LLAMA), LLAMA | config)
    with pytest.raises(ModelError, match=message):
        registry.load(path, "tiny", torch.float32)


def test_a_damaged_tokenizer_is_a_model_error(tmp_path: Path) -> None:
    path = write_tiny_text(tmp_path / "tiny", random_weights(LLAMA))
    (path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="not a tokenizer"):
        registry.load(path, "tiny", torch.float32)
