"""The speech benchmark's recordings, joined to files of wanted lengths, and how wrong words are counted."""

from __future__ import annotations

import csv
import random
import re
import unicodedata
from collections import defaultdict
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from ..processors.audio import SAMPLE_RATE
from ..processors.media import MediaError, decode_audio
from .bench_rounds import BenchUsage
from .bench_task import Recording

INDEX = "INDEX.tsv"  # beside recordings: columns file, transcript, language …
PAUSE_SECONDS = 0.5  # between recordings that are joined
TOLERANCE = 0.2  # share of a wanted length by which one may be off
SEED = 0
NO_SPEECH = "none"
WITHOUT_SPACES = frozenset({"ja", "km", "lo", "my", "th", "yue", "zh"})  # words cannot be told apart there


def default_recordings(folder: Path) -> list[Recording]:
    """The recordings of a folder's index whose words are known: one of each text, of the main language only.

    One language, because what Whisper does with a file that changes its language is no matter of speed.
    Raises BenchUsage.
    """
    index = _read_index(folder)
    if not index:
        raise BenchUsage(f"SENSORIUM_MEDIA has no audio/{INDEX}; name the FILEs to transcribe")
    by_language: defaultdict[str, dict[str, Recording]] = defaultdict(dict)
    for name, entry in index.items():
        language, text = entry["language"], known_text(entry)
        if language != NO_SPEECH and text is not None and text not in by_language[language]:
            by_language[language][text] = _read(folder / name, text)
    groups = [list(found.values()) for found in by_language.values()]
    if not any(groups):
        raise BenchUsage(f"SENSORIUM_MEDIA's audio/{INDEX} knows the words of no recording; name FILEs")
    return max(groups, key=lambda group: sum(len(one.samples) for one in group))


def read_recordings(files: Sequence[Path]) -> list[Recording]:
    """Files that were named, each with its words if an index beside it has them. Raises BenchUsage."""
    indices = {folder: _read_index(folder) for folder in {file.parent for file in files}}
    found = []
    for file in dict.fromkeys(files):
        entry = indices[file.parent].get(file.name)
        found.append(_read(file, known_text(entry) if entry else None))
    return found


def _read(file: Path, text: str | None) -> Recording:
    try:
        return Recording(file.name, decode_audio(file).samples, text)
    except MediaError as error:
        raise BenchUsage(f"{file}: {error}") from error
    except OSError as error:
        raise BenchUsage(f"{file}: cannot read: {error.strerror or error}") from error


def _read_index(folder: Path) -> dict[str, dict[str, str]]:
    path = folder / INDEX
    if not path.is_file():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        return {row["file"]: row for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)}


def known_text(entry: dict[str, str]) -> str | None:
    """The words of an index's row; None where it only describes them or spaces do not part them.

    A remark in brackets at the end is left out; a text with other remarks ("starts: …") is a description.
    """
    if entry["language"] in WITHOUT_SPACES or "+" in entry["language"]:
        return None
    text = re.sub(r"\s*\([^()]*\)$", "", entry["transcript"].strip())
    described = re.match(r"\w+:", text) or "(" in text
    return None if described or not normalize(text) else text


def work_list(recordings: Sequence[Recording], lengths: Sequence[float]) -> tuple[Recording, ...]:
    """Files of about these lengths (seconds), the longest first; recordings are joined, never cut.

    A length that recordings cannot make is left out, as is a file that would equal another. If nothing fits,
    the recordings themselves are the files.
    """
    made: dict[tuple[str, ...], Recording] = {}
    chance = random.Random(SEED)
    for length in lengths:
        parts = _parts(recordings, length, chance)
        if parts:
            made.setdefault(tuple(part.name for part in parts), _join(parts))
    # The longest first, for all alike: a long one that began late would leave the other clients idle.
    return tuple(sorted(made.values() or recordings, key=lambda one: len(one.samples), reverse=True))


def _parts(recordings: Sequence[Recording], length: float, chance: random.Random) -> list[Recording]:
    """One recording of about the length if there is one; else as many as fit, in shuffled turns."""
    pool = list(recordings)
    chance.shuffle(pool)
    nearest = min(pool, key=lambda one: abs(_seconds(one) - length))
    if abs(_seconds(nearest) - length) <= TOLERANCE * length:
        return [nearest]
    parts: list[Recording] = []
    total = -PAUSE_SECONDS  # there is none before the first
    while total < length:
        before = total
        for one in pool:
            longer = total + PAUSE_SECONDS + _seconds(one)
            if longer <= length * (1 + TOLERANCE / 2):
                parts.append(one)
                total = longer
        if total == before:
            break
        chance.shuffle(pool)
    return parts if abs(total - length) <= TOLERANCE * length else []


def _seconds(recording: Recording) -> float:
    return len(recording.samples) / SAMPLE_RATE


def _join(parts: Sequence[Recording]) -> Recording:
    pause = np.zeros(int(PAUSE_SECONDS * SAMPLE_RATE), np.float32)
    pieces = [piece for part in parts for piece in (part.samples, pause)][:-1]
    texts = [part.text for part in parts if part.text is not None]
    text = " ".join(texts) if len(texts) == len(parts) else None
    return Recording(" + ".join(part.name for part in parts), np.concatenate(pieces), text)


def normalize(text: str) -> str:
    """Lower-case words without punctuation, so that only words can differ."""
    text = re.sub(r"['’]", "", unicodedata.normalize("NFKC", text).lower())
    return " ".join("".join(c if c.isalnum() or unicodedata.combining(c) else " " for c in text).split())


def can_count_errors() -> bool:
    """Whether jiwer is there; the bench extra installs it."""
    return find_spec("jiwer") is not None


def word_error_rate(recordings: Sequence[Recording], outputs: Sequence[Sequence[str]]) -> float | None:
    """Wrong words among those known, 0 …; None where none are known or jiwer is not installed.

    outputs: per round the texts of all recordings, in their order.
    """
    known = [
        (normalize(one.text), normalize(text))
        for texts in outputs
        for one, text in zip(recordings, texts, strict=True)
        if one.text is not None
    ]
    if not known or not can_count_errors():
        return None
    import jiwer  # optional: only the bench extra installs it

    return float(jiwer.wer([said for said, _ in known], [heard for _, heard in known]))
