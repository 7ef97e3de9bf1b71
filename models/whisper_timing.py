"""Word times from cross-attention, and what they tell of hallucinated text.

While the decoder writes a word, a few of its cross-attention heads look at the sound of that word; dynamic
time warping over their scores gives each token a time (openai-whisper's timing and transcribe).
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import librosa
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..processors.audio import FRAMES_PER_SECOND, N_FRAMES, TOKENS_PER_SECOND
from .whisper_languages import SPACELESS_LANGUAGES
from .whisper_segments import FRAMES_PER_STEP, DraftSegment, DraftWord, frame_seconds, last_end
from .whisper_tokenizer import WhisperTokenizer

MEDIAN_WIDTH = 7  # encoder positions, 0.14 s
# `in` tests below are substring tests, so an empty word counts as punctuation too, as in the reference.
PREPENDED = "\"'“¿([{-"
APPENDED = "\"'.。,，!！?？:：”)]}、"
SENTENCE_ENDS = ".。!！?？"
MAX_MEDIAN_DURATION = 0.7  # seconds
SEGMENT_TOLERANCE = 0.5  # seconds that a segment's edge word may lie outside of it


@dataclass
class WordTiming:
    """A word and its tokens; seconds from the window's start."""

    word: str
    tokens: list[int]
    start: float
    end: float
    probability: float


def split_characters(tokenizer: WhisperTokenizer, ids: Sequence[int]) -> list[tuple[str, list[int]]]:
    """The shortest runs of tokens that are whole characters. Bytes broken for good stand as U+FFFD."""
    whole = tokenizer.decode(ids)
    pieces: list[tuple[str, list[int]]] = []
    offset = 0
    current: list[int] = []
    for token in ids:
        current.append(token)
        text = tokenizer.decode(current)
        broken = text.find("\ufffd")
        # A U+FFFD that the whole text has too will not be completed by a later token.
        if broken < 0 or whole[offset + broken] == "\ufffd":
            pieces.append((text, current))
            offset += len(text)
            current = []
    return pieces


def split_words(
    tokenizer: WhisperTokenizer, ids: Sequence[int], language: str
) -> list[tuple[str, list[int]]]:
    """Words with their tokens: a space or a punctuation mark begins a new one; control tokens stand alone."""
    pieces = split_characters(tokenizer, ids)
    if language in SPACELESS_LANGUAGES:
        return pieces
    words: list[tuple[str, list[int]]] = []
    for text, tokens in pieces:
        begins = tokens[0] >= tokenizer.eot or text.startswith(" ") or text.strip() in string.punctuation
        if begins or not words:
            words.append((text, tokens))
        else:
            words[-1] = (words[-1][0] + text, words[-1][1] + tokens)
    return words


