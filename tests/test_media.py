"""The decoder on good input: every format, exact samples, honest lengths, damaged files as far as they go."""

from __future__ import annotations

import csv
import io
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import av
import numpy as np
import pytest
from sensorium.processors.media import DecodedAudio, decode_audio

from .media_maker import encode, tone, wav

FORMATS = [  # container, codec, rate, codec options, FFmpeg's name for what it reads
    ("wav", "pcm_u8", 8_000, {}, "wav"),
    ("wav", "pcm_s16le", 22_050, {}, "wav"),
    ("wav", "pcm_s24le", 48_000, {}, "wav"),
    ("wav", "pcm_s32le", 44_100, {}, "wav"),
    ("wav", "pcm_f32le", 16_000, {}, "wav"),
    ("wav", "pcm_f64le", 96_000, {}, "wav"),
    ("wav", "pcm_mulaw", 8_000, {}, "wav"),
    ("wav", "pcm_alaw", 8_000, {}, "wav"),
    ("wav", "adpcm_ms", 16_000, {}, "wav"),
    ("w64", "pcm_s16le", 192_000, {}, "w64"),
    ("mp3", "libmp3lame", 44_100, {}, "mp3"),
    ("mp2", "mp2", 48_000, {}, "mp3"),
    ("flac", "flac", 11_025, {}, "flac"),
    ("ogg", "libopus", 48_000, {}, "ogg"),
    ("ogg", "flac", 32_000, {}, "ogg"),
    ("opus", "libopus", 16_000, {}, "ogg"),
    ("webm", "libopus", 24_000, {}, "matroska,webm"),
    ("matroska", "aac", 44_100, {}, "matroska,webm"),
    ("ipod", "aac", 44_100, {}, "mov,mp4,m4a,3gp,3g2,mj2"),
    ("ipod", "alac", 44_100, {}, "mov,mp4,m4a,3gp,3g2,mj2"),
    ("mp4", "aac", 24_000, {}, "mov,mp4,m4a,3gp,3g2,mj2"),
    ("mov", "pcm_s16be", 48_000, {}, "mov,mp4,m4a,3gp,3g2,mj2"),
    ("3gp", "libopencore_amrnb", 8_000, {"bit_rate": 12_200}, "mov,mp4,m4a,3gp,3g2,mj2"),
    ("adts", "aac", 48_000, {}, "aac"),
    ("aiff", "pcm_s16be", 44_100, {}, "aiff"),
    ("amr", "libopencore_amrnb", 8_000, {"bit_rate": 12_200}, "amr"),
    ("asf", "wmav2", 44_100, {"bit_rate": 96_000}, "asf"),
    ("mpegts", "aac", 48_000, {}, "mpegts"),
    ("avi", "libmp3lame", 44_100, {}, "avi"),
    ("flv", "libmp3lame", 44_100, {}, "flv"),
    ("caf", "pcm_s16le", 48_000, {}, "caf"),
    ("au", "pcm_s16be", 48_000, {}, "au"),
]


