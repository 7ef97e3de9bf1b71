from __future__ import annotations

import math

import orjson
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sensorium.models.base import TokenLogprob
from sensorium.models.logits import PromptLogprobs
from sensorium.server.logprobs import LegacyLogprobs, chat_logprobs, prompt_logprobs

from .fake_text import byte_tokenizer

TOKENIZER = byte_tokenizer()
END = 258


def test_special_tokens_have_their_names() -> None:
    [entry] = chat_logprobs(TOKENIZER, [TokenLogprob(END, -1.0)])["content"]
    assert entry["token"] == "<|im_end|>"
    assert bytes(entry["bytes"]) == b"<|im_end|>"


def test_what_json_does_not_have() -> None:
    found = chat_logprobs(TOKENIZER, [TokenLogprob(65, -math.inf, ((66, -math.inf), (67, math.nan)))])
    assert orjson.loads(orjson.dumps(found))["content"][0]["logprob"] == -9999.0
    assert [pair["logprob"] for pair in found["content"][0]["top_logprobs"]] == [-9999.0, -9999.0]


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), st.data())
def test_offsets_do_not_depend_on_the_pieces(text: str, data: st.DataObject) -> None:
    tokens = [TokenLogprob(token, -1.0, ((token, -1.0),)) for token in TOKENIZER.encode(text)]
    whole = LegacyLogprobs(TOKENIZER, 1).push(tokens)
    cut = data.draw(st.integers(0, len(tokens)))
    pieces = LegacyLogprobs(TOKENIZER, 1)
    first, second = pieces.push(tokens[:cut]), pieces.push(tokens[cut:])
    assert whole == {key: first[key] + second[key] for key in whole}
    for token, offset in zip(whole["tokens"], whole["text_offset"], strict=True):
        assert token.startswith("bytes:") or text[offset] == token


def test_the_chosen_token_is_among_the_likeliest() -> None:
    [likeliest] = LegacyLogprobs(TOKENIZER, 1).push([TokenLogprob(65, -3.0, ((66, -0.1),))])["top_logprobs"]
    assert likeliest == {"B": -0.1, "A": -3.0}
    assert LegacyLogprobs(TOKENIZER, 0).push([TokenLogprob(65, -3.0)])["top_logprobs"] is None


def test_prompt_logprobs_are_those_of_the_logits() -> None:
    ids = (5, 9, 7)
    logits = torch.randn(2, 20, generator=torch.Generator().manual_seed(0))
    first, second, third = prompt_logprobs(ids, PromptLogprobs(ids, 2).reduce(range(2), logits), 2)
    expected = logits.log_softmax(-1)
    assert first == 5
    for found, row, token in ((second, 0, 9), (third, 1, 7)):
        assert isinstance(found, TokenLogprob)
        assert found.token_id == token
        assert abs(found.logprob - float(expected[row, token])) < 1e-5
        assert [pair[0] for pair in found.top] == expected[row].topk(2).indices.tolist()
    assert prompt_logprobs((5,), None, 2) == [5]
