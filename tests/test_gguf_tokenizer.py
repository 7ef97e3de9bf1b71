"""Tokenizers out of GGUF metadata against transformers' reading of the same, on real and on made vocabularies."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sensorium.models import store
from sensorium.models.base import ModelError
from sensorium.models.gguf import GGUFFile, gguf_path, read_gguf
from sensorium.models.gguf_tokenizer import (
    PRE_TOKENIZERS,
    gguf_chat_templates,
    gguf_tokenizer,
)
from sensorium.processors.text import TextTokenizer, byte_of_character
from tokenizers import Tokenizer, pre_tokenizers
from transformers import Qwen2Tokenizer
from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

WORDS = [
    *(
        "Hello",
        " wörld",
        " don't",
        " I'LL",
        "  ",
        "\n",
        "\n\n",
        "\t",
        " 12",
        "345",
        "6",
        "日本語",
        "🙂",
        "e\u0301",
    ),
    *(
        " \u00a0",
        "\u200d",
        "(x)",
        "...",
        "/",
        "\r\n",
        "Ça",
        "ΔΣ",
        "ß",
        "<|im_end|>",
        "<s>",
        "</s>",
        "<think>",
    ),
    *("<0x0A>", "\u2581", "\0", "[UNUSED_1]", "<start_of_turn>user\n", "   3", "№", "½", "한국", "ひらがな"),
]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=8).map("".join) | st.text(max_size=20)


def as_file(pairs: Mapping[str, Any], architecture: str = "llama") -> GGUFFile:
    metadata = {f"tokenizer.{key}": value for key, value in pairs.items()}
    return GGUFFile("m.gguf", {"general.architecture": architecture} | metadata, {})


def byte_level(pre: str, **more: Any) -> dict[str, Any]:
    """All bytes, merges of pairs of common characters, control tokens and a user-defined one."""
    tokens = list(byte_of_character())
    pairs = [f"{a} {b}" for a, b in itertools.product(["l", "o", "Ġ", "1", "Ċ", "e"], repeat=2)]
    tokens += [pair.replace(" ", "") for pair in pairs]
    types = [1] * len(tokens) + [3, 3, 4]
    tokens += ["<|im_start|>", "<|im_end|>", "<think>"]
    return {
        "ggml.model": "gpt2",
        "ggml.pre": pre,
        "ggml.tokens": tokens,
        "ggml.token_type": np.array(types),
        "ggml.merges": pairs,
        "ggml.eos_token_id": len(tokens) - 2,
        **more,
    }


def sentencepiece(**more: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3, *[6] * 256]
    letters = ["\u2581", *"Helowrdn'1234<s>/", "ö", "語"]
    pieces = [*letters, "\u2581\u2581", "He", "ll", "Hell", "Hello", "\u2581w", "\u2581d", "on", "\u2581don"]
    pieces += ["12", "</", "s>", "rl", "rld", "\u2581wö"]
    tokens += dict.fromkeys(pieces)
    types += [1] * (len(tokens) - len(types))
    scores = [0.0] * 259 + [-float(index % 7) for index in range(len(tokens) - 259)]
    return {
        "ggml.model": "llama",
        "ggml.tokens": tokens,
        "ggml.token_type": np.array(types),
        "ggml.scores": np.array(scores),
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.unknown_token_id": 0,
        **more,
    }


def theirs(pairs: Mapping[str, Any], architecture: str = "llama") -> Tokenizer:
    names = {
        "ggml.model": "tokenizer_type",
        "ggml.pre": "pre_tokenizer_type",
        "ggml.tokens": "tokens",
        "ggml.scores": "scores",
        "ggml.token_type": "token_type",
        "ggml.merges": "merges",
    }
    values = {name: pairs[key] for key, name in names.items() if key in pairs}
    plain = {
        name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()
    }
    backend, _ = convert_gguf_tokenizer(architecture, plain)
    return backend


def assert_equal(ours: TextTokenizer, reference: Tokenizer, text: str) -> None:
    ids = ours.encode(text, special=True)
    assert ids == reference.encode(text, add_special_tokens=False).ids
    unknown = ours.token_id("<unk>")
    assert not [token for token in ours.encode(text) if ours.is_special(token) and token != unknown]


BYTE_LEVEL = {
    name: gguf_tokenizer(as_file(byte_level(name))) for name in ("gpt-2", "llama-bpe", "tekken", "gpt-4o")
}
THEIRS = {name: theirs(byte_level(name)) for name in BYTE_LEVEL}


@pytest.mark.parametrize("name", BYTE_LEVEL)
@given(text=TEXTS)
@settings(deadline=None)
def test_byte_level_ids_are_those_of_transformers(name: str, text: str) -> None:
    assert_equal(BYTE_LEVEL[name], THEIRS[name], text)


QWEN2 = gguf_tokenizer(as_file(byte_level("qwen2"), "qwen2"))
_PAIRS = byte_level("qwen2")
QWEN2_CLASS = Qwen2Tokenizer(
    vocab={text: token for token, text in enumerate(_PAIRS["ggml.tokens"])},
    merges=[tuple(merge.split(" ")) for merge in _PAIRS["ggml.merges"]],
).backend_tokenizer


@given(text=TEXTS)
@settings(deadline=None)
def test_qwen2_cuts_and_composes_as_its_own_tokenizer(text: str) -> None:
    """Not as transformers' reading of GGUF files, which leaves out the composition (NFC) of the family."""
    plain = text.replace("<", "(")  # the class was told of no special tokens
    assert QWEN2.encode(plain) == QWEN2_CLASS.encode(plain, add_special_tokens=False).ids


