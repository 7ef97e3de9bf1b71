"""Text ↔ token ids over the `tokenizers` library, and text out of ids that arrive one at a time.

A tokenizer is made of a `tokenizers.Tokenizer` (a directory's tokenizer.json, or one that a reader of another
format has built) and the ids that begin and end texts. Ids are turned back into text through the exact bytes
of every token, for byte-level vocabularies (GPT-2's spelling of bytes) and for sentencepiece's (U+2581 for a
space, <0xNN> for a byte that has no token).
"""

from __future__ import annotations

import codecs
import itertools
import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

MAX_JSON_BYTES = 64 << 20
MAX_TOKENIZER_BYTES = 256 << 20
SPACE_MARK = "\u2581"
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# Tokens that end a turn or a text in the vocabularies of known families; they stop a generation even where a
# checkpoint names only one of them as its end.
END_TOKENS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>"),
    *(
        "<|end_of_text|>",
        "<|eot|>",
        "<|eom|>",
        "<eos>",
        "</s>",
        "<｜end▁of▁sentence｜>",
        "<|END_OF_TURN_TOKEN|>",
    ),
)


class TokenizerError(ValueError):
    """A tokenizer's files are absent, damaged or of an unsupported kind; the text is one line for users."""


def byte_of_character() -> dict[str, int]:
    """The GPT-2 spelling of bytes in a vocabulary: printable Latin-1 as itself, the rest from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = itertools.count(0x100)
    return {chr(byte if byte in printable else next(spare)): byte for byte in range(256)}


class TextTokenizer:
    """Text ↔ ids. Immutable, safe to share between threads.

    Attributes
    ----------
    vocab_size: one more than the largest id.
    bos_id, eos_id: ids of the tokens that begin and end a text, None where the vocabulary has none.
    stop_ids: ascending ids that end a generation: the end of a text, of a turn, of a message.
    prefix_ids, suffix_ids: what surrounds the text of a plain prompt (a chat template writes its own).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        bos_id: int | None = None,
        eos_id: int | None = None,
        stop_ids: Iterable[int] = (),
        prefix_ids: Sequence[int] = (),
        suffix_ids: Sequence[int] = (),
    ) -> None:
        """tokenizer: not to be changed by anyone afterwards. Raises TokenizerError for an unknown decoder."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = False
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        added: Mapping[int, AddedToken] = tokenizer.get_added_tokens_decoder()
        self._added = added
        self._special_texts = {token: entry.content for token, entry in added.items() if entry.special}
        self._special_ids = {text: token for token, text in self._special_texts.items()}
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocabulary.values(), default=-1)
        spelling = _Spelling(tokenizer)
        self._strips_first_space = spelling.strips_first_space
        self._token_bytes = [b""] * self.vocab_size
        for text, token in vocabulary.items():
            if token not in self._special_texts:
                plain = token in added
                self._token_bytes[token] = added[token].content.encode() if plain else spelling.bytes_of(text)
        self._visible_bytes = list(self._token_bytes)
        for token, text in self._special_texts.items():
            self._visible_bytes[token] = text.encode()

        self.bos_id = bos_id
        self.eos_id = eos_id
        named = (token for token, text in self._special_texts.items() if text in END_TOKENS)
        ends = {*stop_ids, *named} | ({eos_id} if eos_id is not None else set())
        self.stop_ids = tuple(sorted(ends))
        self.prefix_ids = tuple(prefix_ids)
        self.suffix_ids = tuple(suffix_ids)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of a text, without prefix and suffix.

        special: texts of special tokens become their ids (templates), else they are plain text (users). A
        lone surrogate, which a client's JSON may hold, has no UTF-8 form and is read as U+FFFD.
        """
        clean = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        ids: list[int] = self._tokenizer.encode(clean, add_special_tokens=False).ids
        if special or self._special_texts.keys().isdisjoint(ids):
            return ids
        return self._encode_plain(clean, start=True)

    def encode_parts(self, text: str, special_spans: Sequence[tuple[int, int]]) -> list[int]:
        """Ids of a text in which exactly these spans (begin, end), ascending, are special tokens.

        As `encode(text, special=True)`, but for every other special token's text, which is plain.
        """
        result: list[int] = []
        position, strips = 0, False
        for begin, end in [*special_spans, (len(text), len(text))]:
            token = self._special_ids.get(text[begin:end])
            entry = None if token is None else self._added[token]
            piece = text[position:begin].lstrip() if strips else text[position:begin]
            piece = piece.rstrip() if entry is not None and entry.lstrip else piece
            if piece:
                clean = piece.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
                result += self._encode_plain(clean, start=position == 0)
            if token is not None:
                result.append(token)
            position, strips = end, entry is not None and entry.rstrip
        return result

    def _encode_plain(self, text: str, start: bool) -> list[int]:
        """start: whether it is the beginning of a text, which some tokenizers put a space before."""
        with self._lock:  # cached properties may be computed twice otherwise, and these are large
            inner = self._inner_tokenizer
            first = self._plain_tokenizer if start else inner
        ids: list[int] = first.encode(text, add_special_tokens=False).ids
        unknown = self._unknown_id
        if all(token not in self._special_texts or token == unknown for token in ids):
            return ids
        # Some vocabularies' merges build a special token's text: cut off its first character.
        ends = [0, *(match.start() + 1 for match in self.special_pattern.finditer(text)), len(text)]
        head, *rest = [text[begin:end] for begin, end in itertools.pairwise(ends)]
        ids = first.encode(head, add_special_tokens=False).ids
        return ids + [token for piece in rest for token in inner.encode(piece, add_special_tokens=False).ids]

    def encode_prompt(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of a plain prompt: prefix, text, suffix."""
        return [*self.prefix_ids, *self.encode(text, special=special), *self.suffix_ids]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids; bytes that are not UTF-8 become U+FFFD, ids outside the vocabulary nothing."""
        table = self._token_bytes if skip_special_tokens else self._visible_bytes
        text = b"".join(table[token] for token in token_ids if 0 <= token < len(table))
        if self._strips_first_space and text.startswith(b" "):
            text = text[1:]
        return text.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes that a token stands for; b"" for special ones and ids outside the vocabulary."""
        return self._token_bytes[token_id] if 0 <= token_id < self.vocab_size else b""

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_texts

    def token_id(self, text: str) -> int | None:
        """Id of the token that is spelled so in the vocabulary."""
        found: int | None = self._tokenizer.token_to_id(text)
        return found

    @property
    def special_texts(self) -> Mapping[int, str]:
        """Ids of the special tokens and their texts."""
        return self._special_texts

    @cached_property
    def special_pattern(self) -> re.Pattern[str]:
        """Matches the text of any special token, the longest where several begin at one place."""
        longest_first = sorted(filter(None, self._special_texts.values()), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    @property
    def backend(self) -> Tokenizer:
        """The library's tokenizer, for grammars and the like; not to be changed."""
        return self._tokenizer

    @cached_property
    def _plain_tokenizer(self) -> Tokenizer:
        # A second tokenizer, because the switch belongs to the object and other threads are using the first.
        plain = Tokenizer.from_str(self._tokenizer.to_str())
        plain.encode_special_tokens = True
        return plain

    @cached_property
    def _inner_tokenizer(self) -> Tokenizer:
        """The plain tokenizer for text that something precedes."""
        state = self._plain_tokenizer.to_str()
        inner_state = state.replace('"prepend_scheme":"first"', '"prepend_scheme":"never"')
        if inner_state == state:
            return self._plain_tokenizer
        inner = Tokenizer.from_str(inner_state)
        inner.encode_special_tokens = True
        return inner

    @cached_property
    def _unknown_id(self) -> int | None:
        unknown = getattr(self._tokenizer.model, "unk_token", None)
        return self.token_id(unknown) if unknown else None

    @classmethod
    def from_directory(cls, directory: Path) -> TextTokenizer:
        """Reads tokenizer.json, and tokenizer_config.json, generation_config.json, config.json where there.

        Raises TokenizerError.
        """
        path = directory / "tokenizer.json"
        label = f"{directory.name}/tokenizer.json"
        try:
            if path.stat().st_size > MAX_TOKENIZER_BYTES:
                raise TokenizerError(f"{label} is larger than {MAX_TOKENIZER_BYTES >> 20} MiB")
            tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise TokenizerError(f"{label} cannot be read: {error.strerror}") from None
        except TokenizerError:
            raise
        except Exception:  # the binding raises bare Exception for every fault
            raise TokenizerError(f"{label} is not a tokenizer") from None
        config = read_json(directory / "tokenizer_config.json")
        ids = {
            name: tokenizer.token_to_id(token_text(config.get(f"{name}_token"))) for name in ("bos", "eos")
        }
        stops = [
            token
            for file in ("generation_config.json", "config.json")
            for token in _as_ids(read_json(directory / file).get("eos_token_id"))
        ]
        eos_id = ids["eos"] if ids["eos"] is not None else next(iter(stops), None)
        prefix, suffix = _affixes(tokenizer)
        for flag, name in (("add_bos_token", "bos"), ("add_eos_token", "eos")):
            wanted, token = config.get(flag), ids[name]
            there = prefix if name == "bos" else suffix
            if wanted is True and token is not None and token not in there:
                there.insert(0, token)
            elif wanted is False and token in there:
                there.remove(token)
        return cls(
            tokenizer,
            bos_id=ids["bos"],
            eos_id=eos_id,
            stop_ids=stops,
            prefix_ids=prefix,
            suffix_ids=suffix,
        )


class Detokenizer:
    """Text of ids as they arrive; one a sequence, not shared between threads.

    A character whose bytes are not all there is held back. The texts add up to what `decode` makes of all the
    ids, but for an incomplete last character, which is dropped.
    """

    def __init__(self, tokenizer: TextTokenizer, skip_special_tokens: bool = True) -> None:
        self._table = tokenizer._token_bytes if skip_special_tokens else tokenizer._visible_bytes
        self._strip = tokenizer._strips_first_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_ids: Iterable[int]) -> str:
        """The text that these ids complete; may be empty."""
        table = self._table
        data = b"".join([table[token] for token in token_ids if 0 <= token < len(table)])
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def flush(self) -> str:
        """Ends the text: an incomplete character is dropped."""
        self._decoder.reset()
        return ""

    @property
    def held(self) -> bytes:
        """Bytes of a character that is not complete yet."""
        return self._decoder.getstate()[0]

    def fork(self) -> Detokenizer:
        """An independent copy at the same place."""
        copy = object.__new__(Detokenizer)
        copy._table, copy._strip = self._table, self._strip
        copy._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        copy._decoder.setstate(self._decoder.getstate())
        return copy


