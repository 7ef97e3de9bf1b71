"""Whisper's tokenizer over a checkpoint's tokenizer.json, with the ids of the special tokens.

Every vocabulary ends in <|endoftext|>, <|startoftranscript|>, the languages, six control tokens and 1,501
timestamps, so the vocabulary size alone fixes their ids; files from different exporters name them differently
or leave the timestamps out, so the ids are computed and the file is checked against them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from .base import ModelError
from .speech import OptionError, Task
from .whisper_languages import LANGUAGE_ALIASES, LANGUAGES

N_TIMESTAMPS = 1501  # <|0.00|> … <|30.00|> in steps of 0.02 s
N_CONTROL = 6  # translate … notimestamps
TOKENS_AT_A_CUT = 16  # as many tokens may come out otherwise beside the place where a text is cut

# Not spoken: marks of speakers, stage directions, music. Suppressed where the whole symbol is one token, with
# or without a space before it.
_SYMBOLS = (
    *'"#()*+/:;<=>@[\\]^_`{|}~「」『』',
    *("<<", ">>", "<<<", ">>>", "--", "---", "-(", "-[", "('", '("'),
    *("((", "))", "(((", ")))", "[[", "]]", "{{", "}}", "♪♪", "♪♪♪"),
)
# U+2669 … U+266F share their first two UTF-8 bytes, which may be a token of their own: it is suppressed then.
_MUSIC = "♩♪♫♬♭♮♯"


def _byte_of_character() -> dict[str, int]:
    """The GPT-2 spelling of bytes in a vocabulary: printable Latin-1 as itself, the rest from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = itertools.count(0x100)
    return {chr(byte if byte in printable else next(spare)): byte for byte in range(256)}


