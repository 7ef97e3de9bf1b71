"""Thinking told apart from answers under any cut of the text, budgets in tokens, grammars that wait."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from sensorium.models.reasoning import (
    REASONING_FORMATS,
    GrammarAfterThinking,
    ReasoningParser,
    Thinking,
    ThinkingBudget,
    ThinkingMarks,
    reasoning_format_of,
    split_reasoning,
)

QWEN = REASONING_FORMATS["qwen3"]
DEEPSEEK = REASONING_FORMATS["deepseek_r1"]

CASES: list[tuple[Thinking, str, tuple[str, str]]] = [
    ("undecided", "<think>\nOne.\n\nTwo.\n</think>\n\nThe answer.\n", ("One.\n\nTwo.", "The answer.\n")),
    ("undecided", "\n<think>a</think>b", ("a", "b")),
    ("undecided", "Just an answer.", ("", "Just an answer.")),
    ("undecided", " \nAnswer with <think>marks</think>.", ("", " \nAnswer with <think>marks</think>.")),
    ("undecided", "<thin", ("", "<thin")),
    ("undecided", "<think>\n\n</think>\n\nQuick.", ("", "Quick.")),
    ("undecided", "<think>cut off  </thi", ("cut off  </thi", "")),
    ("undecided", "", ("", "")),
    ("open", "Hm.\n</think>\n\nYes.", ("Hm.", "Yes.")),
    ("open", "<think>\nHm.</think>Yes.", ("Hm.", "Yes.")),
    ("open", "never closed \n", ("never closed", "")),
    ("open", "a < b </ c </think x </think>d", ("a < b </ c </think x", "d")),
    ("open", "a</think>b</think>c", ("a", "b</think>c")),
    ("open", " <th", ("<th", "")),
    ("closed", "<think>x</think>", ("", "<think>x</think>")),
]


def stream(text: str, cuts: Sequence[int], thinking: Thinking) -> tuple[str, str]:
    parser = ReasoningParser(QWEN, thinking)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    deltas = [parser.feed(text[a:b]) for a, b in itertools.pairwise(edges)]
    deltas.append(parser.finish())
    return "".join(d.reasoning for d in deltas), "".join(d.content for d in deltas)


@pytest.mark.parametrize(("thinking", "text", "wanted"), CASES)
def test_known_outputs(thinking: Thinking, text: str, wanted: tuple[str, str]) -> None:
    assert split_reasoning(text, QWEN, thinking) == wanted
    assert stream(text, range(len(text)), thinking) == wanted


pieces = st.lists(
    st.sampled_from(["<think>", "</think>", "<", "</", "think>", " ", "\n", "a", "é", "<thi", "</think"]),
    max_size=12,
).map("".join)


@given(pieces, st.lists(st.integers(0, 80), max_size=8), st.sampled_from(["undecided", "open", "closed"]))
@example(" <think>a </think> b", [1, 5, 9, 10, 12], "undecided")
def test_every_cut_gives_the_same(text: str, cuts: list[int], thinking: Thinking) -> None:
    assert stream(text, cuts, thinking) == split_reasoning(text, QWEN, thinking)


def test_text_comes_as_soon_as_it_is_certain() -> None:
    parser = ReasoningParser(QWEN, "undecided")
    assert parser.feed("<think>so").reasoning == "so"
    assert parser.feed(" then </th").reasoning == " then"
    assert parser.feed("ink> Yes").content == "Yes"
    assert parser.feed(" and no").content == " and no"


@pytest.mark.parametrize(
    ("form", "prompt", "prefill", "wanted"),
    [
        (QWEN, "<|im_start|>assistant\n", None, "undecided"),
        (QWEN, "what does <think> mean?<|im_end|>\n<|im_start|>assistant\n", None, "undecided"),
        (QWEN, "<|im_start|>assistant\n<think>\n", None, "open"),
        (QWEN, "<|im_start|>assistant\n<think>\n\n</think>\n\n", None, "closed"),
        (DEEPSEEK, "<｜User｜>hi<｜Assistant｜>", None, "open"),
        (DEEPSEEK, "<｜User｜>hi<｜Assistant｜></think>", None, "closed"),
        (DEEPSEEK, "<｜tool▁output▁begin｜>42<｜tool▁output▁end｜>", None, "undecided"),
        (QWEN, "assistant\n<think>half a th", "<think>half a th", "open"),
        (QWEN, "assistant\n<think>x</think>The an", "<think>x</think>The an", "closed"),
        (QWEN, "assistant\nThe an", "The an", "closed"),
    ],
)
def test_the_prompt_says_where_thinking_stands(
    form: object, prompt: str, prefill: str | None, wanted: Thinking
) -> None:
    assert form.thinking_after(prompt, prefill) == wanted  # type: ignore[attr-defined]


def test_the_format_is_found_in_the_template() -> None:
    assert reasoning_format_of("{{ x.split('</think>') }}<|im_start|>") is QWEN
    assert reasoning_format_of("<｜Assistant｜>...</think>") is DEEPSEEK
    assert reasoning_format_of("<|im_start|>") is None
    assert reasoning_format_of(None) is None


# -- budgets: 90, 91 close, 80 opens; 1 … 9 are words ------------------------------------------------------

VOCAB = 100


def generate(budget: int, wishes: Sequence[int], thinking: Thinking, end: tuple[int, ...]) -> list[int]:
    """Greedy output of a model that wants `wishes`, under a budget."""
    processor = ThinkingBudget(budget, ThinkingMarks((80,), end, thinking))
    output: list[int] = []
    for wish in wishes:
        logits = torch.zeros(1, VOCAB)
        logits[0, wish] = 5.0
        processor(logits, [output])
        output.append(int(logits.argmax()))
    return output


@pytest.mark.parametrize(
    ("budget", "thinking", "end", "wanted"),
    [
        (3, "open", (90,), [1, 2, 3, 90, 5, 6, 7]),
        (0, "open", (90,), [90, 2, 3, 4, 5, 6, 7]),
        (3, "open", (90, 91), [1, 2, 3, 90, 91, 6, 7]),
        (9, "open", (90,), [1, 2, 3, 4, 5, 6, 7]),
        (1, "closed", (90,), [1, 2, 3, 4, 5, 6, 7]),
        (1, "undecided", (90,), [1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_the_budget_closes_the_span(
    budget: int, thinking: Thinking, end: tuple[int, ...], wanted: list[int]
) -> None:
    assert generate(budget, [1, 2, 3, 4, 5, 6, 7], thinking, end) == wanted


def test_the_budget_counts_from_the_opening_mark() -> None:
    assert generate(2, [80, 1, 2, 3, 4, 5], "undecided", (90,)) == [80, 1, 2, 90, 4, 5]


def test_a_span_closed_in_time_is_left_alone() -> None:
    assert generate(3, [1, 90, 2, 3, 4, 5], "open", (90,)) == [1, 90, 2, 3, 4, 5]


def test_a_closing_mark_under_way_is_completed() -> None:
    assert generate(2, [1, 90, 7, 8, 9], "open", (90, 91)) == [1, 90, 91, 8, 9]


@given(st.integers(0, 6), st.lists(st.sampled_from([1, 2, 90, 91]), min_size=12, max_size=12))
def test_thinking_never_outlasts_its_budget(budget: int, wishes: list[int]) -> None:
    output = generate(budget, wishes, "open", (90, 91))
    closed = [i for i in range(len(output) - 1) if output[i : i + 2] == [90, 91]]
    assert closed
    assert closed[0] <= budget


def test_what_is_forced_comes_even_if_banned() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, 90] = -math.inf
    ThinkingBudget(1, ThinkingMarks((80,), (90,), "open"))(logits, [[5], []])
    assert int(logits[0].argmax()) == 90
    assert logits[0, 90] == 0
    assert logits[1, 90] == -math.inf


# -- grammars ----------------------------------------------------------------------------------------------


class ListMatcher:
    """Allows exactly the ids 33, 34, then nothing."""

    def __init__(self, position: int = 0) -> None:
        self.position = position

    def fill_bitmask(self, bitmask: torch.Tensor, row: int) -> None:
        bitmask[row] = 0
        if self.position < 2:
            bitmask[row, 1] = 2 << self.position

    def accept(self, token_id: int) -> bool:
        fits = self.position < 2 and token_id == 33 + self.position
        self.position += fits
        return fits

    def fork(self) -> ListMatcher:
        return ListMatcher(self.position)

    @property
    def is_terminated(self) -> bool:
        return self.position == 2


class ListGrammar:
    def matcher(self) -> ListMatcher:
        return ListMatcher()


def allowed(matcher: object) -> set[int]:
    bitmask = torch.zeros(2, 4, dtype=torch.int32)
    matcher.fill_bitmask(bitmask, 1)  # type: ignore[attr-defined]
    words = bitmask[1].tolist()
    assert bitmask[0].tolist() == [0] * 4
    return {32 * word + bit for word in range(4) for bit in range(32) if words[word] >> bit & 1}


def test_a_grammar_waits_for_the_end_of_thinking() -> None:
    matcher = GrammarAfterThinking(ListGrammar(), ThinkingMarks((80,), (90, 91), "open")).matcher()
    assert len(allowed(matcher)) == 128
    assert all(matcher.accept(token) for token in (33, 90, 5, 90))
    twin = matcher.fork()
    assert matcher.accept(91)
    assert len(allowed(twin)) == 128
    assert allowed(matcher) == {33}
    assert not matcher.accept(34)
    assert matcher.accept(33)
    assert matcher.accept(34)
    assert matcher.is_terminated
    assert not twin.is_terminated


def test_a_grammar_leaves_the_choice_to_think() -> None:
    grammar = GrammarAfterThinking(ListGrammar(), ThinkingMarks((95,), (90,), "undecided"))
    thinker, speaker = grammar.matcher(), grammar.matcher()
    assert allowed(thinker) == {33, 95}
    assert thinker.accept(95)
    assert len(allowed(thinker)) == 128
    assert thinker.accept(90)
    assert allowed(thinker) == {33}
    assert speaker.accept(33)
    assert allowed(speaker) == {34}
    assert not grammar.matcher().accept(34)


def test_a_grammar_holds_at_once_without_thinking() -> None:
    for marks in (ThinkingMarks((80,), (90,), "closed"), ThinkingMarks((80, 81), (90,), "undecided")):
        assert allowed(GrammarAfterThinking(ListGrammar(), marks).matcher()) == {33}