class _Spelling:
    """How a vocabulary spells bytes, read from the tokenizer's decoder."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        steps = _decoder_steps(tokenizer)
        kinds = {step["type"] for step in steps}
        self._bytes = byte_of_character() if "ByteLevel" in kinds else {}
        self._falls_back = "ByteFallback" in kinds
        self._replaced = [
            (step["pattern"]["String"], step["content"])
            for step in steps
            if step["type"] == "Replace" and "String" in step["pattern"]
        ]
        metaspace = [step for step in steps if step["type"] == "Metaspace"]
        self._replaced += [(step["replacement"], " ") for step in metaspace]
        strips = any(step["type"] == "Strip" and step["start"] and step["content"] == " " for step in steps)
        self.strips_first_space = strips or any(step["prepend_scheme"] != "never" for step in metaspace)
        supported = {"ByteLevel", "ByteFallback", "Replace", "Metaspace", "Strip", "Fuse"}
        if kinds - supported or not kinds & {"ByteLevel", "ByteFallback", "Metaspace", "Replace"}:
            names = ", ".join(sorted(kinds)) or "none"
            raise TokenizerError(f"the tokenizer's decoder ({names}) is not supported")

    def bytes_of(self, text: str) -> bytes:
        if self._bytes:
            found = [self._bytes.get(character) for character in text]
            spelled = [byte for byte in found if byte is not None]
            return bytes(spelled) if len(spelled) == len(found) else text.encode()
        byte = BYTE_TOKEN.fullmatch(text) if self._falls_back else None
        if byte:
            return bytes([int(byte[1], 16)])
        for old, new in self._replaced:
            text = text.replace(old, new)
        return text.encode()


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    if tokenizer.decoder is None:
        return []
    state: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    return steps


def _affixes(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """What the file's own post-processing puts before and after a text."""
    encoding = tokenizer.encode("a", add_special_tokens=True)
    mask = encoding.special_tokens_mask
    inner = [index for index, added in enumerate(mask) if not added] or [len(mask)]
    return list(encoding.ids[: inner[0]]), list(encoding.ids[inner[-1] + 1 :])


def _as_ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [token for token in values if isinstance(token, int) and not isinstance(token, bool)]


def token_text(value: object) -> str:
    """The text of a token in a configuration: a string, or an object with its content; else ""."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a model's directory, empty if the file is absent. Raises TokenizerError."""
    label = f"{path.parent.name}/{path.name}"
    if not path.exists():
        return {}
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise TokenizerError(f"{label} is larger than {MAX_JSON_BYTES >> 20} MiB")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise TokenizerError(f"{label} cannot be read: {error.strerror}") from None
    except TokenizerError:
        raise
    except (ValueError, RecursionError):
        raise TokenizerError(f"{label} is not valid JSON") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{label} is not a JSON object")
    return value
