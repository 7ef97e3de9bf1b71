"""Programs run on openai-whisper's own model: what differs from its transcribe() is the program's fault."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sensorium.models.base import GenerationOutput
from sensorium.models.speech import Progress, TranscriptionOptions
from sensorium.models.weights import open_whisper, tokenizer_file
from sensorium.models.whisper_processor import WhisperProcessor
from sensorium.models.whisper_program import WhisperProgram
from sensorium.models.whisper_rules import decoding_rules
from sensorium.models.whisper_seek import WhisperAudio, WhisperSpec, WhisperThresholds
from sensorium.models.whisper_tokenizer import WhisperTokenizer
from sensorium.processors.audio import window
from whisper.model import Whisper

from .oracle import assert_equal, samples
from .reference_model import load_reference
from .reference_runner import ReferenceRunner, attempts, reference_transcribe
from .tiny_whisper import write_tiny_whisper

DEFAULT = WhisperThresholds()
PLAIN = TranscriptionOptions(vad_filter=False)


@pytest.fixture(scope="module")
def tiny_en(whisper_tiny_en_dir: Path) -> Whisper:
    return load_reference(whisper_tiny_en_dir)


@pytest.fixture(scope="module")
def random_dir(whisper_base_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A multilingual model of random weights: hundreds of steps a second, and every kind of odd output."""
    folder = tmp_path_factory.mktemp("random")
    # The reference knows no other ratio of widths. A short context keeps every window short.
    sizes = {"encoder_ffn_dim": 256, "decoder_ffn_dim": 256, "max_target_positions": 64}
    return write_tiny_whisper(folder, tokenizer_file(whisper_base_dir), seed=1, **sizes)


@pytest.fixture(scope="module")
def noise() -> np.ndarray:
    """33 s: a full window and a short one."""
    return (np.random.default_rng(0).standard_normal(33 * 16000) * 0.1).astype(np.float32)


def check(
    directory: Path,
    model: Whisper,
    audio: np.ndarray,
    options: TranscriptionOptions,
    thresholds: WhisperThresholds = DEFAULT,
) -> tuple[ReferenceRunner, WhisperProgram]:
    """Runs both on the same model and holds every segment of ours against the reference's."""
    processor = WhisperProcessor(open_whisper(directory)[0], tokenizer_file(directory), "m", thresholds)
    program = processor.transcription(audio, options)
    runner = ReferenceRunner(model)
    result = runner.run(program)
    expected = reference_transcribe(model, audio, options, attempts(runner.requests), thresholds)
    # Of windows of a single encoder position the reference's alignment makes 0 / 0.
    limit = len(audio) // 160 - 4
    assert_equal(
        [segment for segment in program.raw_segments if segment.seek <= limit],
        [segment for segment in expected["segments"] if segment["seek"] <= limit],
    )
    assert len(program.raw_segments) == len(expected["segments"])
    assert result.language == expected["language"]
    return runner, program


def test_a_recording_with_words(whisper_tiny_en_dir: Path, tiny_en: Whisper, media: Path) -> None:
    audio = samples(media / "audio/jfk_16k_mono.wav")
    runner, program = check(whisper_tiny_en_dir, tiny_en, audio, replace(PLAIN, word_timestamps=True))
    assert len(runner.encoded) == 1  # decoding and alignment share the encoder's output
    assert "fellow Americans" in program.result().text
    assert runner.events[-1].seconds == 11.0


@pytest.mark.slow
@pytest.mark.parametrize("silence_threshold", [None, 1.5])
def test_a_long_recording_with_pauses(
    whisper_tiny_en_dir: Path, tiny_en: Whisper, media: Path, silence_threshold: float | None
) -> None:
    """75 s of several speakers with pauses of 2 to 9 s: windows begin and end inside them."""
    names = ("jfk.mp3", "oai_meeting.wav", "f5_ref_en.wav", "oai_houseplant_care.mp3")
    pieces = [np.zeros(2 * 16000, np.float32)]
    for name, pause in zip(names, (5, 9, 4, 3), strict=True):
        pieces += [samples(media / "audio" / name), np.zeros(pause * 16000, np.float32)]
    options = replace(
        PLAIN,
        word_timestamps=True,
        hallucination_silence_threshold=silence_threshold,
        prompt="Speeches and calls.",
    )
    _, program = check(whisper_tiny_en_dir, tiny_en, np.concatenate(pieces)[: 75 * 16000], options)
    assert len({segment.seek for segment in program.raw_segments}) >= 3


def test_a_found_language_shares_the_window_of_a_long_file(random_dir: Path, noise: np.ndarray) -> None:
    runner, _ = check(
        random_dir, load_reference(random_dir), noise, replace(PLAIN, temperature_fallback=False)
    )
    hashes = [request.inputs.mm_features[0].mm_hash for request in runner.requests]
    assert runner.requests[0].inputs.prompt_token_ids == (50258,)
    assert hashes[0] == hashes[1]
    assert len(runner.encoded) == len(set(hashes))


