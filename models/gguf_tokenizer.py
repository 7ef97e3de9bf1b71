"""The tokenizer that a GGUF file's metadata describe, built with the `tokenizers` library.

Files hold the vocabulary, but of the rest only names: "gpt2" with the name of a pre-tokenizer for byte-level
BPE, "llama" for sentencepiece. What the names stand for is in llama.cpp (llama-vocab.cpp) and, for families of
the hub, in their own tokenizer.json, which decides where the two differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from ..processors.text import SPACE_MARK, TextTokenizer, TokenizerError, byte_of_character
from .base import ModelError
from .gguf import GGUFFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
MAX_DERIVED_LENGTH = 256  # characters of a piece that merges are looked for in; sentencepiece's end at 16

CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = (
    rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"
)
QWEN2 = rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"
QWEN35 = (
    rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACES}"
)
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
WORD_START = r"[^\r\n\p{L}\p{N}]?"
TEKKEN = (
    rf"{WORD_START}{UPPER}*{LOWER}+|{WORD_START}{UPPER}+{LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"
)
GPT4O = (
    rf"{WORD_START}{UPPER}*{LOWER}+{CONTRACTION}?|{WORD_START}{UPPER}+{LOWER}*{CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"
)
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    rf"|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{SPACES}",
)


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut before merging.

    patterns: applied one after another, each match and what lies between is a piece; none: GPT-2's own.
    digits: GPT-2's own after every digit was cut off. nfc: text is composed first.
    whole_words: a piece that is a token is not looked at further. bos: what a file without the flag means.
    """

    patterns: tuple[str, ...] = ()
    digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    bos: bool = False

    def build(self) -> Any:
        if self.patterns:
            steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
            byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            return pre_tokenizers.Sequence([*steps, byte_level])
        own = pre_tokenizers.ByteLevel(add_prefix_space=False)
        if not self.digits:
            return own
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), own])


def _named(names: str, kind: PreTokenizer) -> dict[str, PreTokenizer]:
    return dict.fromkeys(names.split(), kind)


# By tokenizer.ggml.pre.
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    **_named("default gpt-2 mpt olmo jais phi-2 trillion granite-docling", PreTokenizer()),
    **_named("smollm starcoder refact command-r codeshell exaone", PreTokenizer(digits=True)),
    **_named(
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 dbrx smaug-bpe",
        PreTokenizer((LLAMA3,), whole_words=True, bos=True),
    ),
    **_named("qwen2 deepseek-r1-qwen megrez kormo f2llmv2", PreTokenizer((QWEN2,), nfc=True)),
    **_named("qwen35", PreTokenizer((QWEN35,), nfc=True)),
    **_named("tekken", PreTokenizer((TEKKEN,), whole_words=True, bos=True)),
    **_named("gpt-4o llama4 kanana2 minimax-m2", PreTokenizer((GPT4O,))),
    **_named("deepseek-v3 hunyuan-dense", PreTokenizer(DEEPSEEK3)),
}


@dataclass(frozen=True)
class _Vocabulary:
    """What the metadata say, checked. types: one a token. flags: those that the file sets."""

    label: str
    architecture: str
    kind: str
    pre: str
    tokens: Sequence[str]
    types: Sequence[int]
    scores: Sequence[float]
    merges: Sequence[str] | None
    pairs: Mapping[str, Any]

    @classmethod
    def read(cls, file: GGUFFile) -> _Vocabulary:
        pairs = file.metadata
        tokens = pairs.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, list) or not tokens:
            raise ModelError(f"{file.label}: it has no vocabulary")
        lists = {}
        for name in ("token_type", "scores"):
            values = pairs.get(f"tokenizer.ggml.{name}")
            lists[name] = values.tolist() if isinstance(values, np.ndarray) else []
            if lists[name] and len(lists[name]) != len(tokens):
                raise ModelError(f"{file.label}: tokenizer.ggml.{name} does not fit the vocabulary")
        merges = pairs.get("tokenizer.ggml.merges")
        return cls(
            file.label,
            str(pairs.get("general.architecture", "")),
            str(pairs.get("tokenizer.ggml.model", "none")),
            str(pairs.get("tokenizer.ggml.pre", "default")),
            tokens,
            lists["token_type"] or [NORMAL] * len(tokens),
            lists["scores"] or [0.0] * len(tokens),
            merges if isinstance(merges, list) else None,
            pairs,
        )

    def token_id(self, name: str) -> int | None:
        value = self.pairs.get(f"tokenizer.ggml.{name}_token_id")
        return value if isinstance(value, int) and 0 <= value < len(self.tokens) else None

    def flag(self, name: str, default: bool) -> bool:
        value = self.pairs.get(f"tokenizer.ggml.{name}")
        return bool(value) if isinstance(value, bool | int) else default

    def text(self, name: str) -> str | None:
        token = self.token_id(name)
        return None if token is None else self.tokens[token]


