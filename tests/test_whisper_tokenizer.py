"""The tokenizer against openai-whisper's own."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sensorium.models.base import ModelError
from sensorium.models.speech import OptionError
from sensorium.models.whisper_languages import LANGUAGE_ALIASES, LANGUAGES, SPACELESS_LANGUAGES
from sensorium.models.whisper_timing import split_words
from sensorium.models.whisper_tokenizer import WhisperTokenizer
from whisper import tokenizer as reference

MULTILINGUAL, LARGE_V3, ENGLISH = 51865, 51866, 51864

# Spaces, digits, apostrophes, marks, several scripts, emoji with joiners, whatever Unicode holds.
TEXTS = st.one_of(
    st.text(max_size=60),
    st.text(st.sampled_from(" \n\t'’sSrEvVlLtTmMdD.,-♪♫(<|>)1２éñ中文字กไ한글👩‍👩‍👧é "), max_size=60),
    st.lists(st.sampled_from(["don't", " we'LL", "  ", "1st", "\u2028", "<|endoftext|>", "<|en|>"])).map(
        "".join
    ),
)


@pytest.fixture(scope="module")
def tokenizers(whisper_base_dir: Path, whisper_tiny_en_dir: Path) -> dict[bool, WhisperTokenizer]:
    """By whether it is multilingual."""
    return {
        True: WhisperTokenizer(whisper_base_dir / "tokenizer.json", MULTILINGUAL),
        False: WhisperTokenizer(whisper_tiny_en_dir / "tokenizer.json", ENGLISH),
    }


def reference_for(multilingual: bool, languages: int = 99, language: str = "en") -> reference.Tokenizer:
    return reference.get_tokenizer(
        multilingual, num_languages=languages, language=language, task="transcribe"
    )


@pytest.mark.parametrize("multilingual", [True, False])
def test_ids_are_the_references(tokenizers: dict[bool, WhisperTokenizer], multilingual: bool) -> None:
    ours, theirs = tokenizers[multilingual], reference_for(multilingual)
    names = ("eot", "sot", "translate", "transcribe", "sot_lm", "sot_prev", "no_speech", "no_timestamps")
    for name in (*names, "timestamp_begin", "non_speech_tokens"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert len(ours.non_speech_tokens) == (82 if multilingual else 84)
    assert {code: ours.language_token(code) for code in ours.language_codes} == {
        code: theirs.to_language_token(code) for code in list(reference.LANGUAGES)[:99]
    }
    assert list(ours.language_tokens) == [ours.language_token(code) for code in ours.language_codes]
    assert ours.sot_sequence("en", "transcribe") == theirs.sot_sequence
    assert ours.is_multilingual is multilingual


def test_translation_and_other_languages(tokenizers: dict[bool, WhisperTokenizer]) -> None:
    theirs = reference.get_tokenizer(True, language="ja", task="translate")
    assert tokenizers[True].sot_sequence("ja", "translate") == theirs.sot_sequence


def test_large_v3_has_one_language_more(whisper_base_dir: Path, tmp_path: Path) -> None:
    """A file as large-v3's: 100 languages, everything after them one id further, timestamps listed."""
    content = json.loads((whisper_base_dir / "tokenizer.json").read_text())
    theirs = reference_for(True, 100, "yue")
    content["added_tokens"] = [
        content["added_tokens"][0] | {"id": token, "content": name}
        for name, token in sorted(theirs.special_tokens.items(), key=lambda item: item[1])
    ]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    ours = WhisperTokenizer(path, LARGE_V3)
    assert ours.language_codes[-1] == "yue"
    assert ours.sot_sequence("yue", "transcribe") == theirs.sot_sequence
    assert ours.timestamp_begin == theirs.timestamp_begin == 50365
    assert ours.resolve_language("Cantonese") == "yue"
    with pytest.raises(ModelError, match=r"gives <\|translate\|> the id 50359, not 50358"):
        WhisperTokenizer(path, MULTILINGUAL)


def test_files_that_are_not_whispers(tmp_path: Path, whisper_base_dir: Path) -> None:
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{}")
    with pytest.raises(ModelError, match=r"^cannot read the tokenizer file tokenizer\.json$"):
        WhisperTokenizer(broken, MULTILINGUAL)
    with pytest.raises(ModelError, match="not Whisper's"):
        WhisperTokenizer(whisper_base_dir / "tokenizer.json", 50257)
    with pytest.raises(ModelError, match=r"gives <\|endoftext\|> the id"):
        WhisperTokenizer(whisper_base_dir / "tokenizer.json", ENGLISH)


