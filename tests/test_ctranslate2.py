"""CTranslate2 files: the real one against CTranslate2 itself, converted ones, and damaged ones."""

from __future__ import annotations

import json
import struct
import tracemalloc
import wave
from collections.abc import Sequence
from pathlib import Path

import ctranslate2
import numpy as np
import pytest
import torch
import whisper
from ctranslate2.converters.transformers import WhisperLoader
from hypothesis import given
from hypothesis import strategies as st
from sensorium.models.base import ModelError
from sensorium.models.ctranslate2 import DTYPES, is_header, read_index, read_whisper_config, whisper_weights
from sensorium.models.weights import WHISPER_SIZES, load_strict, open_whisper
from transformers import WhisperConfig, WhisperForConditionalGeneration

Variables = dict[str, torch.Tensor]


def string(text: str) -> bytes:
    return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"


def encode(
    variables: Variables,
    aliases: Sequence[tuple[str, str]] = (),
    spec: str = "WhisperSpec",
    revision: int = 3,
    version: int = 6,
) -> bytes:
    """A `model.bin` of these variables."""
    parts = [struct.pack("<I", version), string(spec), struct.pack("<II", revision, len(variables))]
    for name, tensor in variables.items():
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        head = struct.pack("<B", tensor.ndim) + struct.pack(f"<{tensor.ndim}I", *tensor.shape)
        parts += [string(name), head, struct.pack("<BI", DTYPES.index(tensor.dtype), len(data)), data]
    parts.append(struct.pack("<I", len(aliases)))
    parts += [string(name) for pair in aliases for name in pair]
    return b"".join(parts)


def write(folder: Path, data: bytes, config: object = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "model.bin").write_bytes(data)
    (folder / "config.json").write_text(json.dumps({} if config is None else config))
    return folder


def tiny_model(seed: int = 0) -> WhisperForConditionalGeneration:
    torch.manual_seed(seed)
    config = WhisperConfig(
        **{"vocab_size": 61, "num_mel_bins": 5, "d_model": 128, "max_source_positions": 6, "pad_token_id": 0},
        **{"encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 24, "bos_token_id": 0},
        **{"decoder_layers": 3, "decoder_attention_heads": 2, "decoder_ffn_dim": 20, "eos_token_id": 0},
        **{"max_target_positions": 7, "decoder_start_token_id": 0, "begin_suppress_tokens": [1]},
    )
    model = WhisperForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Layer 1 keeps its zeros and ones: the converter stores equal tensors once, under aliases.
            if ".layers.1." not in name:
                parameter.uniform_(-1, 1)
    return model


def expected_weights(model: WhisperForConditionalGeneration) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "proj_out.weight"}


def convert(model: WhisperForConditionalGeneration, folder: Path, quantization: str | None) -> Path:
    """Saves a model as CTranslate2's own converter does."""
    spec = WhisperLoader().get_model_spec(model)
    spec.register_vocabulary([f"token {i}" for i in range(model.config.vocab_size)])
    spec.validate()
    spec.optimize(quantization)
    folder.mkdir()
    spec.save(str(folder))
    return folder


@pytest.fixture
def variables(tmp_path: Path) -> Variables:
    """Every variable of a converted tiny model, by name; aliases written out."""
    index = read_index(convert(tiny_model(), tmp_path / "source", None) / "model.bin")
    data = index.path.read_bytes()
    return {
        name: torch.frombuffer(
            bytearray(data), dtype=v.dtype, count=v.num_bytes // v.dtype.itemsize, offset=v.offset
        )
        .reshape(v.shape)
        .clone()
        for name, v in index.variables.items()
    }