@pytest.mark.parametrize(
    "options",
    [
        TranscriptionOptions(language="en", temperature=0.8, seed=5),
        TranscriptionOptions(language="ja", temperature=1.0, best_of=3, seed=2),
        TranscriptionOptions(language="en", beam_size=3, temperature_fallback=False, word_timestamps=True),
        TranscriptionOptions(language="en", temperature_fallback=False, hallucination_silence_threshold=1.0),
        TranscriptionOptions(
            language="de", task="translate", prompt="Ask not " * 150, temperature_fallback=False
        ),
        TranscriptionOptions(
            language="en",
            temperature_fallback=False,
            clip_timestamps=(1.0, 8.123, 20.005),
            condition_on_previous_text=False,
        ),
    ],
    ids=["sampled ladder", "best of", "beam", "silence rule", "translation and prompt", "clips"],
)
def test_every_way_of_decoding(random_dir: Path, noise: np.ndarray, options: TranscriptionOptions) -> None:
    check(random_dir, load_reference(random_dir), noise, replace(options, vad_filter=False))


def test_the_ladder_is_climbed_and_asks_for_the_probe_once(random_dir: Path, noise: np.ndarray) -> None:
    options = TranscriptionOptions(language="en", vad_filter=False, temperature=0.6)
    strict = WhisperThresholds(compression_ratio=0.0)
    runner, _ = check(random_dir, load_reference(random_dir), noise[: 16000 * 5], options, strict)
    first = [request for request in runner.requests if request.key.seek == 0]
    assert [request.params.temperature for request in first] == [0.6, 0.8, 1.0]
    assert [request.params.probe is not None for request in first] == [True, False, False]
    assert len({request.params.seed for request in first}) == 3


def test_windows_are_padded_with_zeros_and_named_by_content(random_dir: Path) -> None:
    tokenizer = WhisperTokenizer(random_dir / "tokenizer.json", 51865)
    spec = WhisperSpec("one", tokenizer, decoding_rules(tokenizer), ((0, 0),))
    mel = torch.randn(80, 9000, generator=torch.Generator().manual_seed(0))
    mel[:, 3000:6000] = mel[:, :3000]
    audio = WhisperAudio(mel, 60.0, spec)
    feature = audio.feature(100, 500)
    assert torch.equal(feature.data()[:, :500], mel[:, 100:600])
    assert not feature.data()[:, 500:].any()
    assert feature.data().shape == (80, 3000)
    assert feature.num_embeds == 1500
    assert audio.feature(0, 3000).mm_hash == audio.feature(3000, 3000).mm_hash
    assert audio.feature(0, 3000).mm_hash != audio.feature(0, 2999).mm_hash
    other = WhisperAudio(mel, 60.0, replace(spec, name="two"))
    assert audio.feature(0, 3000).mm_hash != other.feature(0, 3000).mm_hash
    assert torch.equal(audio.feature(0, 3000).data(), window(mel, 0, 3000))


def test_lanes_run_together_and_come_out_in_order(random_dir: Path) -> None:
    """Whatever order the engine answers in: same result, and progress in the order of time."""
    tokenizer = WhisperTokenizer(random_dir / "tokenizer.json", 51865)
    spec = WhisperSpec("m", tokenizer, decoding_rules(tokenizer), ((0, 0),), n_text_ctx=64)
    mel = torch.zeros(80, 9000 + 3000).normal_(generator=torch.Generator().manual_seed(0))
    options = TranscriptionOptions(language="en", temperature_fallback=False, prompt="Names.")
    lanes = [[(0, 800)], [(900, 1500), (1700, 2000)], [(2400, 2600)]]
    model = load_reference(random_dir)
    results, orders = [], []
    for newest_first in (False, True):
        program = WhisperProgram(WhisperAudio(mel, 90.0, spec), options, "en", (0, 3000), lanes)
        assert len(program.start()) == 3
        program = WhisperProgram(WhisperAudio(mel, 90.0, spec), options, "en", (0, 3000), lanes)
        runner = ReferenceRunner(model)
        results.append(runner.run(program, newest_first))
        orders.append([request.key.lane for request in runner.requests])
        seconds = [event.seconds for event in runner.events]
        assert seconds == sorted(seconds)
        assert seconds[-1] == 90.0
        shown = [segment for event in runner.events for segment in event.segments]
        assert tuple(shown) == results[-1].segments
        prompts = {request.key.lane: request.inputs.prompt_token_ids for request in reversed(runner.requests)}
        assert len({prompts[lane] for lane in range(3)}) == 1  # the prompt primes each lane
    assert orders[0] != orders[1]
    assert results[0] == results[1]


def test_without_lanes_there_is_no_work(random_dir: Path) -> None:
    tokenizer = WhisperTokenizer(random_dir / "tokenizer.json", 51865)
    spec = WhisperSpec("m", tokenizer, decoding_rules(tokenizer), ((0, 0),))
    audio = WhisperAudio(torch.zeros(80, 3000), 5.0, spec)
    for wanted, language in ((None, "en"), ("fr", "fr")):
        program = WhisperProgram(audio, TranscriptionOptions(), wanted, (0, 3000), [[]])
        assert program.start() == []
        assert program.take_events() == [Progress(5.0, ())]
        assert program.take_events() == []
        result = program.result()
        assert (result.text, result.segments, result.language, result.duration) == ("", (), language, 5.0)


def test_an_engine_that_forgets_the_probe_is_found_out(random_dir: Path, noise: np.ndarray) -> None:
    processor = WhisperProcessor(open_whisper(random_dir)[0], random_dir / "tokenizer.json", "m")
    program = processor.transcription(noise, PLAIN)
    (request,) = program.start()
    with pytest.raises(AssertionError, match="probe"):
        program.accept(GenerationOutput(request.key, ()))