@settings(max_examples=400, deadline=None)
@given(text=TEXTS, multilingual=st.booleans())
def test_encodes_and_decodes_as_the_reference(
    tokenizers: dict[bool, WhisperTokenizer], text: str, multilingual: bool
) -> None:
    ours, theirs = tokenizers[multilingual], reference_for(multilingual)
    ids = ours.encode(text)
    assert ids == theirs.encoding.encode_ordinary(text)
    assert ours.decode(ids) == theirs.decode(ids) == text


def test_lone_surrogates_do_not_fail(tokenizers: dict[bool, WhisperTokenizer]) -> None:
    text = "a\ud800b"
    assert tokenizers[True].encode(text) == reference_for(True).encoding.encode_ordinary(text)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), multilingual=st.booleans())
def test_any_ids_decode_as_the_reference(
    tokenizers: dict[bool, WhisperTokenizer], data: st.DataObject, multilingual: bool
) -> None:
    ours, theirs = tokenizers[multilingual], reference_for(multilingual)
    ids = data.draw(
        st.lists(st.integers(0, ours.vocab_size - 1).filter(lambda i: i != 50256 or multilingual))
    )
    assert ours.decode(ids) == theirs.decode(ids)


@settings(max_examples=300, deadline=None)
@given(
    text=TEXTS,
    cut=st.integers(0, 3),
    noise=st.lists(st.integers(0, 50255), max_size=4),
    language=st.sampled_from(["en", "de", *sorted(SPACELESS_LANGUAGES - {"yue"})]),
)
def test_words_split_as_the_reference(
    tokenizers: dict[bool, WhisperTokenizer], text: str, cut: int, noise: list[int], language: str
) -> None:
    ours, theirs = tokenizers[True], reference_for(True, language=language)
    ids = [*ours.encode(text)[cut:], *noise, ours.eot]
    words, tokens = theirs.split_to_word_tokens(ids)
    assert split_words(ours, ids, language) == list(zip(words, tokens, strict=True))


def test_languages_are_the_references(tokenizers: dict[bool, WhisperTokenizer]) -> None:
    assert dict(LANGUAGES) == reference.LANGUAGES
    assert list(LANGUAGES) == list(reference.LANGUAGES)
    names = {name: code for code, name in LANGUAGES.items()}
    assert names | dict(LANGUAGE_ALIASES) == reference.TO_LANGUAGE_CODE
    assert len(LANGUAGE_ALIASES) == 12
    for name, code in reference.TO_LANGUAGE_CODE.items():
        if code != "yue":
            assert tokenizers[True].resolve_language(name.title()) == code
            assert tokenizers[True].resolve_language(f" {code.upper()} ") == code


@pytest.mark.parametrize("name", ["klingon", "", "yue", "cantonese", "english please", "e", "<|en|>"])
def test_unknown_languages_are_refused(tokenizers: dict[bool, WhisperTokenizer], name: str) -> None:
    with pytest.raises(OptionError) as error:
        tokenizers[True].resolve_language(name)
    assert error.value.param == "language"


def test_english_only_models_know_english_only(tokenizers: dict[bool, WhisperTokenizer]) -> None:
    assert tokenizers[False].resolve_language("English") == "en"
    with pytest.raises(OptionError, match="English only"):
        tokenizers[False].resolve_language("de")


@settings(max_examples=50, deadline=None)
@given(text=TEXTS, repeat=st.integers(1, 4000), count=st.integers(1, 223))
def test_both_ends_of_a_text_without_the_rest(
    tokenizers: dict[bool, WhisperTokenizer], text: str, repeat: int, count: int
) -> None:
    long = (" " + text) * min(repeat, 60_000 // (len(text) + 1))
    for tokenizer in tokenizers.values():
        ids = tokenizer.encode(long)
        assert list(tokenizer.first_ids(long, count)) == ids[:count]
        assert list(tokenizer.last_ids(long, count)) == ids[-count:]


def test_a_megabyte_of_prompt_takes_no_time(tokenizers: dict[bool, WhisperTokenizer]) -> None:
    began = time.perf_counter()
    for text in ("a" * 2**20, "!?" * 2**19, " " * 2**20, "🦩" * 2**18):
        assert len(tokenizers[True].last_ids(text, 223)) == 223
        assert len(tokenizers[True].first_ids(text, 223)) == 223
    assert time.perf_counter() - began < 5