def test_real_model_equals_ctranslate2(whisper_base_dir: Path, media: Path) -> None:
    """The weights, in another implementation, give CTranslate2's encoder output and greedy text."""
    config, weights = open_whisper(whisper_base_dir)
    model = WhisperForConditionalGeneration(
        WhisperConfig(**{key: config[key] for key in WHISPER_SIZES}, pad_token_id=50257)
    ).eval()
    load_strict({k: v for k, v in model.state_dict().items() if k != "proj_out.weight"}, weights)
    with wave.open(str(media / "audio" / "jfk_16k_mono.wav")) as file:
        pcm = np.frombuffer(file.readframes(file.getnframes()), np.int16)
    audio = whisper.pad_or_trim(pcm.astype(np.float32) / 32768)
    mel = whisper.log_mel_spectrogram(audio)[None]
    reference = ctranslate2.models.Whisper(str(whisper_base_dir), compute_type="float32", inter_threads=1)
    features = ctranslate2.StorageView.from_array(mel.numpy())
    encoded = np.array(reference.encode(features))
    prompt, length = [50258, 50259, 50359, 50363], 12
    options = {
        "beam_size": 1,
        "suppress_blank": False,
        "suppress_tokens": [],
        "max_length": len(prompt) + length,
    }
    expected = reference.generate(features, [prompt], **options)[0].sequences_ids[0][:length]
    with torch.inference_mode():
        hidden = model.model.encoder(mel).last_hidden_state
        # Values reach 30; CTranslate2 approximates the exponential.
        assert (hidden.numpy() - encoded).__abs__().max() < 5e-3
        ids = list(prompt)
        for _ in expected:
            logits = model(encoder_outputs=(hidden,), decoder_input_ids=torch.tensor([ids])).logits
            ids.append(int(logits[0, -1].argmax()))
    assert ids[len(prompt) :] == expected


def test_real_configs(whisper_base_dir: Path, whisper_tiny_en_dir: Path) -> None:
    base, _ = open_whisper(whisper_base_dir)
    assert [base[key] for key in WHISPER_SIZES] == [80, 512, 51865, 1500, 448, 6, 8, 2048, 6, 8, 2048]
    assert base["alignment_heads"] == [(3, 1), (4, 2), (4, 3), (4, 7), (5, 1), (5, 2), (5, 4), (5, 6)]
    assert base["suppress_ids_begin"] == [220, 50257]
    assert len(base["lang_ids"]) == 99
    tiny, weights = open_whisper(whisper_tiny_en_dir)
    assert [tiny[key] for key in WHISPER_SIZES] == [80, 384, 51864, 1500, 448, 4, 6, 1536, 4, 6, 1536]
    tensors = dict(weights)
    assert len(tensors) == 167
    assert tensors["model.decoder.embed_positions.weight"].dtype == torch.float16


@pytest.mark.parametrize(
    ("quantization", "relative"),
    # Rounding relative to a row's (int16: a tensor's) largest value; the reader itself adds nothing.
    [(None, 0.0), ("float32", 0.0), ("float16", 2**-10), ("bfloat16", 2**-7), ("int16", 0.75 / 1024)]
    + [(kind, 0.51 / 127) for kind in ("int8", "int8_float32")]
    + [("int8_float16", 0.51 / 127), ("int8_bfloat16", 2**-7)],
)
def test_every_stored_type(tmp_path: Path, quantization: str | None, relative: float) -> None:
    model = tiny_model()
    expected = expected_weights(model)  # copies: the converter quantises in place
    config, weights = open_whisper(convert(model, tmp_path / "m", quantization))
    loaded = dict(weights)
    assert {key: config[key] for key in WHISPER_SIZES} == {k: getattr(model.config, k) for k in WHISPER_SIZES}
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert loaded[name].shape == tensor.shape
        assert (loaded[name].float() - tensor).abs().max() <= relative * tensor.abs().max() + 1e-8, name


def test_both_formats_give_the_same_checkpoint(tmp_path: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path / "hub")
    (hub_config, hub_weights), (config, weights) = (
        open_whisper(folder) for folder in (tmp_path / "hub", convert(model, tmp_path / "m", None))
    )
    keys = (*WHISPER_SIZES, "alignment_heads")
    assert [hub_config[key] for key in keys] == [config[key] for key in keys]
    expected, loaded = dict(hub_weights), dict(weights)
    assert expected.keys() == loaded.keys()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in expected.items())


