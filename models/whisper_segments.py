"""From a window's tokens to segments, to the next window, and to what users see: pure functions.

Frames are 10 ms; a timestamp token counts steps of 20 ms, two frames.
"""

from __future__ import annotations

import codecs
import itertools
import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..processors.audio import FRAMES_PER_SECOND, HOP_LENGTH, SAMPLE_RATE, TOKENS_PER_SECOND
from .speech import OptionError, Segment, Word
from .whisper_tokenizer import WhisperTokenizer

FRAMES_PER_STEP = FRAMES_PER_SECOND // TOKENS_PER_SECOND
SECONDS_PER_STEP = FRAMES_PER_STEP * HOP_LENGTH / SAMPLE_RATE
WORD_STEP = 0.01  # seconds to which word times are rounded; no word is shorter
MIN_SEGMENT_SECONDS = 0.002  # what is shorter is rounding of sums, and has no length in a subtitle

Clip = tuple[int, int]  # frames [start, end)


def frame_seconds(frame: int) -> float:
    return frame * HOP_LENGTH / SAMPLE_RATE


@dataclass
class DraftWord:
    """A word whose times (seconds from the file's start) may still be corrected."""

    word: str
    start: float
    end: float
    probability: float


@dataclass
class DraftSegment:
    """A segment as the reference keeps it: changed by word times, emptied when instantaneous or blank.

    tokens: timestamp tokens included. The last four numbers belong to the whole window.
    """

    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    words: list[DraftWord] = field(default_factory=list)


@dataclass(frozen=True)
class WindowSplit:
    """A window's tokens cut into segments.

    spans: per segment (start, end, tokens); times in seconds from the window's start.
    advance: frames from this window's start to the next one's.
    single_ending: the output ends in text and one timestamp: nothing is spoken after it.
    """

    spans: tuple[tuple[float, float, tuple[int, ...]], ...]
    advance: int
    single_ending: bool


def split_window(tokens: Sequence[int], timestamp_begin: int, size: int) -> WindowSplit:
    """Cuts where two timestamps meet. `size`: frames of audio in the window.

    A tail that no timestamp closes is dropped, and its audio decoded again in the next window. Without any
    pair of timestamps the whole output is one segment and the whole window is done.
    """
    is_time = [token >= timestamp_begin for token in tokens]
    single_ending = is_time[-2:] == [False, True]
    cuts = [i for i in range(1, len(tokens)) if is_time[i - 1] and is_time[i]]
    if not cuts:
        times = [token - timestamp_begin for token in tokens if token >= timestamp_begin]
        duration = times[-1] * SECONDS_PER_STEP if times and times[-1] else frame_seconds(size)
        return WindowSplit(((0.0, duration, tuple(tokens)),), size, single_ending)

    if single_ending:
        cuts.append(len(tokens))
    spans = []
    for first, last in zip([0, *cuts], cuts, strict=False):
        start, end = tokens[first] - timestamp_begin, tokens[last - 1] - timestamp_begin
        spans.append((start * SECONDS_PER_STEP, end * SECONDS_PER_STEP, tuple(tokens[first:last])))
    closed = (tokens[cuts[-1] - 1] - timestamp_begin) * FRAMES_PER_STEP
    return WindowSplit(tuple(spans), size if single_ending else closed, single_ending)


def compression_ratio(text: str) -> float:
    """UTF-8 length over its deflated length: far above 2 where a model repeats itself."""
    data = text.encode("utf-8")
    return len(data) / len(zlib.compress(data))


def clear_empty(segments: Iterable[DraftSegment]) -> None:
    """Empties segments that take no time or hold no text; they stay in the list."""
    for segment in segments:
        if segment.start == segment.end or not segment.text.strip():
            segment.text = ""
            segment.tokens = []
            segment.words = []


def last_end(segments: Sequence[DraftSegment]) -> float | None:
    """End of the last word, or of the last segment where there are no words; None without segments."""
    for segment in reversed(segments):
        if segment.words:
            return segment.words[-1].end
    return segments[-1].end if segments else None


def clips_from_seconds(seconds: Sequence[float], content_frames: int) -> list[Clip]:
    """start, end, start, end … in seconds → frames within the file; an odd count ends at the file's end.

    No numbers mean the whole file. Raises OptionError unless they are finite, ≥ 0 and never decrease.
    """
    if any(not math.isfinite(second) or second < 0 for second in seconds):
        raise OptionError("clip_timestamps", "clip_timestamps must be seconds of at least 0")
    if any(left > right for left, right in itertools.pairwise(seconds)):
        raise OptionError("clip_timestamps", "clip_timestamps must not decrease: start,end,start,end,…")
    # Compared in seconds first: a huge number has no place as a frame index.
    end = content_frames / FRAMES_PER_SECOND
    points = [round(min(second, end) * FRAMES_PER_SECOND) for second in seconds] or [0]
    if len(points) % 2:
        points.append(content_frames)
    return [(start, stop) for start, stop in zip(points[::2], points[1::2], strict=True) if start < stop]


def intersect_clips(left: Sequence[Clip], right: Sequence[Clip]) -> list[Clip]:
    """The frames that lie in both lists; all three are ascending and without overlap."""
    common = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            common.append((start, end))
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return common


class SegmentWriter:
    """Turns draft segments, in the order of time, into a user's segments.

    Blank and instantaneous ones are dropped before ids are given; times are clamped so that
    0 ≤ start < end ≤ duration and starts never decrease, of segments and of words; a character whose bytes
    lie in two segments goes to the one that completes it, and bytes that never become a character are left
    out.
    """

    def __init__(self, tokenizer: WhisperTokenizer, duration: float, with_words: bool) -> None:
        self._tokenizer = tokenizer
        self._duration = duration
        self._with_words = with_words
        self._utf8 = codecs.getincrementaldecoder("utf-8")("ignore")
        self._next_id = 0
        self._last_start = 0.0
        self._last_word = 0.0  # its start

    def write(self, drafts: Iterable[DraftSegment]) -> list[Segment]:
        written = []
        for draft in drafts:
            if min(draft.end, self._duration) - draft.start < MIN_SEGMENT_SECONDS:
                continue
            # A window may time its speech beyond its audio, past the start of the next clip.
            start = max(draft.start, self._last_start)
            end = min(max(draft.end, start + SECONDS_PER_STEP), self._duration)
            text_ids = [token for token in draft.tokens if token < self._tokenizer.eot]
            # A model can also spell out U+FFFD itself.
            text = self._utf8.decode(self._tokenizer.decode_bytes(text_ids)).replace("\ufffd", "")
            if not text.strip():
                continue
            written.append(
                Segment(
                    id=self._next_id,
                    seek=draft.seek,
                    start=start,
                    end=end,
                    text=text,
                    tokens=tuple(draft.tokens),
                    temperature=draft.temperature,
                    avg_logprob=draft.avg_logprob,
                    compression_ratio=draft.compression_ratio,
                    no_speech_prob=draft.no_speech_prob,
                    words=tuple(self._words(draft.words)) if self._with_words else None,
                )
            )
            self._next_id += 1
            self._last_start = start
        return written

    def _words(self, drafts: Iterable[DraftWord]) -> Iterable[Word]:
        for draft in drafts:
            text = draft.word.replace("\ufffd", "")
            if text.strip():
                latest = max(self._duration - WORD_STEP, 0.0)
                start = self._last_word = min(max(draft.start, self._last_word), latest)
                end = min(max(draft.end, start + WORD_STEP), self._duration)
                yield Word(text, start, end, draft.probability)
