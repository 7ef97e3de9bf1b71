"""Tokenizers against the library's own, special tokens in users' texts, and text out of single ids."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sensorium.processors.text import Detokenizer, TextTokenizer, TokenizerError, byte_of_character
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

TEXTS = st.text() | st.lists(
    st.sampled_from(
        ["<|im_end|>", "<|im_", "end|>", " ", "\n", "é", "日本", "🙂", "12", "don't", "\u2581", "\0"]
    )
).map("".join)


def byte_level() -> Tokenizer:
    """Every byte, a few merges, special tokens."""
    vocabulary = dict(byte_of_character())
    merges = [("h", "e"), ("Ġ", "he"), ("Ã", "©")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer


def sentencepiece() -> Tokenizer:
    """Bytes as a fall-back, spaces as U+2581, a beginning of text, and merges that build a special token."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "h", "é", "he"]
    pieces += ["\u2581he", "<", "/", "s", ">", "</", "s>"]
    merges = [("h", "e"), ("\u2581", "he"), ("<", "/"), ("s", ">"), ("</", "s>")]
    vocabulary = {piece: index for index, piece in enumerate([*dict.fromkeys([*pieces, "e"])])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    return tokenizer


BYTE_LEVEL = TextTokenizer(byte_level(), eos_id=byte_level().token_to_id("<|im_end|>"))
SENTENCEPIECE = TextTokenizer(sentencepiece(), bos_id=1, eos_id=2)
BOTH = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte level", "sentencepiece"])


def feed(detokenizer: Detokenizer, ids: Sequence[int]) -> str:
    return "".join(detokenizer.add([token]) for token in ids) + detokenizer.flush()


@BOTH
@given(text=TEXTS)
def test_plain_text_never_becomes_a_special_token(tokenizer: TextTokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    unknown = tokenizer.token_id("<unk>")
    assert not [token for token in ids if tokenizer.is_special(token) and token != unknown]
    if tokenizer is BYTE_LEVEL:
        assert tokenizer.decode(ids) == text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@BOTH
@given(text=TEXTS)
def test_special_encoding_is_the_library_s(tokenizer: TextTokenizer, text: str) -> None:
    expected = tokenizer.backend.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text, special=True) == expected


@BOTH
@given(data=st.data())
def test_decoding_is_the_library_s(tokenizer: TextTokenizer, data: st.DataObject) -> None:
    text = data.draw(TEXTS)
    ids = tokenizer.encode(text, special=True)
    for skip in (True, False):
        expected = tokenizer.backend.decode(ids, skip_special_tokens=skip)
        assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


@given(data=st.data())
def test_any_bytes_decode_as_in_the_library(data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1)))
    assert BYTE_LEVEL.decode(ids) == BYTE_LEVEL.backend.decode(ids, skip_special_tokens=True)


@BOTH
@given(text=TEXTS, skip=st.booleans())
def test_pieces_add_up_and_no_character_is_shown_in_parts(
    tokenizer: TextTokenizer, text: str, skip: bool
) -> None:
    ids = tokenizer.encode(text, special=True)
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    pieces = [detokenizer.add([token]) for token in ids]
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text
    assert detokenizer.held == b""


@given(data=st.data())
def test_any_ids_add_up_to_what_decode_makes_of_them(data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 3)))
    detokenizer = Detokenizer(BYTE_LEVEL)
    text = "".join(detokenizer.add([token]) for token in ids)
    rest = detokenizer.held.decode("utf-8", "replace")
    assert text + rest == BYTE_LEVEL.decode(ids)


def test_an_incomplete_character_is_held_and_dropped_at_the_end() -> None:
    ids = BYTE_LEVEL.encode("a🙂")
    detokenizer = Detokenizer(BYTE_LEVEL)
    assert [detokenizer.add([token]) for token in ids] == ["a", "", "", "", "🙂"]
    detokenizer = Detokenizer(BYTE_LEVEL)
    assert feed(detokenizer, ids[:-1]) == "a"
    assert detokenizer.add(BYTE_LEVEL.encode("b")) == "b"


def test_a_fork_goes_its_own_way() -> None:
    first = Detokenizer(BYTE_LEVEL)
    ids = BYTE_LEVEL.encode("🙂")
    first.add(ids[:2])
    second = first.fork()
    assert first.add(ids[2:]) == "🙂"
    assert second.held == "🙂".encode()[:2]
    assert second.add(ids[2:]) == "🙂"