SENTENCEPIECE = gguf_tokenizer(as_file(sentencepiece()))
SENTENCEPIECE_THEIRS = theirs(sentencepiece())
GEMMA = gguf_tokenizer(as_file(sentencepiece(), "gemma3"))
GEMMA_THEIRS = theirs(sentencepiece(), "gemma3")


@given(text=TEXTS)
@settings(deadline=None)
def test_sentencepiece_ids_are_those_of_transformers(text: str) -> None:
    assert_equal(SENTENCEPIECE, SENTENCEPIECE_THEIRS, text)
    ids = SENTENCEPIECE.encode(text, special=True)
    assert SENTENCEPIECE.decode(ids) == SENTENCEPIECE_THEIRS.decode(ids)


@given(text=TEXTS)
@settings(deadline=None)
def test_gemma_ids_are_those_of_transformers(text: str) -> None:
    assert_equal(GEMMA, GEMMA_THEIRS, text)
    ids = GEMMA.encode(text, special=True)
    assert GEMMA.decode(ids) == GEMMA_THEIRS.decode(ids)


def digits_apart(tokenizer: Tokenizer) -> Tokenizer:
    """The family's own tokenizer.json and llama.cpp cut off every digit first; transformers' reader does not."""
    own = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), own])
    return tokenizer


def real(name: str) -> tuple[TextTokenizer, Tokenizer]:
    path = gguf_path(store.resolve(name))
    architecture, pairs, _ = get_gguf_tokenizer(str(path))
    reference, _ = convert_gguf_tokenizer(architecture, pairs)
    return gguf_tokenizer(read_gguf(path)), reference


@pytest.fixture(scope="module")
def smollm2() -> tuple[TextTokenizer, Tokenizer]:
    ours, reference = real("smollm2-135m-instruct")
    return ours, digits_apart(reference)


@pytest.fixture(scope="module")
def gemma() -> tuple[TextTokenizer, Tokenizer]:
    return real("gemma-3-270m")


@given(text=TEXTS)
@settings(deadline=None)
def test_smollm2_s_ids_are_those_of_transformers(smollm2: tuple[TextTokenizer, Tokenizer], text: str) -> None:
    ours, reference = smollm2
    assert_equal(ours, reference, text)
    ids = ours.encode(text, special=True)
    assert ours.decode(ids) == reference.decode(ids)


@pytest.mark.slow
@given(text=TEXTS)
@settings(deadline=None, max_examples=1000)
def test_gemma_s_ids_are_those_of_transformers(gemma: tuple[TextTokenizer, Tokenizer], text: str) -> None:
    ours, reference = gemma
    assert_equal(ours, reference, text)
    ids = ours.encode(text, special=True)
    assert ours.decode(ids) == reference.decode(ids)


def test_known_texts_of_smollm2(smollm2: tuple[TextTokenizer, Tokenizer]) -> None:
    ours, _ = smollm2
    assert (ours.vocab_size, ours.bos_id, ours.eos_id) == (49152, 1, 2)
    assert ours.prefix_ids == ()
    assert {ours.special_texts[token] for token in ours.stop_ids} == {"<|im_end|>", "<|endoftext|>"}
    assert ours.encode("<|im_end|>", special=True) == [2]
    assert len(ours.encode("<|im_end|>")) > 3
    assert [ours.token_bytes(token) for token in ours.encode("  12 é")] == [b"  ", b"1", b"2", b" \xc3\xa9"]


