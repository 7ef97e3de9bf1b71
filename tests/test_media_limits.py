"""The decoder on bad input: documented errors only, quickly, in little memory, opening nothing else."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sensorium.processors.media import (
    DecodedAudio,
    EmptyMedia,
    MediaError,
    MediaLimits,
    MediaTooLarge,
    MediaTooLong,
    NoAudioStream,
    UndecodableMedia,
    decode_audio,
)

from .media_maker import encode, tone, wav

MEMORY_OVER_200_FILES = """
import sys
from pathlib import Path
from sensorium.processors.media import MediaError, decode_audio

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

folder = Path(sys.argv[1])
names = ("jfk.mp3", "jfk_441khz.m4a", "autocut_test003.mkv", "zh_chinese.flac", "auditok_dtmf.ogg")
good = [(folder / "audio" / name).read_bytes() for name in names]
bad = [b"", b"RIFF", b"text" * 5000, (folder / "images" / "cat_chelsea.png").read_bytes()]
bad += [data[: len(data) // 3] for data in good] + [data[4000:] for data in good]
bad += [data[:2000] + bytes(3000) + data[5000:] for data in good]

def run(count):
    refused = 0
    for i in range(count):
        try:
            decode_audio(bad[i % len(bad)])
        except MediaError:
            refused += 1
    return refused

run(2 * len(bad))
before = resident()
refused = run(200)
print(resident() - before, refused)
"""
MEMORY_OF_A_BOMB = """
import resource, sys
from pathlib import Path
from sensorium.processors.media import MediaLimits, MediaTooLong, decode_audio
data = Path(sys.argv[1]).read_bytes()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    decode_audio(data, MediaLimits(max_seconds=float(sys.argv[2])))
except MediaTooLong as error:
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Fails when the block takes longer, in processor time: other work on the machine does not count."""
    start = time.thread_time()
    yield
    assert time.thread_time() - start < seconds


def outcome(data: bytes) -> DecodedAudio | str:
    """The audio, or the name of the documented error, within a second."""
    with at_most(1.0):
        try:
            audio = decode_audio(data)
        except MediaError as error:
            failure = error
        else:
            assert np.isfinite(audio.samples).all()
            assert len(audio.samples) > 0
            return audio
    assert 10 < len(str(failure)) < 200
    assert "\n" not in str(failure)
    return type(failure).__name__


def repeated_opus(seconds: int, container: str, options: dict[str, str] | None = None) -> bytes:
    """Hours of one encoded 120 ms packet of silence."""
    file = io.BytesIO()
    with av.open(file, "w", format=container, options=options or {}) as output:
        stream = output.add_stream(
            "libopus",
            rate=16_000,
            layout="mono",
            options={"frame_duration": "120", "b": "6000", "vbr": "off"},
        )
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1920), np.int16), "s16", "mono")
        frame.sample_rate = 16_000
        packets: list[av.Packet] = []
        while not packets:
            packets = stream.encode(frame)
        payload, base = bytes(packets[0]), packets[0].time_base
        step = round(0.12 / base)
        for i in range(round(seconds / 0.12)):
            packet = av.Packet(payload)
            packet.stream, packet.time_base = stream, base
            packet.pts = packet.dts = i * step
            packet.duration = step
            output.mux(packet)
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("audio/bad_ps_bad.wav", UndecodableMedia),
        ("audio/bad_ps_null.wav", EmptyMedia),
        ("audio/INDEX.tsv", UndecodableMedia),
        ("images/nasa_rotated.mp4", NoAudioStream),
        ("images/cat_chelsea.png", UndecodableMedia),
        ("images/baiona_rgb.jpg", UndecodableMedia),
        ("images/animated.gif", UndecodableMedia),
        ("images/docling.webp", UndecodableMedia),
        ("images/phototest.tif", UndecodableMedia),
        ("images/blanktext.pdf", UndecodableMedia),
    ],
)
def test_files_without_sound(media: Path, name: str, error: type[MediaError]) -> None:
    with at_most(1.0), pytest.raises(error):
        decode_audio(media / name)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", EmptyMedia),
        (wav(b""), EmptyMedia),
        (wav(b"")[:30], UndecodableMedia),
        (b"\0", UndecodableMedia),
        (b"This is not audio.\n" * 1000, UndecodableMedia),
        (b"\0" * 100_000, UndecodableMedia),
        (b"1\n00:00:00,000 --> 00:00:02,000\nHello\n\n", UndecodableMedia),
        (b"WEBVTT\n\n00:00.000 --> 00:02.000\nHello\n", UndecodableMedia),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", UndecodableMedia),
        (b"ID3\x04\0\0\x7f\x7f\x7f\x7f" + b"\0" * 1000, UndecodableMedia),
    ],
)
def test_bytes_without_sound(data: bytes, error: type[MediaError]) -> None:
    with at_most(1.0), pytest.raises(error):
        decode_audio(data)


@pytest.mark.parametrize("rate", [0, 1, 999, 768_001, 2**31 - 1, 2**31, 4_000_000_000, 2**32 - 1])
def test_forged_sample_rates(rate: int) -> None:
    assert outcome(wav(bytes(64_000), rate=rate)) in ("UndecodableMedia", "MediaTooLong")


@pytest.mark.parametrize("channels", [0, 513, 1000, 65_535])
def test_forged_channel_counts(channels: int) -> None:
    assert outcome(wav(bytes(640_000), channels=channels)) == "UndecodableMedia"


@pytest.mark.parametrize("bits", [0, 33, 128, 65_535])
def test_forged_bit_depths(bits: int) -> None:
    assert outcome(wav(bytes(64_000), bits=bits)) == "UndecodableMedia"


@pytest.mark.parametrize("box", [b"stsz", b"stts", b"stsc", b"stco", b"mdhd", b"mvhd", b"elst", b"esds"])
@pytest.mark.parametrize("value", [0, 1, 10**6, 2**30, 2**31 - 1, 2**32 - 1])
def test_forged_sample_tables(media: Path, box: bytes, value: int) -> None:
    original = (media / "audio" / "jfk_441khz.m4a").read_bytes()
    start = original.find(box)
    for offset in range(8, 24, 4) if start > 0 else ():
        data = bytearray(original)
        data[start + offset : start + offset + 4] = struct.pack(">I", value)
        outcome(bytes(data))


def test_bytes_are_limited() -> None:
    data = wav(tone(1).tobytes())
    with pytest.raises(MediaTooLarge, match=str(len(data))):
        decode_audio(data, MediaLimits(max_bytes=len(data) - 1))
    with pytest.raises(MediaTooLarge):
        decode_audio(io.BytesIO(data), MediaLimits(max_bytes=1))
    assert decode_audio(data, MediaLimits(max_bytes=len(data))).duration == 1.0


@pytest.mark.parametrize("container", ["wav", "flac", "ipod", "ogg", "mp3", "adts", "matroska", "aiff"])
def test_seconds_are_limited(container: str) -> None:
    codec = {"wav": "pcm_s16le", "aiff": "pcm_s16be", "flac": "flac", "mp3": "libmp3lame", "ogg": "libopus"}
    data = encode(tone(4, 48_000), container, codec.get(container, "aac"), 48_000)
    with pytest.raises(MediaTooLong, match=r"3\.5 seconds"):
        decode_audio(data, MediaLimits(max_seconds=3.5))
    assert decode_audio(data, MediaLimits(max_seconds=4.2)).duration == pytest.approx(4, abs=0.1)


def test_the_limit_itself_is_allowed() -> None:
    data = wav(tone(2).tobytes())
    assert decode_audio(data, MediaLimits(max_seconds=2.0)).duration == 2.0
    with pytest.raises(MediaTooLong):
        decode_audio(wav(tone(2).tobytes() + b"\0\0"), MediaLimits(max_seconds=2.0))


def test_seven_hours_of_opus_are_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "bomb"
    path.write_bytes(repeated_opus(7 * 3600, "ogg"))
    with at_most(1.0), pytest.raises(MediaTooLong):
        decode_audio(path)
    command = [sys.executable, "-P", "-c", MEMORY_OF_A_BOMB, str(path), "7200"]
    assert int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) < 30 * 2**20


def test_a_length_that_no_header_tells_is_found_while_decoding(tmp_path: Path) -> None:
    path = tmp_path / "bomb"
    path.write_bytes(repeated_opus(3600, "webm", {"live": "1"}))
    with av.open(io.BytesIO(path.read_bytes())) as container:
        assert container.duration is None
    command = [sys.executable, "-P", "-c", MEMORY_OF_A_BOMB, str(path), "600"]
    used = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert used < 60 * 2**20  # ten minutes are 19 MB; the whole hour would be 115 MB, and twice that as float


@pytest.mark.parametrize(("container", "codec"), [("mp3", "libmp3lame"), ("adts", "aac")])
def test_a_wrong_estimate_of_the_length_is_not_believed(container: str, codec: str) -> None:
    """Without a table of contents, the length is guessed from the bit rate of the first frames."""
    options = {"write_xing": "0", "id3v2_version": "0"} if container == "mp3" else {}
    slow = encode(np.zeros(5 * 16_000, np.int16), container, codec, 16_000, bit_rate=8_000, options=options)
    noise = np.random.default_rng(0).integers(-9000, 9000, 16_000 * 30).astype(np.int16)
    fast = encode(noise, container, codec, 16_000, bit_rate=160_000, options=options)
    with av.open(io.BytesIO(slow + fast)) as opened:
        assert opened.duration is not None
        assert opened.duration > 400 * av.time_base
    audio = decode_audio(slow + fast, MediaLimits(max_seconds=60))
    assert audio.duration == pytest.approx(35, abs=0.3)


class Sink(ThreadingHTTPServer):
    hits = 0


class SinkHandler(BaseHTTPRequestHandler):
    server: Sink

    def do_GET(self) -> None:
        self.server.hits += 1
        self.send_error(404)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the standard error of tests is for the tests."""


@pytest.fixture
def sink() -> Iterator[Sink]:
    server = Sink(("127.0.0.1", 0), SinkHandler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize(
    "form",
    [
        "#EXTM3U\n#EXT-X-TARGETDURATION:5\n#EXTINF:5,\n{url}\n#EXT-X-ENDLIST\n",
        '#EXTM3U\n#EXT-X-MEDIA:TYPE=AUDIO,GROUP-ID="a",URI="{url}"\n#EXT-X-STREAM-INF:BANDWIDTH=1\n{url}\n',
        "ffconcat version 1.0\nfile '{url}'\n",
        "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=audio {port} RTP/AVP 0\n",
        '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static"><Period>'
        '<AdaptationSet mimeType="audio/mp4"><Representation id="0" bandwidth="1"><BaseURL>{url}</BaseURL>'
        "</Representation></AdaptationSet></Period></MPD>",
        '<asx version="3.0"><entry><ref href="{url}"/></entry></asx>',
        "[playlist]\nFile1={url}\nNumberOfEntries=1\n",
        "RTSPtextRTSP://127.0.0.1:{port}/",
    ],
)
def test_nothing_named_inside_is_opened(
    form: str, sink: Sink, tmp_path: Path, media: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "inner.wav"
    inner.write_bytes(wav(tone(1).tobytes()))
    monkeypatch.chdir(tmp_path)
    port = sink.server_address[1]
    for url in (f"http://127.0.0.1:{port}/a.wav", str(inner), f"file:{inner}", "inner.wav"):
        text = form.format(url=url, port=port).encode()
        for name in ("list.m3u8", "list.mpd"):
            path = tmp_path / name
            path.write_bytes(text)
            with pytest.raises(UndecodableMedia):
                decode_audio(path)
        with pytest.raises(UndecodableMedia):
            decode_audio(text)
    assert sink.hits == 0


def test_the_sink_counts_what_ffmpeg_opens(sink: Sink) -> None:
    """What the test above relies on: a playlist in memory does make FFmpeg call the sink if it may."""
    url = f"http://127.0.0.1:{sink.server_address[1]}/a.ts"
    text = f"#EXTM3U\n#EXT-X-TARGETDURATION:5\n#EXTINF:5,\n{url}\n#EXT-X-ENDLIST\n".encode()
    with pytest.raises(av.FFmpegError):
        av.open(io.BytesIO(text), format="hls")
    assert sink.hits > 0


def test_ffmpeg_is_silent(media: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("jfk.mp3", "jfk_441khz.m4a", "jfk_44k_stereo.flac", "autocut_test003.mkv"):
        data = (media / "audio" / name).read_bytes()
        outcome(data[: len(data) // 2])
        outcome(data[: len(data) // 3] + bytes(5000) + data[len(data) // 2 :])
    assert capfd.readouterr() == ("", "")


def test_memory_is_flat_over_200_bad_files(media: Path) -> None:
    command = [sys.executable, "-P", "-c", MEMORY_OVER_200_FILES, str(media)]
    grown, refused = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert int(refused) > 50
    assert int(grown) < 8 * 2**20


@given(st.binary(max_size=5_000))
@settings(deadline=None, max_examples=150)
def test_random_bytes_are_refused(data: bytes) -> None:
    assert outcome(data) in ("EmptyMedia", "UndecodableMedia", "NoAudioStream")


@given(st.sampled_from([1_000, 50_000, 1_000_000]), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=30)
def test_much_noise_is_refused(size: int, seed: int) -> None:
    assert outcome(np.random.default_rng(seed).bytes(size)) in ("UndecodableMedia", "NoAudioStream")


@lru_cache(maxsize=1)
def seeds(folder: Path) -> list[bytes]:
    """A small file of every format: real ones, and ones made here."""
    names = ("jfk.mp3", "auditok_dtmf.ogg", "zh_chinese.flac", "jfk_441khz.m4a", "fr_dictee.aiff")
    found = [(folder / "audio" / name).read_bytes() for name in names]
    made = (
        ("webm", "libopus", 48_000, None),
        ("matroska", "aac", 48_000, None),
        ("adts", "aac", 48_000, None),
        ("amr", "libopencore_amrnb", 8_000, 12_200),
        ("asf", "wmav2", 44_100, 64_000),
        ("mpegts", "aac", 48_000, None),
        ("avi", "libmp3lame", 44_100, None),
        ("caf", "pcm_s16le", 16_000, None),
        ("mov", "pcm_s16be", 16_000, None),
        ("wav", "pcm_s24le", 16_000, None),
        ("wv", "wavpack", 44_100, None),
    )
    return found + [
        encode(tone(1, rate), kind, codec, rate, bit_rate=bits) for kind, codec, rate, bits in made
    ]


@given(
    st.integers(0, 15),
    st.lists(st.tuples(st.floats(0, 1), st.booleans(), st.integers(0, 255)), max_size=30),
    st.floats(0, 1),
)
@settings(deadline=None, max_examples=250, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_mutilated_files(
    media: Path, which: int, changes: list[tuple[float, bool, int]], kept: float
) -> None:
    data = bytearray(seeds(media)[which])
    for place, in_header, value in changes:
        data[int(place * (min(len(data), 1_000) if in_header else len(data) - 1))] = value
    outcome(bytes(data[: int(kept * len(data))]))