def test_int8_divides_by_the_scale(tmp_path: Path, variables: Variables) -> None:
    name = "encoder/layer_0/ffn/linear_1/weight"
    rows, columns = variables[name].shape
    variables[name] = torch.full((rows, columns), 127, dtype=torch.int8)
    variables[name + "_scale"] = torch.arange(1, rows + 1, dtype=torch.float32)
    loaded = dict(whisper_weights(write(tmp_path / "m", encode(variables))))
    expected = torch.full((rows, columns), 127.0) / torch.arange(1.0, rows + 1)[:, None]
    assert torch.equal(loaded["model.encoder.layers.0.fc2.weight"], expected)


def test_missing_variables_are_named_by_the_loader(tmp_path: Path, variables: Variables) -> None:
    del variables["decoder/layer_1/attention/linear_2/bias"]
    _, weights = open_whisper(write(tmp_path / "m", encode(variables)))
    with pytest.raises(ModelError, match=r"lacks .*model\.decoder\.layers\.1\.encoder_attn\.out_proj\.bias"):
        load_strict(expected_weights(tiny_model()), weights)


def test_position_tables_are_loaded(tmp_path: Path, variables: Variables) -> None:
    name = "encoder/position_encodings/encodings"
    variables[name] = torch.randn_like(variables[name])
    loaded = dict(whisper_weights(write(tmp_path / "m", encode(variables))))
    assert torch.equal(loaded["model.encoder.embed_positions.weight"], variables[name])


def changed(variables: Variables, change: str) -> bytes:
    bias, weight = "decoder/layer_0/self_attention/linear_0/bias", "encoder/layer_0/ffn/linear_0/weight"
    if change == "key bias":
        variables[bias][128 + 5] = 1e-6
    elif change == "activation":
        variables["decoder/activation"] = torch.tensor(0, dtype=torch.int8)
    elif change == "projection":
        variables["decoder/projection/weight"] = variables["decoder/embeddings/weight"] + 1
    elif change == "stranger":
        variables["decoder/layer_0/ffn/linear_2/weight"] = torch.zeros(2, 2)
    elif change == "stray scale":
        variables["decoder/layer_0/ffn/linear_2/weight_scale"] = torch.ones(2)
    elif change == "no scale":
        variables[weight] = variables[weight].to(torch.int8)
    elif change == "zero scale":
        variables[weight] = variables[weight].to(torch.int8)
        variables[weight + "_scale"] = torch.zeros(24)
    elif change == "scale shape":
        variables[weight] = variables[weight].to(torch.int8)
        variables[weight + "_scale"] = torch.ones(23)
    elif change == "odd fusion":
        variables[bias] = variables[bias][:-1]
    elif change == "heads":
        variables["decoder/num_heads"] = torch.tensor(3, dtype=torch.int16)
    elif change == "conv":
        variables["encoder/conv1/weight"] = torch.zeros(128, 5)
    elif change == "no embeddings":
        del variables["decoder/embeddings/weight"]
    else:
        kinds = {"revision": {"revision": 2}, "version": {"version": 5}, "spec": {"spec": "TransformerSpec"}}
        return encode(variables, **kinds[change])
    return encode(variables)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("key bias", "bias for the keys"),
        ("activation", "decoder/activation"),
        ("projection", "projection differs"),
        ("stranger", "linear_2/weight is no part"),
        ("stray scale", "linear_2/weight_scale is no part"),
        ("no scale", "lacks the variable .*weight_scale"),
        ("zero scale", "scale of variable"),
        ("scale shape", "scale of variable"),
        ("odd fusion", "does not split in 3"),
        ("heads", "decoder/num_heads does not divide"),
        ("conv", "encoder/conv1/weight has shape"),
        ("no embeddings", "lacks the variable decoder/embeddings/weight"),
        ("revision", "revision 2"),
        ("version", "version 6"),
        ("spec", "TransformerSpec, not Whisper"),
    ],
)
def test_what_is_not_whisper(tmp_path: Path, variables: Variables, change: str, message: str) -> None:
    folder = write(tmp_path / "m", changed(variables, change))
    with pytest.raises(ModelError, match=message) as caught:
        list(open_whisper(folder)[1])
    assert "\n" not in str(caught.value)
    assert str(tmp_path) not in str(caught.value)


