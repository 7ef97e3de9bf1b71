"""The seek loop against openai-whisper's transcribe(), on scripted models that reach every branch."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sensorium.models.base import Completion
from sensorium.models.speech import Progress, TranscriptionOptions
from sensorium.models.whisper_rules import decoding_rules
from sensorium.models.whisper_seek import WhisperSpec, attempt_seed, best_completion, temperature_ladder
from sensorium.models.whisper_tokenizer import WhisperTokenizer

from .whisper_script import Script, Window, run_ours, run_reference

BEGIN = 50364


@pytest.fixture(scope="module")
def spec(whisper_base_dir: Path) -> WhisperSpec:
    tokenizer = WhisperTokenizer(whisper_base_dir / "tokenizer.json", 51865)
    return WhisperSpec("scripted", tokenizer, decoding_rules(tokenizer), ((0, 0),))


# Words, marks, parts of characters, a control token that no rule forbids, blanks.
TEXT = st.lists(
    st.sampled_from([2425, 1002, 383, 11, 13, 30, 257, 220, 7, 30543, 6336, 121, 225, 50260, 986]), max_size=9
)


@st.composite
def window_tokens(draw: st.DrawFn) -> tuple[int, ...]:
    """Ids as the decoding rules let them be sampled: pairs of times that never go back."""
    now = draw(st.integers(0, 50))
    tokens = [BEGIN + now]
    for _ in range(draw(st.integers(0, 4))):
        tokens += draw(TEXT.filter(bool))
        now = min(1500, now + draw(st.sampled_from([1, 5, 60, 150, 400, 700])))
        gap = draw(st.sampled_from([0, 0, 0, 20, 200]))
        tokens.append(BEGIN + now)
        now = min(1500, now + gap)
        tokens.append(BEGIN + now)
    ending = draw(st.sampled_from(["closed", "open", "single", "text"]))
    if ending == "closed" and len(tokens) > 1:
        tokens.pop()
        tokens.append(tokens[-1])
    elif ending == "single":
        tokens += [*draw(TEXT.filter(bool)), BEGIN + min(1500, now + 40)]
    elif ending == "text":
        tokens += draw(TEXT)
    return tuple(tokens[:224])


WINDOWS = st.builds(
    Window,
    tokens=window_tokens(),
    # Mostly believable; each number is one that float32 holds.
    logprob=st.sampled_from([-0.5, -2.0, -4.0, -8.0, -64.0]),
    no_speech=st.sampled_from([0.0, 0.25, 0.625, 0.75]),
    times=st.lists(
        st.tuples(
            st.sampled_from([0, 0, 0, 10, 120, 400]),
            st.sampled_from([0, 1, 5, 12, 20, 40, 140]),
            st.sampled_from([0.0625, 0.5, 0.9375]),
        ),
        min_size=1,
        max_size=8,
    ).map(tuple),
)
OPTIONS = st.builds(
    TranscriptionOptions,
    task=st.sampled_from(["transcribe", "translate"]),
    language=st.sampled_from(["en", "ja", "de"]),
    prompt=st.sampled_from([None, "Names: Ada, Bob.", "word " * 300]),
    temperature=st.sampled_from([0.0, 0.0, 0.3, 0.5, 1.0]),
    temperature_fallback=st.booleans(),
    condition_on_previous_text=st.booleans(),
    word_timestamps=st.booleans(),
    clip_timestamps=st.sampled_from([(), (), (3.5,), (1.0, 4.005), (0.0, 31.0, 33.0, 70.0)]),
    hallucination_silence_threshold=st.sampled_from([None, None, 0.0, 0.5, 2.0, 10.0]),
)


@settings(max_examples=300, deadline=None)
@given(
    windows=st.lists(WINDOWS, min_size=1, max_size=8),
    frames=st.sampled_from([50, 1100, 3000, 4321, 7500]),
    options=OPTIONS,
)
def test_the_loop_is_the_references(
    spec: WhisperSpec, windows: list[Window], frames: int, options: TranscriptionOptions
) -> None:
    """Same prompts, tries, windows, segments and words, to the last bit."""
    clips = options.clip_timestamps
    # Beyond the file's end the reference decodes empty windows for ever.
    assume(all(second * 100 <= frames for second in clips))
    ours, theirs = Script(windows), Script(windows)
    program, events = run_ours(ours, spec, frames, options)
    expected = run_reference(theirs, frames, options)

    assert ours.calls == theirs.calls
    shown = [
        {name: value for name, value in vars(segment).items() if name != "words"}
        for segment in program.raw_segments
    ]
    names = shown[0].keys() if shown else ()
    assert shown == [{name: segment[name] for name in names} for segment in expected["segments"]]
    for mine, other in zip(program.raw_segments, expected["segments"], strict=True):
        assert [vars(word) for word in mine.words] == other.get("words", [])

    result = program.result()
    assert tuple(segment for event in events for segment in event.segments) == result.segments
    assert result.text == "".join(segment.text for segment in result.segments)
    assert "\ufffd" not in result.text
    seconds = [event.seconds for event in events]
    assert seconds == sorted(seconds)
    assert seconds[-1] == result.duration
    for segment in result.segments:
        assert (segment.words is not None) == options.word_timestamps


def speech(*spans: tuple[int, list[int], int]) -> tuple[int, ...]:
    return tuple(token for start, text, end in spans for token in (BEGIN + start, *text, BEGIN + end))


def test_hotwords_lead_the_prompt_and_stay(spec: WhisperSpec) -> None:
    """Every window begins with them, whatever else prompts it; the prompt's beginning gives way."""
    tokenizer = spec.tokenizer
    hotwords, prompt = tokenizer.encode(" Sensorium"), tokenizer.encode(" " + "word " * 299 + "word")
    options = TranscriptionOptions(
        language="en", prompt="word " * 300, hotwords="Sensorium", condition_on_previous_text=False
    )
    script = Script([Window(speech((0, [2425], 500)), -1.0, 0.0)])
    run_ours(script, spec, 6000, options)
    sot = tokenizer.sot_sequence("en", "transcribe")
    first, second = (call[1] for call in script.calls)
    assert first == (tokenizer.sot_prev, *hotwords, *prompt[-(223 - len(hotwords)) :], *sot)
    assert len(first) == 1 + 223 + 3
    assert second == (tokenizer.sot_prev, *hotwords, *sot)