def test_gemma_s_beginning_and_ends() -> None:
    tokenizer = gguf_tokenizer(read_gguf(store.resolve("gemma-3-270m")))
    assert (tokenizer.vocab_size, tokenizer.prefix_ids, tokenizer.suffix_ids) == (262144, (2,), ())
    assert {tokenizer.special_texts[token] for token in tokenizer.stop_ids} == {"<eos>", "<end_of_turn>"}
    assert tokenizer.decode(tokenizer.encode("  a\n\n b 🙂")) == "  a\n\n b 🙂"
    assert tokenizer.token_bytes(tokenizer.encode("x   y")[1]) == b"   "


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
@given(text=TEXTS)
@settings(deadline=None, max_examples=10)
def test_every_pre_tokenizer_keeps_every_byte(name: str, text: str) -> None:
    pieces = PRE_TOKENIZERS[name].build().pre_tokenize_str(text)
    alphabet = byte_of_character()
    assert bytes(alphabet[character] for piece, _ in pieces for character in piece) == text.encode()


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("llama-bpe", ["I", "'LL", " pay", " ", "123", "45", "ĠÄ", "!!\n"]),
        ("qwen2", ["I", "'LL", " pay", " ", "1", "2", "3", "4", "5", "ĠÄ", "!!\n"]),
        ("smollm", ["I", "'", "LL", " pay", " ", "1", "2", "3", "4", "5", "ĠÄ", "!!", "\n"]),
        ("deepseek-v3", ["I", "'LL", " pay", " ", "123", "45", "ĠÄ", "!!\n"]),
        ("gpt-4o", ["I'LL", " pay", " ", "123", "45", "ĠÄ", "!!\n"]),
    ],
)
def test_pieces_of_a_sentence(name: str, pieces: list[str]) -> None:
    found = PRE_TOKENIZERS[name].build().pre_tokenize_str("I'LL pay 12345 ä!!\n")
    alphabet = byte_of_character()
    spelled = [bytes(alphabet[character] for character in piece).decode() for piece, _ in found]
    assert spelled == [piece.replace("ĠÄ", " ä") for piece in pieces]


def test_whole_words_need_no_merges() -> None:
    """Llama 3 has tokens that no merges lead to."""
    pairs = byte_level("llama-bpe")
    pairs["ggml.tokens"].append("xyz")
    pairs["ggml.token_type"] = np.append(pairs["ggml.token_type"], 1)
    tokenizer = gguf_tokenizer(as_file(pairs))
    assert tokenizer.encode("xyz") == [len(pairs["ggml.tokens"]) - 1]


def test_flags_and_ends() -> None:
    plain = gguf_tokenizer(as_file(sentencepiece()))
    assert (plain.prefix_ids, plain.suffix_ids) == ((1,), ())
    flags = {"ggml.add_bos_token": False, "ggml.add_eos_token": True, "ggml.eot_token_id": 5}
    tokenizer = gguf_tokenizer(as_file(sentencepiece(**flags)))
    assert (tokenizer.prefix_ids, tokenizer.suffix_ids, tokenizer.stop_ids) == ((), (2,), (2, 5))
    assert gguf_tokenizer(as_file(byte_level("llama-bpe", **{"ggml.bos_token_id": 292}))).prefix_ids == (292,)
    unspaced = gguf_tokenizer(as_file(sentencepiece(**{"ggml.add_space_prefix": False})))
    assert unspaced.decode(unspaced.encode("Hello")) == "Hello"
    assert plain.encode("Hello")[0] == plain.token_id("\u2581")
    assert unspaced.encode("Hello") == plain.encode("Hello")[1:]


def test_control_tokens_outside_the_byte_alphabet_are_special() -> None:
    pairs = byte_level("deepseek-v3")
    pairs["ggml.tokens"] += ["<｜end▁of▁sentence｜>"]
    pairs["ggml.token_type"] = np.append(pairs["ggml.token_type"], 3)
    tokenizer = gguf_tokenizer(as_file(pairs))
    last = len(pairs["ggml.tokens"]) - 1
    assert tokenizer.encode("<｜end▁of▁sentence｜>", special=True) == [last]
    assert last in tokenizer.stop_ids


def test_templates_by_name() -> None:
    file = as_file({"chat_template": "A", "chat_template.tool_use": "B", "chat_templates": ["tool_use"]})
    assert gguf_chat_templates(file) == {"default": "A", "tool_use": "B"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ggml.tokens": None}, "no vocabulary"),
        ({"ggml.tokens": []}, "no vocabulary"),
        ({"ggml.model": "t5"}, "'t5' are not supported"),
        ({"ggml.pre": "viking"}, "'viking' is not supported; supported: codeshell"),
        ({"ggml.merges": ["l q q"]}, "damaged"),
        ({"ggml.merges": ["nothing"]}, "damaged"),
        ({"ggml.merges": None}, "no merges"),
        ({"ggml.token_type": np.array([1])}, "does not fit"),
    ],
)
def test_damaged_vocabularies_are_one_clear_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=rf"^m\.gguf: [^\n]*{message}"):
        gguf_tokenizer(as_file(byte_level("gpt-2") | change))