def index(media: Path) -> list[dict[str, str]]:
    with open(media / "audio" / "INDEX.tsv", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def loudest_frequency(audio: DecodedAudio) -> float:
    spectrum = np.abs(np.fft.rfft(audio.samples))
    return float(spectrum.argmax() / audio.duration)


def test_every_recording_decodes_to_its_length(media: Path) -> None:
    checked = 0
    for row in index(media):
        if row["file"].startswith("bad_"):
            continue
        audio = decode_audio((media / "audio" / row["file"]).read_bytes())
        assert audio.duration == pytest.approx(float(row["duration_s"]), abs=0.001), row["file"]
        assert audio.samples.dtype == np.float32
        assert audio.samples.ndim == 1
        assert np.abs(audio.samples).max() <= 1.0
        assert np.array_equal(audio.samples * 32768, np.round(audio.samples * 32768))
        assert not audio.truncated, row["file"]
        checked += 1
    assert checked >= 28


@pytest.mark.parametrize(("container", "codec", "rate", "options", "name"), FORMATS)
def test_formats(container: str, codec: str, rate: int, options: dict[str, int], name: str) -> None:
    audio = decode_audio(encode(tone(2, rate), container, codec, rate, **options))
    assert audio.container == name
    assert audio.duration == pytest.approx(2.0, abs=0.06)
    assert loudest_frequency(audio) == pytest.approx(440, abs=1)
    assert not audio.truncated


def test_16_bit_mono_16_khz_is_exact(media: Path) -> None:
    raw = (media / "audio" / "jfk_16k_mono.wav").read_bytes()
    data = raw[raw.index(b"data") + 8 :]
    expected = np.frombuffer(data[: len(data) // 2 * 2], "<i2").astype(np.float32) / 32768
    assert np.array_equal(decode_audio(raw).samples, expected)
    extremes = np.array([-32768, -1, 0, 1, 32767] * 100, np.int16)
    assert np.array_equal(decode_audio(wav(extremes.tobytes())).samples, extremes / np.float32(32768))


def test_wider_samples_keep_their_upper_16_bits() -> None:
    values = np.random.default_rng(0).integers(-(2**31), 2**31, 16_000).astype("<i4")
    expected = (values >> 16) / np.float32(32768)
    assert np.array_equal(decode_audio(wav(values.tobytes(), bits=32)).samples, expected)
    packed = values.view(np.uint8).reshape(-1, 4)[:, 1:].tobytes()
    assert np.array_equal(decode_audio(wav(packed, bits=24)).samples, expected)


def test_float_beyond_full_scale_is_clipped() -> None:
    values = np.array([0.5, -0.5, 1.0, 2.0, -1.0, -9.0] * 200, "<f4")
    audio = decode_audio(wav(values.tobytes(), form=3, bits=32))
    assert audio.samples[:6].tolist() == [0.5, -0.5, 32767 / 32768, 32767 / 32768, -1.0, -1.0]


def test_stereo_is_the_mean_of_both_channels() -> None:
    both = np.random.default_rng(0).integers(-32768, 32768, (16_000, 2)).astype("<i2")
    audio = decode_audio(wav(both.tobytes(), channels=2))
    assert np.abs(audio.samples * 32768 - both.mean(axis=1)).max() <= 0.5  # rounding to 16 bits


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 64, 255])
@pytest.mark.parametrize("bits", [8, 16, 32])
def test_any_number_of_channels(channels: int, bits: int) -> None:
    values = (tone(1, level=0.5) / 32768.0)[:, None].repeat(channels, axis=1)
    if bits == 8:
        data = np.round(values * 127 + 128).astype(np.uint8).tobytes()
    else:
        data = (values * (2 ** (bits - 1) - 1)).astype(f"<i{bits // 8}").tobytes()
    audio = decode_audio(wav(data, channels=channels, bits=bits))
    assert audio.duration == 1.0
    # All channels alike: every weighting that neither clips nor adds gives the tone back.
    assert np.abs(audio.samples - tone(1, level=0.5) / 32768).max() < (0.01 if bits == 8 else 0.001)


@pytest.mark.parametrize("rate", [1_000, 8_000, 11_025, 22_050, 44_100, 48_000, 96_000, 192_000, 384_000])
def test_resampling_keeps_time_and_level(rate: int) -> None:
    audio = decode_audio(wav(tone(1, rate, 200.0).tobytes(), rate=rate))
    assert audio.duration == pytest.approx(1.0, abs=1.5 / rate)
    expected = tone(1, 16_000, 200.0) / 32768
    middle = slice(1_600, 14_400)
    assert np.abs(audio.samples[middle] - expected[middle]).max() < 0.002


def test_what_is_above_8_khz_does_not_fold_back() -> None:
    audio = decode_audio(wav(tone(1, 48_000, 15_000.0).tobytes(), rate=48_000))
    assert np.abs(audio.samples[800:-800]).max() < 0.001


def test_sources_of_every_kind(media: Path, tmp_path: Path) -> None:
    path = media / "audio" / "jfk.mp3"
    data = path.read_bytes()
    expected = decode_audio(data).samples
    misnamed = tmp_path / "notes.txt"
    misnamed.write_bytes(data)
    with path.open("rb") as opened, tempfile.SpooledTemporaryFile() as spooled:
        spooled.write(data)  # and the position stays at its end
        opened.seek(1_000)
        for source in (bytearray(data), memoryview(data), io.BytesIO(data), path, misnamed, opened, spooled):
            assert np.array_equal(decode_audio(source).samples, expected)
        assert not opened.closed
        assert not spooled.closed
    with pytest.raises(OSError, match="absent"):
        decode_audio(tmp_path / "absent.wav")


def test_the_first_audio_stream_is_taken() -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as output:
        streams = [output.add_stream("pcm_s16le", rate=16_000, layout="mono") for _ in range(2)]
        for stream, frequency in zip(streams, (300.0, 900.0), strict=True):
            frame = av.AudioFrame.from_ndarray(tone(1, frequency=frequency)[None], "s16", "mono")
            frame.sample_rate = 16_000
            output.mux(stream.encode(frame))
    assert loudest_frequency(decode_audio(file.getvalue())) == pytest.approx(300, abs=1)


def test_time_counts_from_the_first_sample_and_gaps_are_closed() -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as output:
        stream = output.add_stream("pcm_s16le", rate=16_000, layout="mono")
        for start in (100, 200):  # seconds
            frame = av.AudioFrame.from_ndarray(tone(1)[None], "s16", "mono")
            frame.sample_rate = 16_000
            frame.pts = start * 16_000
            output.mux(stream.encode(frame))
    assert decode_audio(file.getvalue()).duration == 2.0


def test_a_stream_that_changes_its_kind_is_decoded_whole() -> None:
    first = encode(tone(1, 44_100), "adts", "aac", 44_100)
    second = encode(np.stack([tone(1, 48_000)] * 2), "adts", "aac", 48_000, layout="stereo")
    audio = decode_audio(first + second)
    assert audio.duration == pytest.approx(2.1, abs=0.1)
    assert loudest_frequency(audio) == pytest.approx(440, abs=1)


@pytest.mark.parametrize("size", [0, 0x7FFFFFFF, 0xFFFFFFF0, 0xFFFFFFFF])
def test_a_streamed_wav_with_no_true_length_decodes(size: int) -> None:
    audio = decode_audio(wav(tone(2).tobytes(), size=size))
    assert audio.duration == 2.0


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("jfk_16k_mono.wav", 5.4),
        ("num123_mono_24bit_44k.wav", 1.3),
        ("fr_dictee.aiff", 1.2),
        ("jfk.mp3", 5.3),
        ("fw_multilingual_en_de.mp3", 29.0),
        ("jfk_44k_stereo.flac", 5.0),
        ("autocut_test003.mkv", 5.0),
    ],
)
def test_a_truncated_file_yields_what_is_there(media: Path, name: str, kept: float) -> None:
    data = (media / "audio" / name).read_bytes()
    whole = decode_audio(data).samples
    half = decode_audio(data[: len(data) // 2]).samples
    assert len(half) >= kept * 16_000
    common = len(half) - 1_600
    assert np.abs(half[:common] - whole[:common]).max() < 0.01


@pytest.mark.parametrize(
    ("name", "kept"), [("jfk.mp3", 9.0), ("jfk_44k_stereo.flac", 9.0), ("autocut_test003.mkv", 8.0)]
)
def test_damage_in_the_middle_costs_only_that_part(media: Path, name: str, kept: float) -> None:
    data = bytearray((media / "audio" / name).read_bytes())
    low, high = len(data) * 4 // 10, len(data) * 5 // 10
    data[low:high] = np.random.default_rng(0).bytes(high - low)
    audio = decode_audio(data)
    assert audio.truncated
    whole = decode_audio(media / "audio" / name)
    assert kept <= audio.duration <= whole.duration
    # The end is still there, at another place than before.
    end = audio.samples[-12_000:-4_000]
    places = np.lib.stride_tricks.sliding_window_view(whole.samples[-24_000:], len(end))
    likeness = places @ end / np.linalg.norm(places, axis=1) / np.linalg.norm(end)
    assert likeness.max() > 0.95


def test_a_missing_end_is_reported_where_the_header_tells(media: Path) -> None:
    data = (media / "audio" / "fr_dictee.aiff").read_bytes()
    assert decode_audio(data[: len(data) // 2]).truncated


def test_threads_do_not_disturb_each_other(media: Path) -> None:
    paths = [media / "audio" / row["file"] for row in index(media) if not row["file"].startswith("bad_")]
    alone = [decode_audio(path).samples for path in paths]
    with ThreadPoolExecutor(8) as pool:
        together = [audio.samples for audio in pool.map(decode_audio, paths)]
    assert all(np.array_equal(a, b) for a, b in zip(alone, together, strict=True))