def test_endless_hotwords_fit(spec: WhisperSpec) -> None:
    script = Script([Window(speech((0, [2425], 500)), -1.0, 0.0)])
    run_ours(script, spec, 500, TranscriptionOptions(language="en", prompt="tail", hotwords="word " * 2000))
    assert len(script.calls[0][1]) == 1 + 223 + 3


@pytest.mark.parametrize("blank", ["", "  ", "\n"])
def test_a_blank_prompt_is_none(spec: WhisperSpec, blank: str) -> None:
    script = Script([Window(speech((0, [2425], 500)), -1.0, 0.0)])
    run_ours(script, spec, 500, TranscriptionOptions(language="en", prompt=blank, hotwords=blank))
    assert script.calls[0][1] == spec.tokenizer.sot_sequence("en", "transcribe")


def test_words_for_the_silence_rule_are_not_shown(spec: WhisperSpec) -> None:
    options = TranscriptionOptions(language="en", hallucination_silence_threshold=2.0)
    program, _ = run_ours(Script([Window(speech((0, [2425], 500)), -1.0, 0.0)]), spec, 1000, options)
    assert program.raw_segments[0].words
    assert [segment.words for segment in program.result().segments] == [None]


def test_a_window_that_would_stand_still_is_left(spec: WhisperSpec) -> None:
    """No rule lets a model close a segment where the window begins; damaged weights may."""
    stuck = Window((BEGIN, BEGIN, 2425), -1.0, 0.0)
    program, events = run_ours(Script([stuck]), spec, 4000, TranscriptionOptions(language="en"))
    assert program.result().segments == ()
    assert events[-1] == Progress(40.0, ())


@pytest.mark.parametrize(
    ("temperature", "fallback", "ladder"),
    [
        (0.0, True, (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)),
        (0.0, False, (0.0,)),
        (0.3, True, (0.3, 0.5, 0.7, 0.9)),
        (0.4, True, (0.4, 0.6, 0.8, 1.0)),
        (0.95, True, (0.95,)),
        (1.0, True, (1.0,)),
        (0.7, False, (0.7,)),
    ],
)
def test_temperature_ladder(temperature: float, fallback: bool, ladder: tuple[float, ...]) -> None:
    assert temperature_ladder(temperature, fallback) == ladder


def test_seeds_differ_between_attempts_and_stay() -> None:
    seeds = {attempt_seed(seed, seek, t) for seed in (0, 1, -5) for seek in (0, 3000) for t in (0.2, 0.4)}
    assert len(seeds) == 12
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert attempt_seed(0, 0, 0.2) == attempt_seed(0, 0, 0.2)


def test_the_likeliest_per_token_wins() -> None:
    short, long, empty = (
        Completion((1,), -1.0, "stop"),
        Completion((1,) * 4, -3.0, "stop"),
        Completion((), -0.1, "stop"),
    )
    assert best_completion([short, long, empty]) is long
    assert best_completion([short, short]) is short
    assert best_completion([Completion((), -math.inf, "stop"), short]) is short