@pytest.mark.parametrize(
    "config", [b"", b"[]", b"{", b'{"alignment_heads": [[9, 0]]}', b'{"suppress_ids": [-1]}']
)
def test_bad_config(tmp_path: Path, variables: Variables, config: bytes) -> None:
    folder = write(tmp_path / "m", encode(variables))
    (folder / "config.json").write_bytes(config)
    with pytest.raises(ModelError):
        open_whisper(folder)


def test_absent_config(tmp_path: Path, variables: Variables) -> None:
    folder = write(tmp_path / "m", encode(variables))
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"m/config\.json"):
        read_whisper_config(folder)


SMALL = {"a": torch.ones(2, 3), "b": torch.zeros((), dtype=torch.int8), "c": torch.ones(0, dtype=torch.int16)}


def read_all(folder: Path, data: bytes) -> None:
    (folder / "model.bin").write_bytes(data)
    list(whisper_weights(folder))


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    whole = encode(SMALL, [("d", "a")])
    (tmp_path / "model.bin").write_bytes(whole)
    assert read_index(tmp_path / "model.bin").variables["d"].shape == (2, 3)
    for damaged in (*(whole[:size] for size in range(len(whole))), whole + b"\0"):
        (tmp_path / "model.bin").write_bytes(damaged)
        with pytest.raises(ModelError):
            read_index(tmp_path / "model.bin")


@given(data=st.data())
def test_changed_bytes(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp()
    whole = bytearray(encode(SMALL, [("d", "a")]))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with pytest.raises(ModelError):  # none of the names is Whisper's, so even an intact file is refused
        read_all(folder, bytes(whole))


@given(tail=st.binary(max_size=200))
def test_garbage_after_a_header(tail: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp()
    for head in (b"", struct.pack("<I", 6) + string("WhisperSpec") + struct.pack("<I", 3)):
        with pytest.raises(ModelError):
            read_all(folder, head + tail)


@given(
    shapes=st.dictionaries(
        st.text("abc/_0", min_size=1, max_size=12), st.lists(st.integers(0, 4), max_size=4), max_size=6
    ),
    dtype=st.sampled_from(DTYPES),
)
def test_index_of_any_shapes(
    shapes: dict[str, list[int]], dtype: torch.dtype, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "model.bin"
    path.write_bytes(encode({name: torch.ones(shape, dtype=dtype) for name, shape in shapes.items()}))
    found = read_index(path).variables
    assert {name: list(v.shape) for name, v in found.items()} == shapes
    assert all(v.dtype == dtype for v in found.values())


HEAD = struct.pack("<I", 6) + string("WhisperSpec") + struct.pack("<I", 3)


@pytest.mark.parametrize(
    "tail",
    [
        struct.pack("<I", 2**32 - 1),
        struct.pack("<I", 65_000) + b"\0" * 5000,
        struct.pack("<I", 1)
        + string("x")
        + struct.pack("<B4I", 4, *[2**32 - 1] * 4)
        + struct.pack("<BI", 0, 2**32 - 1),
        struct.pack("<I", 1) + string("x") + struct.pack("<BI", 1, 2**30) + struct.pack("<BI", 1, 2**30),
        struct.pack("<I", 1) + string("x") + b"\xff" * 300,
        struct.pack("<II", 0, 2**32 - 1),
    ],
)
def test_forged_counts_cost_no_memory(tmp_path: Path, tail: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match="damaged"):
            read_all(tmp_path, HEAD + tail)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_header_of_other_files(tmp_path: Path, whisper_base_dir: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "model.bin")
    assert not is_header((tmp_path / "model.bin").read_bytes()[:64])
    assert not is_header(b"\x80\x02}q\x00" + b"x" * 59)
    assert not is_header(HEAD)
    assert is_header(encode(SMALL)[:64])
    with (whisper_base_dir / "model.bin").open("rb") as file:
        assert is_header(file.read(64))


def test_unreadable_file(tmp_path: Path) -> None:
    (tmp_path / "model.bin").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"model\.bin cannot be read: No such file"):
        read_index(tmp_path / "model.bin")