def attention_matrix(scores: Tensor, prefix: int, size: int) -> Tensor:
    """Normalised attention of each predicted token to each encoder position of the window's audio.

    scores: float32 [heads, prompt tokens, encoder_len], q·k before softmax. prefix: prompt tokens before
    <|notimestamps|>. size: frames of audio. Returns [text tokens + 1, size // 2], <|endoftext|> last.
    """
    weights = scores[:, :, : size // FRAMES_PER_STEP].float().softmax(dim=-1)
    std, mean = torch.std_mean(weights, dim=-2, keepdim=True, unbiased=False)
    # A head that gives a position the same weight (mostly none at all) for every token tells nothing there.
    weights = torch.where(std > 0, (weights - mean) / std, 0.0)
    # Head by head, so that a head's weights stay in the processor's cache.
    return torch.stack([median_filter(head, MEDIAN_WIDTH) for head in weights[:, prefix:-1]]).mean(dim=0)


def median_filter(values: Tensor, width: int) -> Tensor:
    """Running median over the last axis of [tokens, frames], mirrored at its ends; odd `width`."""
    half, frames = width // 2, values.shape[-1]
    if frames <= half:
        return values
    mirrored = F.pad(values, (half, half), mode="reflect")
    waiting = [mirrored[..., shift : shift + frames] for shift in range(width)]
    # Among half + 2 of the values neither the least nor the greatest can be the median of all: drop both, take
    # in the next, and so on. A tenth of the time that sorting every window takes.
    kept = [waiting.pop() for _ in range(half + 2)]
    while len(kept := _without_extremes(kept)) > 1:
        kept.append(waiting.pop())
    return kept[0]


def _without_extremes(values: Sequence[Tensor]) -> list[Tensor]:
    """Elementwise, all of the values but the least and the greatest; at least three."""
    least, larger = values[0], []
    for value in values[1:]:
        larger.append(torch.maximum(least, value))
        least = torch.minimum(least, value)
    greatest, middle = larger[0], []
    for value in larger[1:]:
        middle.append(torch.minimum(greatest, value))
        greatest = torch.maximum(greatest, value)
    return middle


def token_times(matrix: Tensor) -> np.ndarray:
    """Seconds, float64 [rows], at which the best monotonic path through [rows, positions] enters each row."""
    _, path = librosa.sequence.dtw(C=-matrix.double().cpu().numpy())
    rows, positions = path[::-1].T
    return positions[np.diff(rows, prepend=-1) > 0] / TOKENS_PER_SECOND


def warm_up() -> None:
    """Compiles the time warping, which takes seconds, ahead of the first use."""
    token_times(torch.eye(3))


def align_words(
    tokenizer: WhisperTokenizer,
    language: str,
    text_ids: Sequence[int],
    scores: Tensor,
    probabilities: Tensor,
    prefix: int,
    size: int,
) -> list[WordTiming]:
    """Words of a window's text with their times.

    scores, prefix, size: as in `attention_matrix`. probabilities: float32 [len(text_ids)], of each token.
    """
    words = split_words(tokenizer, [*text_ids, tokenizer.eot], language)[:-1]
    if not words or size < FRAMES_PER_STEP:
        return []
    times = token_times(attention_matrix(scores, prefix, size)).tolist()
    token_probabilities = probabilities.tolist()
    timings = []
    first = 0
    for text, tokens in words:
        last = first + len(tokens)
        probability = float(np.mean(token_probabilities[first:last]))
        timings.append(WordTiming(text, tokens, times[first], times[last], probability))
        first = last
    return timings


def merge_punctuation(timings: Sequence[WordTiming]) -> None:
    """Moves opening marks into the next word and closing marks into the one before; leaves "" behind."""
    following = len(timings) - 1
    for index in range(len(timings) - 2, -1, -1):
        mark, word = timings[index], timings[following]
        if mark.word.startswith(" ") and mark.word.strip() in PREPENDED:
            word.word, word.tokens = mark.word + word.word, mark.tokens + word.tokens
            mark.word, mark.tokens = "", []
        else:
            following = index

    previous = 0
    for index in range(1, len(timings)):
        word, mark = timings[previous], timings[index]
        if not word.word.endswith(" ") and mark.word in APPENDED:
            word.word, word.tokens = word.word + mark.word, word.tokens + mark.tokens
            mark.word, mark.tokens = "", []
        else:
            previous = index


def _median_duration(timings: Iterable[WordTiming]) -> float:
    durations = [timing.end - timing.start for timing in timings if timing.end != timing.start]
    return min(MAX_MEDIAN_DURATION, float(np.median(durations))) if durations else 0.0


def _shorten_at_sentence_ends(timings: Sequence[WordTiming], longest: float) -> None:
    for previous, timing in itertools.pairwise(timings):
        if timing.end - timing.start > longest:
            if timing.word in SENTENCE_ENDS:
                timing.end = timing.start + longest
            elif previous.word in SENTENCE_ENDS:
                timing.start = timing.end - longest


def add_word_times(
    segments: Sequence[DraftSegment], timings: list[WordTiming], eot: int, last_speech: float
) -> None:
    """Gives the segments of one window their words, and start and end by their first and last word.

    Words that pauses made too long are shortened. last_speech: end of the speech before, seconds. Changes
    `segments` and `timings`.
    """
    median = _median_duration(timings)
    longest = 2 * median
    if median > 0:
        _shorten_at_sentence_ends(timings, longest)
    merge_punctuation(timings)

    offset = frame_seconds(segments[0].seek)
    remaining = iter(timings)
    for segment in segments:
        missing = sum(token < eot for token in segment.tokens)
        words = segment.words = []
        while missing > 0 and (timing := next(remaining, None)) is not None:
            if timing.word:
                start, end = round(offset + timing.start, 2), round(offset + timing.end, 2)
                words.append(DraftWord(timing.word, start, end, timing.probability))
            missing -= len(timing.tokens)
        if words:
            _shorten_after_pause(words, median, last_speech)
            _reconcile_edges(segment, median)
            last_speech = segment.end


def _shorten_after_pause(words: Sequence[DraftWord], median: float, last_speech: float) -> None:
    """The first two words after a pause take at most twice the median duration each."""
    longest = 2 * median
    first, second = words[0], words[1] if len(words) > 1 else None
    if first.end - last_speech <= 4 * median:
        return
    if first.end - first.start > longest or (second and second.end - first.start > 2 * longest):
        if second and second.end - second.start > longest:
            first.end = second.start = max(second.end / 2, second.end - longest)
        first.start = max(0.0, first.end - longest)


def _reconcile_edges(segment: DraftSegment, median: float) -> None:
    """A segment takes the times of its outer words, unless such a word reaches far out of the segment."""
    first, last = segment.words[0], segment.words[-1]
    if first.start < segment.start - SEGMENT_TOLERANCE and segment.start < first.end:
        first.start = max(0.0, min(first.end - median, segment.start))
    else:
        segment.start = first.start

    if last.start < segment.end and segment.end + SEGMENT_TOLERANCE < last.end:
        last.end = max(last.start + median, segment.end)
    else:
        segment.end = last.end


@dataclass(frozen=True)
class Resume:
    """Where decoding goes on (frame), and how many of the window's segments are kept.

    discard_window: forget the window altogether: nothing of it is emitted or remembered.
    """

    seek: int
    kept: int
    discard_window: bool = False


def _oddity(word: DraftWord) -> float:
    duration = word.end - word.start
    improbable = 1.0 if word.probability < 0.15 else 0.0
    return improbable + max(0.0, 0.133 - duration) * 15 + max(0.0, duration - 2.0)


def is_anomalous(segment: DraftSegment | None) -> bool:
    """Whether its first words are improbable, or so short or long that nobody spoke them."""
    if segment is None or not segment.words:
        return False
    words = [word for word in segment.words if word.word not in PREPENDED + APPENDED][:8]
    score = sum(_oddity(word) for word in words)
    return score >= 3 or score + 0.01 >= len(words)


def skip_hallucinations(
    segments: Sequence[DraftSegment],
    *,
    seek: int,
    size: int,
    next_seek: int,
    single_ending: bool,
    threshold: float,
    last_speech: float,
    content_frames: int,
) -> Resume:
    """Skips silence longer than `threshold` seconds next to text that looks made up.

    segments: one window's, with words. seek, size: the window's first frame and frames of audio.
    """
    window_start, audio_end = frame_seconds(seek), frame_seconds(seek + size)
    window_end = frame_seconds(seek + N_FRAMES)
    words_end = last_end(segments)
    if not single_ending and words_end is not None and words_end > window_start:
        long_rest = window_end - words_end > threshold
        next_seek = round(words_end * FRAMES_PER_SECOND) if long_rest else seek + size

    worded = [index for index, segment in enumerate(segments) if segment.words]
    if worded and is_anomalous(segments[worded[0]]):
        gap = segments[worded[0]].start - window_start
        if gap > threshold:
            return Resume(seek + round(gap * FRAMES_PER_SECOND), 0, discard_window=True)

    before = last_speech
    for index, following in itertools.zip_longest(worded, worded[1:]):
        segment = segments[index]
        if is_anomalous(segment):
            after = segments[following] if following is not None else None
            next_start = after.words[0].start if after else audio_end
            silence_before = (
                segment.start - before > threshold
                or segment.start < threshold
                or segment.start - window_start < 2.0
            )
            silence_after = (
                next_start - segment.end > threshold or is_anomalous(after) or window_end - segment.end < 2.0
            )
            if silence_before and silence_after:
                next_seek = round(max(window_start + 1, segment.start) * FRAMES_PER_SECOND)
                if frame_seconds(content_frames) - segment.end < threshold:
                    next_seek = content_frames
                return Resume(next_seek, index)
        before = segment.end
    return Resume(next_seek, len(segments))
