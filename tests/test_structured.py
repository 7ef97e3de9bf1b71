"""Structured output: whatever a grammar's masks allow is valid, and nothing hostile gets far."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sensorium.engine.structured import (
    CompiledGrammar,
    GrammarCompiler,
    GrammarError,
    apply_bitmask,
    bitmask_width,
    constrain,
)

from .structured_walk import EOT, LOGITS, SCHEMAS, Vocabulary, allowed_tokens, walk

LIMIT_SECONDS = 4.0
MARGIN_SECONDS = 4.0  # for the machine to be busy with other tests


@pytest.fixture(scope="module")
def vocabulary(whisper_base_dir: Path) -> Vocabulary:
    return Vocabulary(whisper_base_dir)


@pytest.fixture(scope="module")
def compiler(vocabulary: Vocabulary) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(vocabulary, LOGITS, [EOT], limit_seconds=LIMIT_SECONDS)
    compiler.compile_choice(["warm"])
    yield compiler
    compiler.close()


def texts(vocabulary: Vocabulary, grammar: CompiledGrammar, count: int = 8) -> list[str]:
    """Random complete texts of a grammar."""
    found = [walk(vocabulary, grammar, seed, free=8) for seed in range(count)]
    complete = [text for text in found if text is not None]
    assert complete
    return complete


def accepts(vocabulary: Vocabulary, grammar: CompiledGrammar, text: str) -> bool:
    matcher = grammar.matcher()
    return all(matcher.accept(token) for token in vocabulary.encode(text)) and matcher.accept(EOT)


def assert_one_line(error: GrammarError) -> None:
    message = str(error)
    assert message
    assert "\n" not in message
    assert len(message) <= 300
    assert not re.search(r"\.cc|/project|0x[0-9a-f]{6}|Traceback", message)


def test_texts_of_random_schemas_are_valid(vocabulary: Vocabulary, compiler: GrammarCompiler) -> None:
    seen: Counter[str] = Counter()

    @settings(
        max_examples=200,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(SCHEMAS, st.integers(0, 2**20))
    def check(schema: Any, seed: int) -> None:
        try:
            jsonschema.Draft202012Validator.check_schema(schema)
        except jsonschema.SchemaError:
            seen["malformed"] += 1
            return
        try:
            grammar = compiler.compile_json_schema(schema)
        except GrammarError as error:
            assert_one_line(error)
            seen["refused"] += 1
            return
        text = walk(vocabulary, grammar, seed)
        if text is None:
            seen["unfinished"] += 1
            return
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
        seen["valid"] += 1

    check()
    assert seen["valid"] >= 100, seen


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        ({"type": "integer", "minimum": 2.5, "exclusiveMaximum": 5}, ["3", "4"], ["2", "5"]),
        ({"type": "integer", "multipleOf": 7, "minimum": 10, "maximum": 30}, ["14", "28"], ["10", "35", "7"]),
        ({"enum": [1, "a", None], "type": ["string", "null"]}, ['"a"', "null"], ["1"]),
        (
            {"type": "array", "items": [{"type": "integer"}], "additionalItems": False},
            ["[1]"],
            ['["a"]', "[1,2]"],
        ),
        ({"required": ["a"]}, ['{"a":1}', '{"a":[], "b":2}'], ["{}", '{"b":1}']),
        ({"properties": {"a": False, "b": {}}}, ["{}", '{"b":1}'], ['{"a":1}', '{"c":1}']),
        ({"minLength": 2, "maxLength": 3}, ['"ab"', '"éß"'], ['"a"', '"abcd"']),
        ({"type": "object"}, ["{}", '{"x":{"y":[1.5e3,null]}}'], ["[]", "1", '{"x"}']),
        ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "null"}}}, ["null"], ["1"]),
        (
            {"properties": {"next": {"$ref": "#"}, "v": {"type": "integer"}}, "required": ["v"]},
            ['{"next":{"v":2},"v":1}'],
            ['{"next":{}, "v":1}'],
        ),
        (
            {
                "oneOf": [
                    {
                        "properties": {"kind": {"const": kind}, kind: {"type": "integer"}},
                        "required": ["kind", kind],
                    }
                    | {"type": "object"}
                    for kind in ("cat", "dog")
                ]
            },
            ['{"kind":"cat","cat":1}', '{"kind":"dog","dog":2}'],
            ['{"kind":"cat","dog":1}'],
        ),
    ],
)
def test_keywords(
    vocabulary: Vocabulary, compiler: GrammarCompiler, schema: Any, inside: list[str], outside: list[str]
) -> None:
    grammar = compiler.compile_json_schema(schema)
    assert [accepts(vocabulary, grammar, text) for text in inside] == [True] * len(inside)
    assert [accepts(vocabulary, grammar, text) for text in outside] == [False] * len(outside)


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": {}}, "contains"),
        ({"not": {"type": "string"}}, "not"),
        ({"if": {}, "then": {}}, "if"),
        ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"type": "string", "minLenght": 2}, "minLenght"),
        ({"type": "string", "format": "idn-email"}, "idn-email"),
        ({"type": "string", "pattern": "^a+$", "maxLength": 3}, "pattern"),
        ({"type": "number", "multipleOf": 0.1}, "multipleOf"),
        ({"type": "integer", "multipleOf": 3, "minimum": 1}, "multipleOf"),
        ({"allOf": [{"type": "string"}, {"maxLength": 2}]}, "allOf"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}], "maxLength": 2}, "anyOf"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {}}, "minimum": 3}, "$ref"),
        ({"enum": ["aa", "b"], "minLength": 2}, "enum"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
    ],
)
def test_keywords_that_would_be_ignored(compiler: GrammarCompiler, schema: Any, named: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(named)):
        compiler.compile_json_schema(schema)
    compiler.compile_json_schema(schema, strict=False)


HOSTILE_SCHEMAS = {
    "null": None,
    "a list": [],
    "not JSON": "{",
    "NaN": '{"const": NaN}',
    "not a type": {"type": "foo"},
    "not a list": {"enum": 3},
    "a negative length": {"type": "string", "minLength": -5},
    "a deep text": '{"items":' * 20_000 + "{}" + "}" * 20_000,
    "a large text": {"enum": [f"value{number}" for number in range(100_000)]},
    "a thousand optional names": {
        "properties": {f"p{number}": {"type": "integer"} for number in range(1000)}
    },
    "a billion items": {"type": "array", "minItems": 1e9},
    "an impossible range": {"type": "integer", "minimum": 5, "maximum": 4},
    "a circle of references": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#"}}},
    "an endless value": {"properties": {"x": {"$ref": "#"}}, "required": ["x"]},
    "an unknown reference": {"$ref": "#/$defs/zip"},
    "a reference elsewhere": {"$ref": "http://127.0.0.1/schema"},
    "nested repetition": {"type": "string", "pattern": "^([a-z]{1,300}){1,300}$"},
    "a pattern with a quote": {"type": "string", "pattern": '^"$'},
}
HOSTILE_REGEXES = [
    "(", "*a", "a{5,2}", "a{100000000}", "(?=a)b", r"\bfoo\b", r"(a)\1", r"\Aa\Z", "a$b",
    "[^\\s\\S]", "(" * 3000 + "a" + ")" * 3000, "(.|\n|\\s){1,2000}", "a" * 300_000, "\ud800", "[a", "\\",
]  # fmt: skip
HOSTILE_GRAMMARS = [
    "", "root ::= root", "root ::= foo", 'root ::= "a', 'foo ::= "a"', "root ::= " + "(" * 5000 + ")" * 5000,
    "root ::= x x x x x x x x\nx ::= y*\ny ::= [a-z ]* | y y",
]  # fmt: skip


def refused(compile_it: Any, argument: Any) -> None:
    began = time.monotonic()
    with pytest.raises(GrammarError) as caught:
        compile_it(argument)
    assert time.monotonic() - began < LIMIT_SECONDS + MARGIN_SECONDS
    assert_one_line(caught.value)


@pytest.mark.parametrize("name", HOSTILE_SCHEMAS)
def test_hostile_schemas(compiler: GrammarCompiler, name: str) -> None:
    refused(compiler.compile_json_schema, HOSTILE_SCHEMAS[name])


@pytest.mark.parametrize("number", range(len(HOSTILE_REGEXES)))
def test_hostile_regexes(compiler: GrammarCompiler, number: int) -> None:
    refused(compiler.compile_regex, HOSTILE_REGEXES[number])


@pytest.mark.parametrize("number", range(len(HOSTILE_GRAMMARS)))
def test_hostile_grammars(compiler: GrammarCompiler, number: int) -> None:
    refused(compiler.compile_ebnf, HOSTILE_GRAMMARS[number])


@pytest.mark.parametrize("choices", [[], "abc", [1], ["a"] * 20_000])
def test_hostile_choices(compiler: GrammarCompiler, choices: Any) -> None:
    refused(compiler.compile_choice, choices)


@pytest.mark.parametrize(
    "pattern",
    [
        r"[a-z]+@[a-z]+\.(com|org)",
        r"^\d{3}-\d{4}$",
        "(cat|dog)s?",
        r"[\w.]{1,8}",
        ".{1,5}",
        r"a|\(\"b\"\)",
        "x*?y",
    ],
)
def test_texts_of_regexes_match(vocabulary: Vocabulary, compiler: GrammarCompiler, pattern: str) -> None:
    for text in texts(vocabulary, compiler.compile_regex(pattern)):
        assert re.fullmatch(pattern, text), text


def test_texts_of_choices(vocabulary: Vocabulary, compiler: GrammarCompiler) -> None:
    choices = ["yes", "no", 'a "quoted" one', "back\\slash", "línea\n2", "😀", "]", "-x", "yes, indeed"]
    grammar = compiler.compile_choice(choices)
    assert set(texts(vocabulary, grammar, 40)) <= set(choices)
    assert all(accepts(vocabulary, grammar, choice) for choice in choices)
    assert not accepts(vocabulary, grammar, "yes, inde")


def test_texts_of_a_grammar(vocabulary: Vocabulary, compiler: GrammarCompiler) -> None:
    grammar = compiler.compile_ebnf('root ::= sum\nsum ::= [0-9] ("+" sum)?')
    for text in texts(vocabulary, grammar):
        assert re.fullmatch(r"\d(\+\d)*", text)


def test_json_object(vocabulary: Vocabulary, compiler: GrammarCompiler) -> None:
    for text in texts(vocabulary, compiler.compile_json_object()):
        assert isinstance(json.loads(text), dict)


TAG = {
    "begin": "<call>",
    "schema": {"properties": {"x": {"type": "integer"}}, "required": ["x"]},
    "end": "</call>",
}


def test_strings_of_limited_length_hold_no_control_characters(
    vocabulary: Vocabulary, compiler: GrammarCompiler
) -> None:
    grammar = compiler.compile_json_schema({"type": "string", "minLength": 1, "maxLength": 30})
    assert accepts(vocabulary, grammar, '"a b"')
    assert not any(accepts(vocabulary, grammar, f'"a{chr(code)}b"') for code in range(32))


def test_structural_tags(vocabulary: Vocabulary, compiler: GrammarCompiler) -> None:
    grammar = compiler.compile_structural_tag({"structures": [TAG], "triggers": ["<call>"]})
    assert accepts(vocabulary, grammar, "no call")
    assert accepts(vocabulary, grammar, 'text <call>{"x": 1}</call> text')
    assert not accepts(vocabulary, grammar, 'text <call>{"y": 1}</call>')
    broken = {**TAG, "schema": {"uniqueItems": True}}
    refused(compiler.compile_structural_tag, {"structures": [broken], "triggers": ["<call>"]})
    refused(compiler.compile_structural_tag, {"structures": [TAG]})
    refused(compiler.compile_structural_tag, {"type": "structural_tag", "format": {"type": "nothing"}})


def test_stop_tokens_need_a_complete_text(vocabulary: Vocabulary) -> None:
    compiler = GrammarCompiler(vocabulary, LOGITS, [EOT, LOGITS - 1])
    matcher = compiler.compile_regex("ab?").matcher()
    compiler.close()
    a, b = vocabulary.id_of[b"a"], vocabulary.id_of[b"b"]
    assert not allowed_tokens(matcher)[[EOT, LOGITS - 1]].any()
    assert not matcher.accept(EOT)
    assert matcher.accept(a)
    assert set(allowed_tokens(matcher).nonzero()[0]) == {b, EOT, LOGITS - 1}
    other = matcher.fork()
    assert matcher.accept(b)
    assert set(allowed_tokens(matcher).nonzero()[0]) == {EOT, LOGITS - 1}
    assert other.accept(LOGITS - 1)
    assert other.is_terminated
    assert not other.accept(a)
    assert set(allowed_tokens(other).nonzero()[0]) == {EOT, LOGITS - 1}
    assert not matcher.is_terminated


def test_bitmask_is_applied_to_the_rows_asked_for() -> None:
    vocab_size = 1000
    logits = torch.randn(5, vocab_size)
    before = logits.clone()
    bitmask = torch.randint(-(2**31), 2**31 - 1, (5, bitmask_width(vocab_size)), dtype=torch.int32)
    bitmask[3] = 0
    bitmask[3, 7] = bitmask[3, -1] = -(2**31) + 5  # few tokens, one of them beyond the vocabulary
    apply_bitmask(logits, bitmask, (1, 3))
    bits = ((bitmask[:, :, None] >> torch.arange(32)) & 1).flatten(1)[:, :vocab_size].bool()
    expected = before.clone()
    expected[[1, 3]] = before[[1, 3]].masked_fill(~bits[[1, 3]], -torch.inf)
    assert torch.equal(logits, expected)
    with pytest.raises(ValueError, match="does not cover"):
        apply_bitmask(logits, bitmask[:, :31], [0])


def test_a_batch_is_constrained_row_by_row(vocabulary: Vocabulary, compiler: GrammarCompiler) -> None:
    stuck = compiler.compile_ebnf('root ::= "a" end\nend ::= end').matcher()
    matcher = compiler.compile_choice(["b"]).matcher()
    assert stuck.accept(vocabulary.id_of[b"a"])
    logits = torch.randn(3, LOGITS)
    before = logits.clone()
    failed = constrain(logits, [None, matcher, stuck])
    assert list(failed) == [2]
    assert_one_line(failed[2])
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    assert logits[1].isfinite().nonzero().tolist() == [[vocabulary.id_of[b"b"]]]


def test_recent_grammars_are_kept(vocabulary: Vocabulary) -> None:
    compiler = GrammarCompiler(vocabulary, LOGITS, [EOT], max_cached=2)
    first = compiler.compile_regex("a+")
    assert compiler.compile_regex("a+") is first
    assert compiler.compile_ebnf('root ::= "a"') != first
    assert compiler.compile_regex("a+") is first
    compiler.compile_regex("c+")  # the grammar of "a" was used least recently
    assert compiler.compile_regex("a+") is first
    compiler.compile_regex("d+")
    compiler.compile_regex("e+")
    again = compiler.compile_regex("a+")
    assert again is not first
    assert again == first
    assert hash(again) == hash(first)
    compiler.close()
    with pytest.raises(ValueError, match="stop tokens"):
        GrammarCompiler(vocabulary, LOGITS, [])


def test_threads_share_one_compilation(compiler: GrammarCompiler) -> None:
    grammars: list[CompiledGrammar] = []

    def compile_some() -> None:
        for number in range(4):
            grammars.append(compiler.compile_regex(f"thread[s]? {number}"))

    threads = [threading.Thread(target=compile_some) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(grammars) == 32
    assert len({id(grammar) for grammar in grammars}) == 4
