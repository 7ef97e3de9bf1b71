"""GGUF files: the real packs against the `gguf` package and transformers, small made ones, and forged ones."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sensorium.models import store
from sensorium.models.base import ModelError
from sensorium.models.gguf import gguf_config, gguf_path, gguf_weights, open_gguf, read_gguf
from sensorium.models.gguf_tokenizer import gguf_tokenizer

from .gguf_maker import LLAMA, add, dense_tensors, header, string, tensor, write

PACKS = ("smollm2-135m-instruct", "gemma-3-270m")


@pytest.fixture
def pack(request: pytest.FixtureRequest) -> Path:
    return gguf_path(store.resolve(request.param))


# The library takes half a minute to read the larger vocabulary.
LARGE_IS_SLOW = (PACKS[0], pytest.param(PACKS[1], marks=pytest.mark.slow))


@pytest.mark.parametrize("pack", LARGE_IS_SLOW, indirect=True)
def test_metadata_and_table_of_a_real_file_are_the_library_s(pack: Path) -> None:
    file = read_gguf(pack)
    reader = gguf.GGUFReader(pack)
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert file.metadata.keys() == fields.keys()
    for name, field in fields.items():
        value = file.metadata[name]
        if field.types[0] == gguf.GGUFValueType.ARRAY:
            few = slice(0, 500)
            assert list(value[few]) == field.contents(few)
            assert len(value) == len(field.data)
        else:
            assert value == field.contents()
    assert {t.name: (t.shape, t.offset, t.num_bytes) for t in file.tensors.values()} == {
        t.name: (tuple(reversed(t.shape.tolist())), t.data_offset, t.n_bytes) for t in reader.tensors
    }


@pytest.mark.parametrize("every", [12, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("pack", PACKS, indirect=True)
def test_weights_of_a_real_file_are_the_library_s(pack: Path, every: int) -> None:
    """Bit for bit; the twelfth of them in the fast run."""
    file = read_gguf(pack)
    content = np.memmap(pack, np.uint8, "r")
    for stored in list(file.tensors.values())[1::every]:
        data = content[stored.offset : stored.offset + stored.num_bytes]
        kind = gguf.GGMLQuantizationType[stored.format.name]
        expected = gguf.dequantize(data.reshape(-1, stored.row_bytes), kind).reshape(stored.shape)
        assert torch.equal(file.load(stored.name), torch.from_numpy(expected.copy())), stored.name


def test_configuration_of_smollm2() -> None:
    config, weights = open_gguf(store.resolve("smollm2-135m-instruct"))
    sizes = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "rope_theta": 100_000.0}
    rest = {"model_type": "llama", "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2}
    assert config | sizes | heads | rest == config
    assert config["rms_norm_eps"] == pytest.approx(1e-5)
    name, embeddings = next(weights)
    assert (name, embeddings.shape) == ("model.embed_tokens.weight", (49152, 576))


def test_configuration_of_gemma() -> None:
    config = gguf_config(read_gguf(store.resolve("gemma-3-270m")))
    expected = {"model_type": "gemma3_text", "head_dim": 256, "sliding_window": 512, "rope_scaling": None}
    rope = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "query_pre_attn_scalar": 256}
    assert config | expected | rope == config
    assert config["layer_types"] == (["sliding_attention"] * 5 + ["full_attention"]) * 3


@pytest.mark.slow
@pytest.mark.parametrize("pack", PACKS, indirect=True)
def test_weights_are_those_that_transformers_reads(pack: Path) -> None:
    """Names, permuted queries and keys, Gemma's norms."""
    # Imports that take seconds, for this test alone.
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(pack.parent, gguf_file=pack.name))
    expected = load_gguf_checkpoint(str(pack), return_tensors=True, model_to_load=model)["tensors"]
    _, weights = open_gguf(pack)
    seen = set()
    for name, weight in weights:
        assert torch.equal(weight.float(), expected[name]), name
        seen.add(name)
    assert expected.keys() == seen
    assert model.state_dict().keys() - seen == {"lm_head.weight"}  # tied


def test_split_files_are_one_model(tmp_path: Path) -> None:
    tensors = dense_tensors()
    names = sorted(tensors)
    write(tmp_path / "m-00001-of-00002.gguf", "llama", LLAMA, {name: tensors[name] for name in names[:9]})
    second = write(
        tmp_path / "m-00002-of-00002.gguf", "llama", {}, {name: tensors[name] for name in names[9:]}
    )
    found = dict(open_gguf(tmp_path)[1])
    expected = torch.from_numpy(tensors["token_embd.weight"])
    assert torch.equal(found["model.embed_tokens.weight"], expected)
    assert len(found) == len(tensors)
    with pytest.raises(ModelError, match="first part"):
        read_gguf(second)
    second.unlink()
    with pytest.raises(ModelError, match=r"m-00002-of-00002\.gguf is missing"):
        open_gguf(tmp_path)


def test_the_file_of_a_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no GGUF file"):
        gguf_path(tmp_path)
    (tmp_path / "a.gguf").touch()
    (tmp_path / "mmproj-a.gguf").touch()
    assert gguf_path(tmp_path).name == "a.gguf"
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ModelError, match="several"):
        gguf_path(tmp_path)