class WhisperTokenizer:
    """Text ↔ ids. Immutable, safe to share between threads.

    Attributes
    ----------
    eot, sot, translate, transcribe, sot_lm, sot_prev, no_speech, no_timestamps: ids of the control tokens.
    timestamp_begin: id of <|0.00|>; ids up to `vocab_size` - 1 follow in steps of 0.02 s.
    language_codes: the model's languages in the order of their tokens.
    """

    def __init__(self, path: str | Path, vocab_size: int) -> None:
        """path: tokenizer.json. vocab_size: rows of the token embedding, at least 51,864.

        Raises ModelError when the file cannot be read or does not belong to a Whisper of that size.
        """
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the binding raises bare Exception for every fault
            raise ModelError(f"cannot read the tokenizer file {Path(path).name}") from error
        # Text of users must never turn into control tokens.
        self._tokenizer.encode_special_tokens = True

        self.vocab_size = vocab_size
        self.is_multilingual = vocab_size >= 51865
        num_languages = vocab_size - 51765 - int(self.is_multilingual)
        if not 99 <= num_languages <= len(LANGUAGES):
            raise ModelError(f"a vocabulary of {vocab_size} tokens is not Whisper's")
        self.language_codes = tuple(LANGUAGES)[:num_languages]

        self.timestamp_begin = vocab_size - N_TIMESTAMPS
        self.translate = self.timestamp_begin - N_CONTROL
        self.transcribe = self.translate + 1
        self.sot_lm = self.translate + 2
        self.sot_prev = self.translate + 3
        self.no_speech = self.translate + 4
        self.no_timestamps = self.translate + 5
        self.sot = self.translate - num_languages - 1
        self.eot = self.sot - 1
        self._special_names = [
            "<|endoftext|>",
            "<|startoftranscript|>",
            *(f"<|{code}|>" for code in self.language_codes),
            "<|translate|>",
            "<|transcribe|>",
            "<|startoflm|>",
            "<|startofprev|>",
            "<|nospeech|>",
            "<|notimestamps|>",
        ]
        self._check_special_tokens()
        self._token_bytes = self._read_token_bytes()

    def _check_special_tokens(self) -> None:
        names = {name: self.eot + index for index, name in enumerate(self._special_names)}
        names["<|nocaptions|>"] = self.no_speech
        names["<|0.00|>"] = self.timestamp_begin
        for name, expected in names.items():
            found = self._tokenizer.token_to_id(name)
            if found is not None and found != expected:
                raise ModelError(f"the tokenizer file gives {name} the id {found}, not {expected}")
        if self._tokenizer.token_to_id("<|startoftranscript|>") is None:
            raise ModelError("the tokenizer file is not Whisper's: <|startoftranscript|> is missing")

    def _read_token_bytes(self) -> list[bytes]:
        byte_of = _byte_of_character()
        table = [b""] * self.eot
        for spelling, token in self._tokenizer.get_vocab(with_added_tokens=False).items():
            if token < self.eot:
                table[token] = bytes(byte_of[character] for character in spelling)
        return [*table, *(name.encode() for name in self._special_names)]

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; names of control tokens in it are plain text too."""
        # Lone surrogates, which a client's JSON may hold, have no UTF-8 form.
        clean = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return self._tokenizer.encode(clean, add_special_tokens=False).ids

    def first_ids(self, text: str, count: int) -> tuple[int, ...]:
        """Up to `count` ids from the beginning of `encode(text)`; however long, only that much is encoded."""
        return tuple(self.encode(text[: self._covering(count)])[:count])

    def last_ids(self, text: str, count: int) -> tuple[int, ...]:
        """Up to `count` ids from the end of `encode(text)`."""
        return tuple(self.encode(text[-self._covering(count) :])[-count:])

    def _covering(self, count: int) -> int:
        """Characters that hold more than `count` tokens, whatever they are, so that none kept lies at the cut."""
        return (count + TOKENS_AT_A_CUT) * self._longest_token

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self._token_bytes))

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes that the ids stand for, control tokens by name, timestamps left out."""
        return b"".join(self._token_bytes[token] for token in ids if token < self.timestamp_begin)

    def decode(self, ids: Iterable[int]) -> str:
        """As `decode_bytes`, as text; bytes that are not valid UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def language_token(self, code: str) -> int:
        return self.sot + 1 + self.language_codes.index(code)

    @property
    def language_tokens(self) -> range:
        return range(self.sot + 1, self.sot + 1 + len(self.language_codes))

    def sot_sequence(self, language: str, task: Task) -> tuple[int, ...]:
        """What precedes the first sampled token. English-only models know neither language nor task."""
        if not self.is_multilingual:
            return (self.sot,)
        return (
            self.sot,
            self.language_token(language),
            self.translate if task == "translate" else self.transcribe,
        )

    @cached_property
    def non_speech_tokens(self) -> tuple[int, ...]:
        """Ascending ids that stand for no spoken sound."""
        # A hyphen or an apostrophe is fine inside a word, not at its beginning.
        found = {self.encode(" -")[0], self.encode(" '")[0]}
        for symbol in (*_SYMBOLS, *_MUSIC):
            for ids in (self.encode(symbol), self.encode(" " + symbol)):
                if len(ids) == 1 or symbol in _MUSIC:
                    found.add(ids[0])
        return tuple(sorted(found))

    @cached_property
    def suppressed_tokens(self) -> tuple[int, ...]:
        """Ascending ids never sampled: the non-speech tokens and the control tokens but <|notimestamps|>."""
        control: Sequence[int] = range(self.translate, self.no_timestamps)
        return tuple(sorted({*self.non_speech_tokens, self.sot, *control}))

    def resolve_language(self, language: str) -> str:
        """A code, English name or alias in any case → code. Raises OptionError("language")."""
        name = language.strip().lower()
        by_name = {LANGUAGES[code]: code for code in self.language_codes}
        code = name if name in self.language_codes else by_name.get(name) or LANGUAGE_ALIASES.get(name)
        if code not in self.language_codes:
            raise OptionError("language", f"{language[:40]!r} is not a language of this model")
        if not self.is_multilingual and code != "en":
            raise OptionError("language", "this model knows English only")
        return code
