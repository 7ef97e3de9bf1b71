"""Whisper's long-form transcription as a program over the engine: language, lanes, results in order."""

from __future__ import annotations

from collections.abc import Sequence

from ..processors.audio import N_FRAMES
from ..processors.inputs import MultiModalInputs
from .base import GenerationOutput, GenerationRequest, SamplingParams
from .speech import Progress, Segment, Transcription, TranscriptionOptions
from .whisper_rules import LanguageProbe
from .whisper_seek import MISSING_PROBE, SeekLoop, UserPrompt, WhisperAudio, Work, WorkKey
from .whisper_segments import Clip, DraftSegment, SegmentWriter, frame_seconds

NO_SPEECH_LANGUAGE = "en"  # what a file without any speech is said to be in


class WhisperProgram:
    """Finds the language if it must, runs the lanes side by side, hands out segments in time order."""

    def __init__(
        self,
        audio: WhisperAudio,
        options: TranscriptionOptions,
        language: str | None,
        language_window: Clip,
        lanes: Sequence[Sequence[Clip]],
    ) -> None:
        """language: a code, or None to detect it on `language_window` (seek, size).

        lanes: ascending clips, one list for each chain of windows, in the order of time; may be empty.
        """
        self._audio = audio
        self._options = options
        self._language = language
        self._language_window = language_window
        self._prompt = UserPrompt.of(options, audio.spec)
        self._lane_clips = [clips for clips in lanes if clips]
        self._loops: list[SeekLoop] = []
        self._work: dict[int, Work] = {}
        self._next_lane = 0
        self._writer = SegmentWriter(audio.spec.tokenizer, audio.duration, options.word_timestamps)
        self._events: list[Progress] = []
        self._seconds = 0.0
        self._segments: list[Segment] = []
        self.raw_segments: list[DraftSegment] = []
        for clips in self._lane_clips:  # hashed here, in a worker's time rather than in the engine's
            start, end = clips[0]
            audio.feature(start, min(N_FRAMES, end - start))

    def start(self) -> list[GenerationRequest]:
        if not self._lane_clips:
            self._finish()
            return []
        if self._language is None:
            return [self._language_request()]
        return self._open_lanes(self._language)

    def accept(self, output: GenerationOutput) -> list[GenerationRequest]:
        key = output.key
        assert isinstance(key, WorkKey)
        if key.step == "language":
            assert output.probe is not None, MISSING_PROBE
            self._language = self._audio.spec.tokenizer.language_codes[int(output.probe[0].argmax())]
            return self._open_lanes(self._language)
        requests = self._advance(key.lane, output)
        self._collect()
        return requests

    def take_events(self) -> list[Progress]:
        events, self._events = self._events, []
        return events

    def result(self) -> Transcription:
        return Transcription(
            task=self._options.task,
            language=self._language or NO_SPEECH_LANGUAGE,
            duration=self._audio.duration,
            text="".join(segment.text for segment in self._segments),
            segments=tuple(self._segments),
        )

    def _language_request(self) -> GenerationRequest:
        tokenizer = self._audio.spec.tokenizer
        languages = tokenizer.language_tokens
        return GenerationRequest(
            WorkKey(0, "language", self._language_window[0]),
            MultiModalInputs((tokenizer.sot,), (self._audio.feature(*self._language_window),)),
            SamplingParams(max_tokens=0, probe=LanguageProbe(0, languages[0], len(languages))),
        )

    def _open_lanes(self, language: str) -> list[GenerationRequest]:
        requests = []
        for lane, clips in enumerate(self._lane_clips):
            loop = SeekLoop(self._audio, self._options, language, clips, lane, self._prompt)
            self._loops.append(loop)
            self._work[lane] = loop.run()
            requests.append(next(self._work[lane]))
        return requests

    def _advance(self, lane: int, output: GenerationOutput) -> list[GenerationRequest]:
        try:
            return [self._work[lane].send(output)]
        except StopIteration:
            del self._work[lane]
            return []

    def _collect(self) -> None:
        """Publishes finished windows up to the first lane that still has some to come."""
        while self._next_lane < len(self._loops):
            loop = self._loops[self._next_lane]
            for done in loop.done:
                self.raw_segments.extend(done.segments)
                self._publish(frame_seconds(done.next_seek), self._writer.write(done.segments))
            loop.done.clear()
            if self._next_lane in self._work:
                return
            self._next_lane += 1
        self._finish()

    def _finish(self) -> None:
        if self._seconds < self._audio.duration:
            self._publish(self._audio.duration, [])

    def _publish(self, seconds: float, segments: list[Segment]) -> None:
        self._seconds = min(self._audio.duration, max(self._seconds, seconds))
        self._segments.extend(segments)
        self._events.append(Progress(self._seconds, tuple(segments)))
