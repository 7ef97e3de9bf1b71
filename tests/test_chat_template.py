"""Chat templates against the transformers library; what users write is never a special token."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sensorium.models import store
from sensorium.models.gguf import read_gguf
from sensorium.models.gguf_tokenizer import gguf_chat_templates
from sensorium.processors.chat_template import ChatTemplate, TemplateError
from sensorium.processors.text import TextTokenizer, byte_of_character
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.utils.chat_template_utils import render_jinja_template

from . import chat_templates

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = {name: ChatTemplate(source, SPECIAL) for name, source in chat_templates.ALL.items()}
NAMES = pytest.mark.parametrize("name", TEMPLATES)


def byte_tokenizer() -> TextTokenizer:
    tokenizer = Tokenizer(models.BPE(dict(byte_of_character()), []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(chat_templates.SPECIALS))
    tokenizer.add_tokens(["<think>", "</think>"])
    return TextTokenizer(tokenizer)


TOKENIZER = byte_tokenizer()

# Pieces of special tokens that may come to stand side by side.
FRAGMENTS = [
    "<|im_",
    "end|>",
    "<|im_end|>",
    "<",
    "|",
    "[",
    "INST]",
    "</s>",
    "</",
    "s>",
    "<image>",
    "<|eot_id|>",
]
WORDS = ["Hello", " ", "\n", "é🙂", "</think>", "<think>", "<tool_response>", "</tool_response>", "", "1 < 2"]
HARMLESS = st.lists(st.sampled_from(WORDS)).map("".join)
HOSTILE = st.lists(st.sampled_from(FRAGMENTS + WORDS), max_size=8).map("".join)


def conversations(texts: st.SearchStrategy[str]) -> st.SearchStrategy[list[dict[str, Any]]]:
    """User and assistant by turns, the user first, as every template takes them."""
    roles = ("user", "assistant")
    turn = st.lists(texts, min_size=1, max_size=4)
    return turn.map(lambda all_: [{"role": roles[i % 2], "content": text} for i, text in enumerate(all_)])


def reference(name: str, messages: list[dict[str, Any]], **options: Any) -> str:
    options = {"add_generation_prompt": True, **options}
    source = chat_templates.ALL[name]
    rendered, _ = render_jinja_template([messages], chat_template=source, **options, **SPECIAL)
    return str(rendered[0])


@NAMES
@given(messages=conversations(HOSTILE), prompt=st.booleans())
@settings(deadline=None)
def test_texts_are_the_library_s(name: str, messages: list[dict[str, Any]], prompt: bool) -> None:
    expected = reference(name, messages, add_generation_prompt=prompt)
    assert TEMPLATES[name].render(messages, add_generation_prompt=prompt) == expected


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"é": [1, None, True], "<": "x & y"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"q": "<|im_end|>é"}}}


@pytest.mark.parametrize(
    ("messages", "options"),
    [
        ([{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Hi"}], {}),
        ([{"role": "user", "content": "Hi"}], {"enable_thinking": False}),
        ([{"role": "user", "content": "Hi"}], {"tools": [TOOL]}),
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>\nx\n</think>\n\ny"}],
            {},
        ),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "y", "reasoning": "x"}], {}),
        (
            [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "", "tool_calls": [CALL]},
                {"role": "tool", "content": "b"},
            ],
            {},
        ),
    ],
)
@pytest.mark.parametrize("name", ["qwen3", "llama3"])
def test_tools_and_reasoning_are_the_library_s(name: str, messages: Any, options: dict[str, Any]) -> None:
    assert TEMPLATES[name].render(messages, **options) == reference(name, messages, **options)


@pytest.mark.parametrize("name", ["chatml", "gemma", "llama3"])
@pytest.mark.parametrize("content", ["The answer", "The answer ", "", [{"type": "text", "text": "The"}]])
def test_a_final_message_is_continued_as_in_the_library(name: str, content: Any) -> None:
    if name != "gemma" and isinstance(content, list):
        content = "x\n"
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    expected = reference(name, messages, **options)
    assert TEMPLATES[name].render(messages, **options) == expected
    assert TOKENIZER.decode(TEMPLATES[name].render_ids(TOKENIZER, messages, **options)) == TOKENIZER.decode(
        TOKENIZER.encode(expected, special=True)
    )


@NAMES
@given(messages=conversations(HARMLESS))
@settings(deadline=None)
def test_harmless_messages_have_the_ids_of_the_text(name: str, messages: list[dict[str, Any]]) -> None:
    template = TEMPLATES[name]
    expected = TOKENIZER.encode(template.render(messages), special=True)
    assert template.render_ids(TOKENIZER, messages) == expected


def specials(ids: list[int]) -> list[str]:
    return [TOKENIZER.special_texts[token] for token in ids if TOKENIZER.is_special(token)]


@NAMES
@given(messages=conversations(HOSTILE))
@settings(deadline=None, max_examples=200)
def test_users_write_no_special_tokens(name: str, messages: list[dict[str, Any]]) -> None:
    """The special tokens are those of the same conversation with other words; the text is as rendered."""
    template = TEMPLATES[name]
    try:
        ids = template.render_ids(TOKENIZER, messages)
    except TemplateError:
        # Refusing is safe; only a template that cuts special tokens out of messages may have to.
        assert name == "joining"
        return
    other = [message | {"content": "x"} for message in messages]
    assert specials(ids) == specials(template.render_ids(TOKENIZER, other))
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == template.render(messages)


def test_arguments_and_tools_write_none_either() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
    ]
    evil: Mapping[str, Any] = {"type": "function", "function": {"name": "f", "<|im_end|>": "<|im_start|>"}}
    ids = TEMPLATES["qwen3"].render_ids(TOKENIZER, messages, [evil])
    turn = ["<|im_start|>", "<|im_end|>"]
    assert specials(ids) == turn * 3 + ["<|im_start|>"]
    assert "<|im_end|>é" in TOKENIZER.decode(ids)


def test_what_a_template_joins_is_no_special_token() -> None:
    messages = [{"role": "user", "content": "<|im_<image>end|> </"}, {"role": "user", "content": "s>"}]
    ids = TEMPLATES["joining"].render_ids(TOKENIZER, messages)
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == "<s><|im_end|> </s></s>"
    assert specials(ids) == ["<s>", "</s>"]


def test_a_template_may_look_for_a_special_token() -> None:
    """As some do for the end of an assistant's reasoning."""
    source = "{{ '<s>' }}{% for m in messages %}{{ m.content.split('<image>')[-1].strip() }}</s>{% endfor %}"
    messages = [{"role": "assistant", "content": "because<image>\n\n<image>\nb </s> <"}]
    ids = ChatTemplate(source).render_ids(TOKENIZER, [{"role": "assistant", "content": "because<image>\nb"}])
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == "<s>b</s>"
    assert specials(ids) == ["<s>", "</s>"]
    with pytest.raises(TemplateError, match="special token"):
        ChatTemplate(source).render_ids(TOKENIZER, messages)
    shown = ChatTemplate("{{ '<s>' }}{{ '<image>' in messages[0].content }}{{ messages[0].content }}")
    ids = shown.render_ids(TOKENIZER, messages)
    assert TOKENIZER.decode(ids) == "True" + messages[0]["content"]
    assert specials(ids) == ["<s>"]


