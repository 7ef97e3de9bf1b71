"""Log-probabilities in the two shapes of OpenAI's API."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from ..models.base import TextTokenizer, TokenLogprob

LEAST = -9999.0  # stands for minus infinity, which JSON does not have


def finite(logprob: float) -> float:
    return max(logprob, LEAST) if not math.isnan(logprob) else LEAST


def bytes_of(tokenizer: TextTokenizer, token_id: int) -> bytes:
    """A token's bytes; a special token's are those of its name."""
    found = tokenizer.token_bytes(token_id)
    return found or tokenizer.decode([token_id], skip_special_tokens=False).encode()


def chat_logprobs(tokenizer: TextTokenizer, tokens: Iterable[TokenLogprob]) -> dict[str, Any]:
    """The `logprobs` of a chat choice. The likeliest tokens are those that the engine was asked for."""
    content = [
        {
            **_entry(tokenizer, token.token_id, token.logprob),
            "top_logprobs": [_entry(tokenizer, *pair) for pair in token.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _entry(tokenizer: TextTokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    data = bytes_of(tokenizer, token_id)
    return {"token": data.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(data)}


class LegacyLogprobs:
    """The `logprobs` of a completion choice, in pieces. Offsets count characters of the choice's text."""

    def __init__(self, tokenizer: TextTokenizer, top: int) -> None:
        """top: how many of the likeliest tokens were asked for."""
        self._tokenizer = tokenizer
        self._top = top
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, tokens: Sequence[TokenLogprob | int]) -> dict[str, Any]:
        """A plain id stands for the first token of a prompt, which nothing predicts."""
        texts: list[str] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token in tokens:
            token_id = token if isinstance(token, int) else token.token_id
            data = bytes_of(self._tokenizer, token_id)
            texts.append(_legacy_text(data))
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(data))
            if isinstance(token, int):
                logprobs.append(None)
                tops.append(None)
            else:
                logprobs.append(finite(token.logprob))
                tops.append(self._likeliest(token))
        top_logprobs = tops if self._top else None
        return {
            "tokens": texts,
            "token_logprobs": logprobs,
            "top_logprobs": top_logprobs,
            "text_offset": offsets,
        }

    def _likeliest(self, token: TokenLogprob) -> dict[str, float]:
        found: dict[str, float] = {}
        for token_id, logprob in (*token.top, (token.token_id, token.logprob)):
            # Different ids may read alike; the likelier one comes first.
            found.setdefault(_legacy_text(bytes_of(self._tokenizer, token_id)), finite(logprob))
        return found


def _legacy_text(data: bytes) -> str:
    """A token's text, or its bytes spelled out where they are no text by themselves."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def prompt_logprobs(token_ids: Sequence[int], probe: Tensor | None, top: int) -> list[TokenLogprob | int]:
    """A prompt's tokens as models.logits.PromptLogprobs reduced them, its first one as a plain id.

    top: how many of the likeliest to give, at most as many as the probe has.
    """
    rows = [] if probe is None else probe.tolist()
    found: list[TokenLogprob | int] = list(token_ids[:1])
    for token_id, row in zip(token_ids[1:], rows, strict=True):
        found.append(TokenLogprob(token_id, row[0], tuple(_best(row, top))))
    return found


def _best(row: Sequence[float], top: int) -> Iterable[tuple[int, float]]:
    """The likeliest (id, logprob) pairs of a row of the probe."""
    held = (len(row) - 2) // 2
    return ((int(row[2 + place]), row[2 + held + place]) for place in range(top))


def ranked_prompt(
    tokenizer: TextTokenizer, token_ids: Sequence[int], probe: Tensor | None, top: int
) -> list[dict[str, Any] | None]:
    """`prompt_logprobs` in vLLM's shape: null for the first token, then id → {logprob, rank, decoded_token}
    of the likeliest tokens and of the prompt's own."""
    found: list[dict[str, Any] | None] = [None]
    for token_id, row in zip(token_ids[1:], [] if probe is None else probe.tolist(), strict=True):
        own = (token_id, row[0], int(row[1]))
        best = [(chosen, logprob, rank) for rank, (chosen, logprob) in enumerate(_best(row, top), 1)]
        found.append({str(chosen): _ranked(tokenizer, chosen, *rest) for chosen, *rest in (*best, own)})
    return found


def _ranked(tokenizer: TextTokenizer, token_id: int, logprob: float, rank: float) -> dict[str, Any]:
    text = bytes_of(tokenizer, token_id).decode("utf-8", "replace")
    return {"logprob": finite(logprob), "rank": int(rank), "decoded_token": text}