def test_sentencepiece_drops_the_first_space_only() -> None:
    ids = SENTENCEPIECE.encode("he  he")
    assert SENTENCEPIECE.decode(ids) == "he  he"
    assert SENTENCEPIECE.token_bytes(ids[0]) == b" he"
    assert feed(Detokenizer(SENTENCEPIECE), ids) == "he  he"
    assert feed(Detokenizer(SENTENCEPIECE, skip_special_tokens=False), [2, *ids]) == "</s> he  he"


def test_token_bytes_are_exact() -> None:
    assert BYTE_LEVEL.token_bytes(BYTE_LEVEL.token_id("Ġhe") or -1) == b" he"
    assert BYTE_LEVEL.token_bytes(BYTE_LEVEL.token_id("Ã©") or -1) == "é".encode()
    assert {BYTE_LEVEL.token_bytes(token) for token in range(256)} == {bytes([byte]) for byte in range(256)}
    assert SENTENCEPIECE.token_bytes(SENTENCEPIECE.token_id("<0x0A>") or -1) == b"\n"
    for tokenizer in (BYTE_LEVEL, SENTENCEPIECE):
        assert all(tokenizer.token_bytes(token) == b"" for token in tokenizer.special_texts)
        assert tokenizer.token_bytes(-1) == tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert BYTE_LEVEL.token_bytes(BYTE_LEVEL.token_id("<think>") or -1) == b"<think>"


def test_ends_of_known_families_stop_too() -> None:
    assert [BYTE_LEVEL.special_texts[token] for token in BYTE_LEVEL.stop_ids] == ["<|im_end|>"]
    assert SENTENCEPIECE.stop_ids == (2,)


def test_a_token_costs_microseconds() -> None:
    ids = BYTE_LEVEL.encode("he 🙂 " * 2000)
    detokenizer = Detokenizer(BYTE_LEVEL)
    start = time.process_time()
    for token in ids:
        detokenizer.add([token])
    assert (time.process_time() - start) / len(ids) < 20e-6


def write(folder: Path, tokenizer: Tokenizer, **files: object) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_a_directory_tells_its_ends_and_beginnings(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    write(tmp_path, sentencepiece(), tokenizer_config=config, generation_config={"eos_token_id": [2, 300]})
    tokenizer = TextTokenizer.from_directory(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.stop_ids) == (1, 2, (2, 300))
    assert tokenizer.prefix_ids == (1,)
    assert tokenizer.encode_prompt("he") == [1, *tokenizer.encode("he")]


def test_the_configuration_overrules_the_post_processor(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False, "add_eos_token": True}
    write(tmp_path, sentencepiece(), tokenizer_config=config)
    tokenizer = TextTokenizer.from_directory(tmp_path)
    assert (tokenizer.prefix_ids, tokenizer.suffix_ids) == ((), (2,))


@pytest.mark.parametrize("content", [None, b"", b"{}", b"\xff", b'{"model": {"type": "BPE"}}'])
def test_a_damaged_tokenizer_is_one_clear_line(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(TokenizerError, match=rf"^{tmp_path.name}/tokenizer.json [^\n/]+$"):
        TextTokenizer.from_directory(tmp_path)


def test_an_unknown_decoder_is_refused() -> None:
    tokenizer = byte_level()
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(TokenizerError, match="WordPiece"):
        TextTokenizer(tokenizer)


@settings(max_examples=30)
@given(text=st.text(alphabet=st.characters(exclude_categories=())))
def test_lone_surrogates_are_read_as_replacement_characters(text: str) -> None:
    expected = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode(text)) == expected


def metaspace() -> Tokenizer:
    """Llama's: a space before the first piece of a text, none after a special token."""
    tokenizer = sentencepiece()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", prepend_scheme="first", split=False)
    tokenizer.add_special_tokens([AddedToken("<end>", rstrip=True, lstrip=True, normalized=False)])
    return tokenizer


PARTS = st.lists(st.sampled_from(["<s>", "</s>", "<end>", " ", "he", "é\n", "  "]), max_size=6).map("".join)


@given(text=PARTS)
def test_parts_are_encoded_as_the_whole(text: str) -> None:
    tokenizer = TextTokenizer(metaspace(), bos_id=1, eos_id=2)
    spans = [match.span() for match in tokenizer.special_pattern.finditer(text)]
    assert tokenizer.encode_parts(text, spans) == tokenizer.encode(text, special=True)


def test_only_the_named_spans_are_special() -> None:
    tokenizer = TextTokenizer(metaspace(), bos_id=1, eos_id=2)
    ids = tokenizer.encode_parts("<s>he</s></s>", [(0, 3), (9, 13)])
    assert (ids[0], ids[-1]) == (1, 2)
    assert not [token for token in ids[1:-1] if tokenizer.is_special(token)]
    assert tokenizer.decode(ids[1:-1]) == "he</s>"
