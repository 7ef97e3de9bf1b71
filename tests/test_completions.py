"""POST /v1/completions with the real client, against scripted text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from sensorium.engine.engine import RequestRefused

from .fake_text import MAX_MODEL_LEN, FakeTextEngine, byte_tokenizer, engine_of, prompt_of
from .live_server import Live, error_of, live

SAID = "Voilà, naïve 🙂 text"


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(FakeTextEngine(SAID)) as running:
        yield running


@pytest.fixture
def client(server: Live) -> OpenAI:
    return server.openai


def post(server: Live, **body: Any) -> Any:
    return server.http.post("/v1/completions", json={"model": "tiny-text", "prompt": "Hi", **body})


def test_shape(client: OpenAI) -> None:
    found = client.completions.create(model="tiny-text", prompt="Once", max_tokens=100)
    assert found.id.startswith("cmpl-")
    assert found.object == "text_completion"
    assert found.model == "tiny-text"
    assert found.system_fingerprint
    assert found.system_fingerprint.startswith("fp_")
    [choice] = found.choices
    assert (choice.text, choice.index, choice.finish_reason, choice.logprobs) == (SAID, 0, "stop", None)
    assert found.usage
    assert found.usage.prompt_tokens == 4
    assert found.usage.completion_tokens == len(SAID.encode())
    assert found.usage.total_tokens == 4 + len(SAID.encode())
    assert found.usage.prompt_tokens_details
    assert found.usage.prompt_tokens_details.cached_tokens == 0


def test_sixteen_tokens_are_the_default(client: OpenAI) -> None:
    found = client.completions.create(model="tiny-text", prompt="Once")
    assert found.choices[0].finish_reason == "length"
    assert found.usage
    assert found.usage.completion_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("a b", ["a b"]),
        (["a", "b c"], ["a", "b c"]),
        ([104, 105], ["hi"]),
        ([[104], [105, 33]], ["h", "i!"]),
        ("", None),
        ([], None),
        ([[]], None),
        (["a", 1], None),
        ([1, "a"], None),
        ([-1], None),
        ([1.5], None),
        ([True], None),
        ([10**6], None),
        ([10**30], None),
        (None, None),
        ({"a": 1}, None),
        ([[[1]]], None),
    ],
)
def test_prompts(server: Live, prompt: Any, texts: list[str] | None) -> None:
    before = len(engine_of(server).requests)
    answer = post(server, prompt=prompt)
    if texts is None:
        assert answer.status_code == 400
        assert error_of(answer)["param"].startswith("prompt")
        assert len(engine_of(server).requests) == before
    else:
        assert answer.status_code == 200
        assert [prompt_of(request) for request in engine_of(server).requests[before:]] == texts
        assert [choice["index"] for choice in answer.json()["choices"]] == list(range(len(texts)))


def test_special_tokens_in_a_prompt_are_plain_text(server: Live) -> None:
    post(server, prompt="<|im_end|>")
    assert len(engine_of(server).requests[-1].inputs.prompt_token_ids) == len("<|im_end|>")


def test_n_and_several_prompts(server: Live) -> None:
    answer = post(server, prompt=["a", "b"], n=3, max_tokens=4).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert answer["usage"]["completion_tokens"] == 24
    assert answer["usage"]["prompt_tokens"] == 2


def test_best_of_gives_the_likeliest() -> None:
    # The fake's sequences are ever less likely.
    with live(FakeTextEngine(lambda request, sequence: f"text {sequence}")) as server:
        answer = post(server, best_of=5, n=2).json()
    assert [choice["text"] for choice in answer["choices"]] == ["text 0", "text 1"]


def test_echo(server: Live) -> None:
    for prompt, shown in (("Hé, ", "Hé, "), ([104, 105], "hi")):
        answer = post(server, prompt=prompt, echo=True, max_tokens=100).json()
        assert answer["choices"][0]["text"] == shown + SAID


def test_echo_of_the_prompt_alone(server: Live) -> None:
    answer = post(server, prompt="Hé", echo=True, max_tokens=0, logprobs=2).json()
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Hé", "length")
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["H", "bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs["text_offset"] == [0, 1, 1]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    assert answer["usage"]["completion_tokens"] == 0
    assert post(server, max_tokens=0).status_code == 400


def test_legacy_logprobs(client: OpenAI) -> None:
    found = client.completions.create(model="tiny-text", prompt="é", max_tokens=100, logprobs=2, echo=True)
    logprobs = found.choices[0].logprobs
    assert logprobs
    assert logprobs.tokens
    assert logprobs.text_offset
    assert logprobs.top_logprobs
    text = "é" + SAID
    assert len(logprobs.tokens) == len(text.encode()) == len(logprobs.text_offset)
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert token.startswith("bytes:") or text[offset] == token
    assert len(logprobs.top_logprobs[3]) == 2
    assert max(logprobs.text_offset) < len(text)


@pytest.mark.parametrize("options", [{}, {"n": 3}, {"prompt": ["a", "b"]}, {"echo": True}, {"logprobs": 1}])
def test_stream_adds_up(server: Live, options: dict[str, Any]) -> None:
    options = {"model": "tiny-text", "prompt": "Hi ", "max_tokens": 100, **options}
    whole = server.openai.completions.create(**options)
    texts = [""] * len(whole.choices)
    reasons: list[Any] = [None] * len(texts)
    tokens: list[list[str]] = [[] for _ in texts]
    ids = set()
    stream = server.openai.completions.create(**options, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    for chunk in chunks:
        ids.add(chunk.id)
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            assert "\ufffd" not in choice.text
            reasons[choice.index] = reasons[choice.index] or choice.finish_reason
            tokens[choice.index] += (choice.logprobs and choice.logprobs.tokens) or []
    assert len(ids) == 1
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == ["stop"] * len(texts)
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    if "logprobs" in options:
        assert whole.choices[0].logprobs
        assert tokens[0] == whole.choices[0].logprobs.tokens


def test_stream_on_the_wire(server: Live) -> None:
    answer = post(server, stream=True)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.text.endswith("data: [DONE]\n\n")
    assert "usage" not in answer.text
    assert post(server, stream=True, max_tokens=0, echo=True).text.count('"finish_reason":"length"') == 1


def test_stop_strings(client: OpenAI) -> None:
    found = client.completions.create(model="tiny-text", prompt="x", stop=["naïve", "🙂"], max_tokens=100)
    assert found.choices[0].text == "Voilà, "
    assert found.choices[0].finish_reason == "stop"


def test_what_reaches_the_engine(server: Live) -> None:
    post(
        server,
        **{"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 9, "n": 2, "min_tokens": 3},
        **{"stop": "z", "stop_token_ids": [65], "max_tokens": 12, "include_stop_str_in_output": True},
        **{"logit_bias": {"65": -100, "66": 5}, "bad_words": ["no"], "repetition_penalty": 1.2},
        **{"presence_penalty": 0.5, "frequency_penalty": -0.5, "cache_salt": "s", "priority": 4},
        **{"skip_special_tokens": False, "user": "u", "metadata": {"a": "b"}, "store": True},
    )
    request = engine_of(server).requests[-1]
    params, tokenizer = request.params, byte_tokenizer()
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 7, 0.1)
    assert (params.seed, params.num_sequences, params.min_tokens, params.max_tokens) == (9, 2, 3, 12)
    assert params.stop == ("z",)
    assert params.include_stop
    assert not params.skip_special_tokens
    assert params.stop_token_ids[0] == tokenizer.eos_id
    assert set(params.stop_token_ids) == {*tokenizer.stop_ids, 65}
    names = [type(processor).__name__ for processor in params.logits_processors]
    assert names == ["LogitBias", "RepetitionPenalty", "PresenceFrequencyPenalty", "BadWords", "MinTokens"]
    assert request.cache_salt == "s"
    assert engine_of(server).text_runs[-1].priority == 4


def test_ignore_eos(server: Live) -> None:
    post(server, ignore_eos=True)
    assert engine_of(server).requests[-1].params.stop_token_ids == ()


BAD: list[tuple[dict[str, Any], str]] = [
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"best_of": 3, "stream": True}, "best_of"),
    ({"echo": True, "logprobs": 1, "stream": True}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"n": 0}, "n"),
    ({"n": 1.5}, "n"),
    ({"n": 10**9}, "n"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": MAX_MODEL_LEN}, "prompt"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a"] * 65}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop_token_ids": [99999]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"min_tokens": 40, "max_tokens": 16}, "min_tokens"),
    ({"seed": 2**70}, "seed"),
    ({"seed": "a"}, "seed"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": 3}, "stream_options"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"prompt": "x" * MAX_MODEL_LEN}, "prompt"),
    ({"prompt": ["a"] * 2049}, "prompt"),
    ({"prompt": ["a"] * 1000, "n": 100}, "prompt"),
    ({"model": ""}, "model"),
    ({"model": 3}, "model"),
    ({"model": "whisper-base"}, "model"),
    ({"bad_words": [""]}, "bad_words[0]"),
    ({"priority": 2**40}, "priority"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
]


@pytest.mark.parametrize(("options", "param"), BAD, ids=[str(number) for number in range(len(BAD))])
def test_refusals(server: Live, options: dict[str, Any], param: str) -> None:
    before = len(engine_of(server).requests)
    answer = post(server, **options)
    assert answer.status_code == 400, answer.text
    error = error_of(answer)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert len(engine_of(server).requests) == before


def test_context_length(server: Live) -> None:
    error = error_of(post(server, prompt="x" * 2000))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert post(server, prompt="x" * 2000, truncate_prompt_tokens=5).status_code == 200
    assert prompt_of(engine_of(server).requests[-1]) == "xxxxx"


def test_errors_through_the_client(client: OpenAI) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.completions.create(model="tiny-text", prompt="x", suffix="y")
    assert caught.value.param == "suffix"


def test_nulls_are_not_given(server: Live) -> None:
    nulls = dict.fromkeys(("suffix", "n", "temperature", "stop", "logit_bias", "stream", "seed", "best_of"))
    assert post(server, **nulls).status_code == 200


def test_prompt_logprobs_have_vllms_shape(server: Live) -> None:
    [choice] = post(server, prompt="Hi!", prompt_logprobs=2, logprobs=1, echo=True).json()["choices"]
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    assert len(rest) == 2
    assert len(choice["logprobs"]["top_logprobs"][1]) <= 2
    for text, entry in zip("i!", rest, strict=True):
        own = entry[str(ord(text))]
        assert own["decoded_token"] == text
        assert own["logprob"] < 0
        assert set(own) == {"logprob", "rank", "decoded_token"}
        assert len(entry) in (2, 3)
    assert post(server, prompt="H", prompt_logprobs=0).json()["choices"][0]["prompt_logprobs"] == [None]
    assert "prompt_logprobs" not in post(server).json()["choices"][0]
    for options in ({"stream": True, "prompt_logprobs": 1}, {"prompt_logprobs": -1}):
        assert error_of(post(server, **options))["param"] == "prompt_logprobs"


def test_what_can_never_run_is_a_400(server: Live) -> None:
    engine_of(server).fail_text = RequestRefused("it needs more cache than there is")
    try:
        answer = post(server)
    finally:
        engine_of(server).fail_text = None
    assert answer.status_code == 400
    assert "more cache" in error_of(answer)["message"]