def pair(key: str, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, data: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + data


HUGE = 1 << 63
FORGED = {
    "empty": b"",
    "magic only": b"GGUF",
    "another magic": b"GGML" + bytes(40),
    "version": header(version=1),
    "big-endian": header(version=3 << 24),
    "tensors": header(num_tensors=HUGE),
    "many tensors": header(num_tensors=1 << 17),
    "pairs": header(num_pairs=HUGE),
    "string": header([string("a") + struct.pack("<IQ", 8, HUGE)]),
    "not UTF-8": header([pair("a", 8, string(b"\xff"))]),
    "value type": header([pair("a", 99, b"")]),
    "numbers": header([pair("a", 9, array(12, HUGE))]),
    "strings": header([pair("a", 9, array(8, HUGE))]),
    "many strings": header([pair("a", 9, array(8, 1 << 21))]),
    "nested": header([pair("a", 9, array(9, 1, array(9, 1, array(4, 1))))]),
    "twice": header([pair("a", 4, bytes(4)), pair("a", 4, bytes(4))]),
    "alignment": header([pair("general.alignment", 4, struct.pack("<I", 24))]),
    "alignment of nothing": header([pair("general.alignment", 4, bytes(4))]),
    "alignment text": header([pair("general.alignment", 8, string("32"))]),
    "rank": header(tensors=[tensor("t", [1], rank=1 << 31)]),
    "no rank": header(tensors=[tensor("t", [])]),
    "dimensions": header(tensors=[tensor("t", [HUGE, HUGE, HUGE, HUGE])]),
    "no elements": header(tensors=[tensor("t", [0])]),
    "half a block": header(tensors=[tensor("t", [33], kind=8)], data=bytes(99)),
    "offset": header(tensors=[tensor("t", [1], offset=HUGE)], data=bytes(64)),
    "wrapping offset": header(tensors=[tensor("t", [1], offset=(1 << 64) - 32)], data=bytes(64)),
    "unaligned": header(tensors=[tensor("t", [1], offset=4)], data=bytes(64)),
    "data": header(tensors=[tensor("t", [64])], data=bytes(255)),
    "tensor twice": header(tensors=[tensor("t", [1]), tensor("t", [1])], data=bytes(64)),
    "no architecture": b"GGUF" + struct.pack("<IQQ", 3, 0, 0),
}


@pytest.mark.parametrize("data", FORGED.values(), ids=FORGED.keys())
def test_forged_headers_are_refused_without_memory(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "forged.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    with pytest.raises(ModelError, match=r"^forged\.gguf[^\n]+$"):
        open_gguf(path)
    assert tracemalloc.get_traced_memory()[1] < 2 << 20
    tracemalloc.stop()


def test_other_types_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(header(tensors=[tensor("blk.0.ffn_up.weight", [256], kind=20)], data=bytes(999)))
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_up\.weight is of type IQ4_NL; supported: F32, F16"):
        open_gguf(path)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, int]:
    """A valid small file, its bytes, and where its data begin."""
    path = tmp_path_factory.mktemp("gguf") / "fuzzed.gguf"
    tokenizer = {"ggml.model": "gpt2", "ggml.tokens": ["a", "b", "ab"], "ggml.token_type": [1, 1, 3]}
    tokenizer |= {"ggml.merges": ["a b"], "ggml.add_bos_token": True, "ggml.bos_token_id": 1}
    write(path, "llama", LLAMA, dense_tensors(vocab=3), tokenizer=tokenizer)
    assert gguf_tokenizer(read_gguf(path)).prefix_ids == (1,)
    return path, path.read_bytes(), min(t.offset for t in read_gguf(path).tensors.values())


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_damaged_files_are_read_or_refused(small: tuple[Path, bytes, int], data: st.DataObject) -> None:
    path, content, data_start = small
    damaged = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(4, data_start - 1))
        junk = data.draw(st.binary(min_size=1, max_size=8) | st.sampled_from([b"\xff" * 8, bytes(8)]))
        damaged[place : place + len(junk)] = junk
    cut = data.draw(st.none() | st.integers(0, len(content)))
    path.write_bytes(bytes(damaged[:cut]))
    try:
        file = read_gguf(path)
        assert gguf_tokenizer(file).vocab_size
        weights = gguf_weights(file, gguf_config(file))
        assert all(weight.isfinite().any() for _, weight in weights)
    except ModelError as error:
        message = str(error)
    else:
        return
    assert message.startswith("fuzzed.gguf")
    assert "\n" not in message


def test_writing_helpers_are_not_read_back_blindly(tmp_path: Path) -> None:
    """Every kind of value, as the library writes it."""
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    values = {"a": True, "b": 7, "c": 0.5, "d": "é", "e": ["x", "yz"], "f": [1, -2, 3], "g": [0.5, 1.5]}
    for key, value in values.items():
        add(writer, key, value)
    writer.add_int64("h", -(1 << 40))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_gguf(path).metadata
    plain = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in found.items()}
    assert plain == values | {"h": -(1 << 40), "general.architecture": "llama"}
