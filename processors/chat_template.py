"""Chat templates: messages → the prompt that a model was trained on, as text and as token ids.

Templates are Jinja programs out of model files, run in a sandbox with the globals and filters that the
transformers library gives them, so that they render alike.

What users wrote never becomes a special token. Texts alone cannot show who wrote `<|im_end|>`, so the
messages are rendered twice: as they are, and with private-use characters put into every special token of theirs,
whole or begun. Special tokens that are whole and unmarked in the second rendering are the template's.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .text import TextTokenizer, read_json, token_text

MAX_TEMPLATE_BYTES = 1 << 20
MAX_MESSAGE_LENGTH = 300
DEFAULT, TOOL_USE = "default", "tool_use"
CONTINUE_TAG = "\uf8f0continue\uf8f1 "  # ends in a space, which shows whether the template trims
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

Messages = Sequence[Mapping[str, Any]]


class TemplateError(ValueError):
    """Messages that the model's template does not take, or no usable template; one line for users."""


class _Generation(jinja2.ext.Extension):
    """{% generation %} … {% endgeneration %} marks an assistant's words for training; here it does nothing."""

    tags = {"generation"}  # noqa: RUF012  (declared so by the base class)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes HTML's characters."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """The templates of one model by name: "default", and "tool_use" for requests with tools where there is one.

    Immutable, safe to share between threads. Without any template, rendering raises TemplateError.
    """

    def __init__(
        self, templates: str | Mapping[str, str], special_tokens: Mapping[str, str] | None = None
    ) -> None:
        """special_tokens: texts by name (bos_token, eos_token, …) that templates may use.

        Raises TemplateError for a template that is not valid.
        """
        self.sources = {DEFAULT: templates} if isinstance(templates, str) else dict(templates)
        self.special_tokens = dict(special_tokens or {})
        environment = _environment()
        self._templates = {}
        self._literals: dict[str, frozenset[str]] = {}
        for name, source in self.sources.items():
            try:
                self._templates[name] = environment.from_string(source)
                constants = environment.parse(source).find_all(jinja2.nodes.Const)
            except jinja2.TemplateSyntaxError as error:
                line = f"line {error.lineno}: {_one_line(error.message or '')}"
                raise TemplateError(f"the chat template {name!r} is not valid, {line}") from None
            except (RecursionError, ValueError, OverflowError):
                raise TemplateError(f"the chat template {name!r} is not valid") from None
            self._literals[name] = frozenset(node.value for node in constants if isinstance(node.value, str))

    @cached_property
    def exists(self) -> bool:
        return bool(self._templates)

    @classmethod
    def from_directory(cls, directory: Path) -> ChatTemplate:
        """chat_template.jinja, additional_chat_templates/*.jinja, and what tokenizer_config.json holds.

        Raises TemplateError, or TokenizerError for a damaged tokenizer_config.json.
        """
        config = read_json(directory / "tokenizer_config.json")
        templates = dict(_configured(config.get("chat_template")))
        single = read_json(directory / "chat_template.json").get("chat_template")
        templates |= dict(_configured(single))
        files = [(DEFAULT, directory / "chat_template.jinja")]
        files += [(path.stem, path) for path in sorted(directory.glob("additional_chat_templates/*.jinja"))]
        for name, path in files:
            if path.exists():
                templates[name] = _read(path)
        special = {name: token_text(config.get(name)) for name in SPECIAL_NAMES}
        return cls(templates, {name: text for name, text in special.items() if text})

    def _name(self, tools: Sequence[Any] | None) -> str:
        if not self._templates:
            raise TemplateError("this model has no chat template, so it cannot chat: use completions")
        if tools and TOOL_USE in self._templates:
            return TOOL_USE
        if DEFAULT in self._templates:
            return DEFAULT
        if len(self._templates) == 1:
            return next(iter(self._templates))
        raise TemplateError(
            f"this model has several chat templates and no default: {sorted(self._templates)}"
        )

    def render(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt as text. Values of messages are JSON's; None counts as absent; kwargs go to the template.

        continue_final_message: the prompt ends inside the last message, which the model continues.
        Raises TemplateError.
        """
        if continue_final_message and add_generation_prompt:
            raise TemplateError("a final message can be continued only without a generation prompt")
        name = self._name(tools)
        chat = [_prepared(message) for message in messages]
        if continue_final_message:
            chat = _tagged(chat)
        values = {
            **self.special_tokens,
            **kwargs,
            "messages": chat,
            "tools": list(tools) if tools is not None else None,
            "documents": kwargs.get("documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._templates[name].render(values)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template refuses this: {_one_line(str(error))}") from None
        except Exception as error:  # whatever a template's own code runs into
            what = f"{type(error).__name__}: {_one_line(str(error))}"
            raise TemplateError(f"the chat template cannot render this: {what}") from None
        return _continued(text) if continue_final_message else text

    def render_ids(
        self,
        tokenizer: TextTokenizer,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> list[int]:
        """The prompt as ids: special tokens of the template as such, those in messages and tools as plain text.

        Without special tokens in the messages these are the ids of the rendered text. The roles of messages
        are not looked at: they are for the caller to check.
        Raises TemplateError, also if a message holds a special token's text and the template changes messages
        in such a way that it cannot be told from the template's own.
        """
        options = (add_generation_prompt, continue_final_message)
        text = self.render(messages, tools, *options, **kwargs)
        markers = _markers(text, messages, tools, kwargs, self.sources)
        breaker = _Breaker(tokenizer, markers, self._literals[self._name(tools)])
        marked_messages = [breaker.message(message) for message in messages]
        marked_tools = None if tools is None else breaker.value(tools)
        marked_kwargs = breaker.value(kwargs)
        if (marked_messages, marked_tools, marked_kwargs) == (list(messages), tools, kwargs):
            return tokenizer.encode(text, special=True)
        marked = self.render(marked_messages, marked_tools, *options, **marked_kwargs)
        own = list(_own_spans(tokenizer, marked, markers))
        spans = [match.span() for match in tokenizer.special_pattern.finditer(text)]
        clean = marked.translate(dict.fromkeys(map(ord, markers)))
        if clean == text:
            is_whole = own == spans
            return tokenizer.encode(text, special=True) if is_whole else tokenizer.encode_parts(text, own)
        # The template looked at what was marked. It does not matter where users wrote no special token.
        if [clean[slice(*span)] for span in own] != [text[slice(*span)] for span in spans]:
            raise TemplateError("a message holds the text of a special token, which this model cannot take")
        return tokenizer.encode(text, special=True)


class _Breaker:
    """Marks users' strings so that no special token of theirs is whole, or is marked as theirs.

    After each character that could begin a special token comes the first marker. Not where the string goes on
    as one of the template's own literals ("</think>"), which the template may look for: these stay whole, and
    if they are special tokens themselves, they get the second marker before and the third behind them.
    """

    def __init__(self, tokenizer: TextTokenizer, markers: Sequence[str], literals: frozenset[str]) -> None:
        texts = [text for text in tokenizer.special_texts.values() if text]
        self._breaker, self._before, self._behind = markers
        self._firsts = frozenset(text[0] for text in texts)
        looked_for = sorted((lit for lit in literals if lit[:1] in self._firsts), key=len, reverse=True)
        self._special = tuple(lit for lit in looked_for if lit in texts)
        # A literal that begins as a special token, or the other way round, could be one half of it.
        others = (lit for lit in looked_for if lit not in self._special and len(lit) > 1)
        self._plain = tuple(
            lit for lit in others if not any(text.startswith(lit) or lit.startswith(text) for text in texts)
        )

    def string(self, text: str) -> str:
        if self._firsts.isdisjoint(text):
            return text
        pieces = []
        index = 0
        while index < len(text):
            special = ""
            if text[index] in self._firsts:
                special = next((token for token in self._special if text.startswith(token, index)), "")
            if special:
                pieces.append(self._before + special + self._behind)
            elif text[index] in self._firsts and not text.startswith(self._plain, index):
                pieces.append(text[index] + self._breaker)
            else:
                pieces.append(text[index])
            index += len(special) or 1
        return "".join(pieces)

    def value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.string(value)
        if isinstance(value, Mapping):
            return {self.value(key): self.value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        return value

    def message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return {key: item if key == "role" else self.value(item) for key, item in message.items()}


def _markers(*values: Any) -> list[str]:
    """Three private-use characters that occur nowhere in the values."""
    used = set(json.dumps(values, ensure_ascii=False, default=str))
    free = (chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in used)
    return list(itertools.islice(free, 3))


def _own_spans(tokenizer: TextTokenizer, marked: str, markers: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Where the template's own special tokens are in the marked text, counted without the markers."""
    _, before, behind = markers
    removed = position = 0
    for match in tokenizer.special_pattern.finditer(marked):
        start, end = match.span()
        removed += sum(marked.count(marker, position, start) for marker in markers)
        position = end
        if not (start > 0 and marked[start - 1] == before and marked.startswith(behind, end)):
            yield start - removed, end - removed


def _prepared(message: Mapping[str, Any]) -> dict[str, Any]:
    """Without absent values; an assistant's reasoning under the name that templates read."""
    result = {key: value for key, value in message.items() if value is not None}
    reasoning = next((result[name] for name in REASONING_FIELDS if name in result), None)
    if reasoning is not None:
        result = {"thinking": reasoning, **result, "reasoning_content": reasoning}
    return result


def _tagged(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tag at the end of the last message's text."""
    content = chat[-1].get("content") if chat else None
    if isinstance(content, str):
        return [*chat[:-1], chat[-1] | {"content": content + CONTINUE_TAG}]
    parts = [dict(part) for part in content] if isinstance(content, list) else []
    for part in reversed(parts):
        if isinstance(part.get("text"), str):
            part["text"] += CONTINUE_TAG
            return [*chat[:-1], chat[-1] | {"content": parts}]
    raise TemplateError("there is no text in the final message that could be continued")


def _continued(text: str) -> str:
    """What is before the tag; its own space is gone where the template trims, as is the message's then."""
    place = text.rfind(CONTINUE_TAG.strip())
    if place < 0:
        raise TemplateError("the chat template does not show the final message, so it cannot be continued")
    return text[:place] if text.startswith(CONTINUE_TAG, place) else text[:place].rstrip()


def _configured(value: object) -> Iterator[tuple[str, str]]:
    """A template, or a list of {"name", "template"}."""
    if isinstance(value, str):
        yield DEFAULT, value
    elif isinstance(value, list):
        for entry in value:
            name, template = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (0, 0)
            if isinstance(name, str) and isinstance(template, str):
                yield name, template


def _read(path: Path) -> str:
    label = f"{path.parent.name}/{path.name}"
    try:
        if path.stat().st_size > MAX_TEMPLATE_BYTES:
            raise TemplateError(f"{label} is larger than {MAX_TEMPLATE_BYTES >> 20} MiB")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise TemplateError(f"{label} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TemplateError(f"{label} is not UTF-8") from None


def _one_line(text: str) -> str:
    return " ".join(text.split())[:MAX_MESSAGE_LENGTH]
