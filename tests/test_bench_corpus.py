"""The speech benchmark's recordings: known words, joined files, wrong words."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sensorium.processors.audio import SAMPLE_RATE
from sensorium.server.bench_corpus import (
    PAUSE_SECONDS,
    TOLERANCE,
    default_recordings,
    known_text,
    normalize,
    read_recordings,
    word_error_rate,
    work_list,
)
from sensorium.server.bench_rounds import BenchUsage
from sensorium.server.bench_speech import LENGTHS
from sensorium.server.bench_task import Recording


def recording(seconds: float, name: str, text: str | None = "a b") -> Recording:
    return Recording(name, np.zeros(int(seconds * SAMPLE_RATE), np.float32), text)


def seconds(one: Recording) -> float:
    return len(one.samples) / SAMPLE_RATE


@pytest.mark.parametrize(
    ("transcript", "language", "text"),
    [
        ("one two three", "en", "one two three"),
        ("Hello world. (read by hand; inferred)", "en", "Hello world."),
        ("Hi. / Yes? (speakers A,B)", "en", "Hi. / Yes?"),
        ("(about: how many cars)", "en", None),
        ("starts: Esta es", "es", None),
        ("LEFT: He began. RIGHT: The horizon.", "en", None),
        ("(et) c'est la dictée", "fr", None),
        ("first ~30 s licence (Permission); then German (Jedem)", "en", None),
        ("Hello. / Hallo.", "de+en", None),
        ("砸自己的脚", "zh", None),
    ],
)
def test_words_that_are_known(transcript: str, language: str, text: str | None) -> None:
    assert known_text({"transcript": transcript, "language": language}) == text


def test_default_recordings_are_of_one_language_and_each_text_once(media: Path) -> None:
    found = default_recordings(media / "audio")
    names = [one.name for one in found]
    assert {"jfk.mp3", "oai_houseplant_care.mp3", "num123_mono_16bit_44k.aiff"} <= set(names)
    assert len({one.text for one in found}) == len(found)
    with (media / "audio" / "INDEX.tsv").open(encoding="utf-8") as file:
        languages = {row["file"]: row["language"] for row in csv.DictReader(file, delimiter="\t")}
    assert {languages[name] for name in names} == {"en"}


def test_default_files_are_ten_of_3_seconds_to_3_minutes(media: Path) -> None:
    made = work_list(default_recordings(media / "audio"), LENGTHS)
    assert len(made) == len(LENGTHS)
    for one, length in zip(made, sorted(LENGTHS, reverse=True), strict=True):
        assert seconds(one) == pytest.approx(length, rel=TOLERANCE)
        assert one.text


def test_a_folder_without_an_index_or_known_words(tmp_path: Path) -> None:
    with pytest.raises(BenchUsage, match="no audio/INDEX"):
        default_recordings(tmp_path)
    (tmp_path / "INDEX.tsv").write_text("file\ttranscript\tlanguage\nx.wav\t(coughs)\tnone\n")
    with pytest.raises(BenchUsage, match="knows the words of no recording"):
        default_recordings(tmp_path)


def test_named_files_find_their_words_beside_them(media: Path) -> None:
    names = ("jfk.mp3", "es_test_clip.wav", "jfk.mp3")
    found = read_recordings([media / "audio" / name for name in names])
    assert [(one.name, one.text is not None) for one in found] == [
        ("jfk.mp3", True),
        ("es_test_clip.wav", False),
    ]


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.floats(0.5, 40), min_size=1, max_size=6),
    st.lists(st.floats(1, 200), min_size=1, max_size=6),
)
def test_files_are_whole_recordings_about_as_long_as_wanted(sizes: list[float], lengths: list[float]) -> None:
    recordings = [recording(size, str(number), f"w{number}") for number, size in enumerate(sizes)]
    by_name = {one.name: one for one in recordings}
    made = work_list(recordings, lengths)
    assert [(one.name, one.text) for one in made] == [
        (one.name, one.text) for one in work_list(recordings, lengths)
    ]
    assert len({one.name for one in made}) == len(made) > 0
    assert sorted(map(seconds, made), reverse=True) == list(map(seconds, made))
    original = {one.name for one in made} == set(by_name)
    for one in made:
        parts = [by_name[name] for name in one.name.split(" + ")]
        total = sum(map(seconds, parts)) + PAUSE_SECONDS * (len(parts) - 1)
        assert seconds(one) == pytest.approx(total)
        assert one.text == " ".join(part.text or "" for part in parts)
        wanted = min(abs(seconds(one) - length) / length for length in lengths)
        assert original or wanted <= TOLERANCE + 1e-6


def test_a_joined_file_has_known_words_only_if_all_its_parts_have() -> None:
    (made,) = work_list([recording(10, "a"), recording(10, "b", None)], [20])
    assert made.text is None


def test_a_single_long_recording_is_not_cut() -> None:
    long = recording(600, "long")
    assert work_list([long], LENGTHS) == (long,)


def test_words_are_compared_without_case_and_punctuation() -> None:
    assert normalize("Hi, I’m Trying—to:  DICTÉE 3.5!") == "hi im trying to dictée 3 5"
    assert normalize(" / …") == ""


def test_wrong_words_are_counted_over_all_rounds() -> None:
    said = (recording(1, "a", "One two three four."), recording(1, "b", None), recording(1, "c", "Five six?"))
    assert word_error_rate(said, [["one two three four", "?", "five six"]]) == 0
    wrong = [["one two three four", "x", "five six"], ["one too three", "y", ""]]
    assert word_error_rate(said, wrong) == pytest.approx(4 / 12)
    assert word_error_rate(said[1:2], [["heard"]]) is None