def gguf_tokenizer(file: GGUFFile) -> TextTokenizer:
    """The tokenizer of a GGUF file. Raises ModelError where it has none, or one of an unknown kind."""
    vocabulary = _Vocabulary.read(file)
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if vocabulary.kind not in builders:
        raise ModelError(f"{file.label}: tokenizers of kind {vocabulary.kind[:40]!r} are not supported")
    try:
        tokenizer = builders[vocabulary.kind](vocabulary)
    except ModelError:
        raise
    except Exception:  # the binding raises bare Exception for every fault
        raise ModelError(f"{file.label}: its vocabulary or its merges are damaged") from None
    by_default = vocabulary.kind == "llama" or PRE_TOKENIZERS[vocabulary.pre].bos
    bos_id, eos_id = vocabulary.token_id("bos"), vocabulary.token_id("eos")
    stops = [vocabulary.token_id(name) for name in ("eos", "eot", "eom")]
    prefix = [bos_id] if bos_id is not None and vocabulary.flag("add_bos_token", by_default) else []
    suffix = [eos_id] if eos_id is not None and vocabulary.flag("add_eos_token", False) else []
    try:
        return TextTokenizer(
            tokenizer,
            bos_id=bos_id,
            eos_id=eos_id,
            stop_ids=[token for token in stops if token is not None],
            prefix_ids=prefix,
            suffix_ids=suffix,
        )
    except TokenizerError as error:
        raise ModelError(f"{file.label}: {error}") from None


def gguf_chat_templates(file: GGUFFile) -> dict[str, str]:
    """The chat templates of a GGUF file by name; the unnamed one is "default"."""
    prefix = "tokenizer.chat_template"
    found = {}
    for key, value in file.metadata.items():
        if isinstance(value, str) and (key == prefix or key.startswith(prefix + ".")):
            found[key.removeprefix(prefix).removeprefix(".") or "default"] = value
    return found


def _byte_level(vocabulary: _Vocabulary) -> Tokenizer:
    kind = PRE_TOKENIZERS.get(vocabulary.pre)
    if kind is None:
        raise ModelError(
            f"{vocabulary.label}: the pre-tokenizer {vocabulary.pre[:40]!r} is not supported;"
            f" supported: {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    if vocabulary.merges is None:
        raise ModelError(f"{vocabulary.label}: it has no merges")
    character_of = {byte: character for character, byte in byte_of_character().items()}
    alphabet = set(character_of.values())
    spelled, added = {}, []
    for token, (text, token_type) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        plain = alphabet.issuperset(text)
        # A control token in no brackets and outside the alphabet is an ordinary one that a converter mistook.
        control = token_type == CONTROL and (plain or text[:1] + text[-1:] in ("<>", "[]"))
        if text and (control or token_type == USER_DEFINED):
            added.append(AddedToken(text, normalized=False, special=control))
        elif not plain:
            text = "".join(character_of[byte] for byte in text.encode())
        spelled[text] = token
    merges = [_pair(merge) for merge in vocabulary.merges]
    tokenizer = Tokenizer(BPE(spelled, merges, ignore_merges=kind.whole_words))
    tokenizer.normalizer = normalizers.NFC() if kind.nfc else None
    tokenizer.pre_tokenizer = kind.build()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(added)
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _sentencepiece(vocabulary: _Vocabulary) -> Tokenizer:
    is_gemma = vocabulary.architecture.startswith("gemma")
    texts = list(vocabulary.tokens)
    if is_gemma:  # runs of spaces are written as such in the file
        texts = [SPACE_MARK * len(text) if text and not text.strip(" ") else text for text in texts]
    if vocabulary.merges is None:
        merges = list(_derived_merges(texts, vocabulary, by_score=not is_gemma))
    else:
        merges = [_pair(merge) for merge in vocabulary.merges]
    spelled = {text: token for token, text in enumerate(texts)}
    unknown = vocabulary.text("unknown")
    tokenizer = Tokenizer(BPE(spelled, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    steps = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if is_gemma:
        tokenizer.normalizer = normalizers.Replace(" ", SPACE_MARK)
    else:
        prefixed = vocabulary.flag("add_space_prefix", True)
        scheme = "first" if prefixed else "never"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE_MARK, prepend_scheme=scheme, split=False)
        if prefixed:
            steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_tokens(
        [
            AddedToken(text, normalized=False, special=token_type == CONTROL)
            for text, token_type in zip(vocabulary.tokens, vocabulary.types, strict=True)
            if text and (token_type == CONTROL or (token_type == USER_DEFINED and text in spelled))
        ]
    )
    return tokenizer


def _derived_merges(
    texts: Sequence[str], vocabulary: _Vocabulary, by_score: bool
) -> Iterator[tuple[str, str]]:
    """The merges of a vocabulary that comes without: every way to make a token of two others, best first.

    By score, as sentencepiece ranks its pieces, or in the order of the vocabulary (Gemma, whose scores do not
    follow the merges). Of one token the longer left part comes first. Control and byte tokens are made by none.
    """
    known = set(texts)
    found = []
    for token, text in enumerate(texts):
        if vocabulary.types[token] in (CONTROL, BYTE, UNKNOWN) or len(text) > MAX_DERIVED_LENGTH:
            continue
        for cut in range(len(text) - 1, 0, -1):
            left = text[:cut]
            if left in known and (right := text[cut:]) in known:
                found.append((vocabulary.scores[token], left, right))
    if by_score:
        found.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return ((left, right) for _, left, right in found)