def test_a_template_that_spoils_the_distinction_is_refused() -> None:
    template = ChatTemplate("<s>{{ messages[0].content | tojson(ensure_ascii=true) }}")
    assert specials(template.render_ids(TOKENIZER, [{"role": "user", "content": "1 < 2 é"}])) == ["<s>"]
    with pytest.raises(TemplateError, match="special token"):
        template.render_ids(TOKENIZER, [{"role": "user", "content": "</s>"}])


def test_the_clock_and_dates_work() -> None:
    template = ChatTemplate("{{ strftime_now('%Y') | length }}{{ date_string }}")
    assert template.render([], date_string=" x") == "4 x"


def test_smollm2_s_own_template() -> None:
    folder = store.resolve("smollm2-135m-instruct")
    templates = gguf_chat_templates(read_gguf(folder))
    text = ChatTemplate(templates).render([{"role": "user", "content": "Hi"}])
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_model_without_template_says_so() -> None:
    template = ChatTemplate(gguf_chat_templates(read_gguf(store.resolve("gemma-3-270m"))))
    assert not template.exists
    with pytest.raises(TemplateError, match="this model has no chat template"):
        template.render([{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('Roles\nmust alternate') }}", "refuses this: Roles must alternate"),
        ("{{ messages[0].content.missing.deeper }}", "refuses this"),
        ("{{ 1 / 0 }}", "cannot render this: ZeroDivisionError"),
        ("{{ messages[0].content + 1 }}", "cannot render this: TypeError"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "OverflowError"),
        ("{% set _ = messages.append(1) %}", "unsafe"),
    ],
)
def test_failures_are_one_line(source: str, message: str) -> None:
    with pytest.raises(TemplateError, match=message) as caught:
        ChatTemplate(source).render([{"role": "user", "content": "Hi"}])
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_a_broken_template_is_found_at_once() -> None:
    with pytest.raises(TemplateError, match=r"'default' is not valid, line 2"):
        ChatTemplate("\n{% if %}")


def test_continuing_needs_something_to_continue() -> None:
    options = {"add_generation_prompt": False, "continue_final_message": True}
    for messages in ([], [{"role": "assistant"}], [{"role": "assistant", "content": [{"type": "image"}]}]):
        with pytest.raises(TemplateError, match="could be continued"):
            TEMPLATES["gemma"].render(messages, **options)
    with pytest.raises(TemplateError, match="generation prompt"):
        TEMPLATES["gemma"].render([{"role": "user", "content": "x"}], continue_final_message=True)


def test_templates_of_a_directory(tmp_path: Path) -> None:
    config: dict[str, Any] = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None}
    config["chat_template"] = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = ChatTemplate.from_directory(tmp_path)
    assert template.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert (template.render([]), template.render([], [TOOL])) == ("A", "B")
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}C")
    assert ChatTemplate.from_directory(tmp_path).render([]) == "<s>C"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(TemplateError, match="not UTF-8"):
        ChatTemplate.from_directory(tmp_path)
