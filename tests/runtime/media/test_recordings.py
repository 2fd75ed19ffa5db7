"""Recordings that are hostile are refused by name, before memory, time or a process is lost over them."""

from __future__ import annotations

import io
import os
import random
import struct
import zlib
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest
from support.media import Decoder
from treeline_runtime.media import pool as pools
from treeline_runtime.server.errors import ApiError

transformers: Any = pytest.importorskip("transformers")
SECONDS = 30
"""The most of a recording."""


@pytest.fixture(scope="module")
def decode(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decoder]:
    folder = tmp_path_factory.mktemp("models") / "audio"
    transformers.Qwen3ASRFeatureExtractor().save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pools, "WORKERS", 1)
        made = Decoder(folder, kind="audio", limit=SECONDS)
    made(wav())
    yield made
    made.close()


# ---- recordings -----------------------------------------------------------------------------------------------------


def wav(data: bytes = bytes(3200), rate: int = 16_000, channels: int = 1, bits: int = 16, tag: int = 1) -> bytes:
    align = channels * bits // 8 & 0xFFFF
    head = struct.pack("<HHIIHH", tag, channels, rate, rate * align & 0xFFFFFFFF, align, bits)
    body = b"WAVEfmt " + struct.pack("<I", 16) + head + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def floats(*values: float) -> bytes:
    return wav(np.tile(np.array(values, "<f4"), 8000).tobytes(), bits=32, tag=3)


def silence(form: str, codec: str, seconds: float, rate: int = 16_000) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=form) as container:
        stream: Any = container.add_stream(codec, rate=rate)
        stream.layout, stream.time_base = "mono", Fraction(1, rate)
        size = stream.codec_context.frame_size or 4096
        for at in range(0, int(seconds * rate), size):
            frame = av.AudioFrame(format=stream.format.name, layout="mono", samples=size)
            for plane in frame.planes:
                plane.update(bytes(plane.buffer_size))
            frame.sample_rate, frame.pts = rate, at
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def film() -> bytes:
    """A second with pictures."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        pictures: Any = container.add_stream("mpeg4", rate=10)
        pictures.width = pictures.height = 64
        pictures.pix_fmt = "yuv420p"
        sound: Any = container.add_stream("aac", rate=16_000)
        sound.layout = "mono"
        for _ in range(10):
            container.mux(pictures.encode(av.VideoFrame(64, 64, "yuv420p")))
        for at in range(0, 16_000, 1024):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
            frame.sample_rate, frame.pts = 16_000, at
            container.mux(sound.encode(frame))
        container.mux([*pictures.encode(None), *sound.encode(None)])
    return file.getvalue()


WHOLE = {
    "WAV": wav(bytes(32_000)),
    "FLAC": silence("flac", "flac", 1),
    "MP3": silence("mp3", "libmp3lame", 1),
    "Opus": silence("ogg", "libopus", 1, 48_000),
    "M4A": silence("ipod", "aac", 1),
    "ALAC": silence("ipod", "alac", 1),
    "WebM": silence("webm", "libopus", 1, 48_000),
    "Matroska": silence("matroska", "pcm_s16le", 1),
    "film": film(),
}


@pytest.mark.parametrize("data", WHOLE.values(), ids=WHOLE)
def test_recordings_are_read(decode: Decoder, data: bytes) -> None:
    assert decode(data).grid[0] >= 99


# ---- what is hostile ------------------------------------------------------------------------------------------------


def counted(box: bytes, at: int, number: int) -> bytes:
    """An M4A in whose box this number stands after so many bytes."""
    data = bytearray(WHOLE["M4A"])
    start = data.index(box) + 4 + at
    data[start : start + 4] = struct.pack(">I", number)
    return bytes(data)


def id3(*frames: bytes) -> bytes:
    body = b"".join(frames)
    size = bytes(len(body) >> shift & 0x7F for shift in (21, 14, 7, 0))
    return b"ID3\x03\x00\x00" + size + body


def compressed(size: int) -> bytes:
    """A frame of ID3 that is so large when decompressed."""
    packed = struct.pack(">I", size) + zlib.compress(bytes(size), 9)
    return b"TXXX" + struct.pack(">I", len(packed)) + b"\x00\x80" + packed


def renamed(codec: bytes) -> bytes:
    data = WHOLE["Matroska"]
    assert len(codec) == len(b"A_PCM/INT/LIT")
    return data.replace(b"A_PCM/INT/LIT", codec)


def truncated() -> Iterator[tuple[str, bytes]]:
    for name, whole in WHOLE.items():
        for size in (1, 4, 12, 30):
            yield f"{size} bytes of {name}", whole[:size]


BROKEN = {
    "zeros": bytes(1 << 16),
    "text": b"hello " * 100,
    "noise": random.Random(0).randbytes(1 << 16),
    "HLS": b"#EXTM3U\n#EXTINF:9,\nfile:///etc/passwd\n",
    "a list of files": b"ffconcat version 1.0\nfile /etc/passwd\n",
    "DASH": b'<?xml version="1.0"?><MPD><BaseURL>file:///etc/passwd</BaseURL></MPD>',
    "SDP": b"v=0\no=- 0 0 IN IP4 127.0.0.1\nm=audio 9 RTP/AVP 0\n",
    "AVI": b"RIFF\x00\x01\x00\x00AVI LIST" + bytes(200),
    "no samples": wav(b""),
    **{f"rate {rate}": wav(rate=rate) for rate in (0, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)},
    **{f"{channels} channels": wav(bytes(1 << 20), channels=channels) for channels in (0, 65, 512, 513, 4095, 65_535)},
    **{f"{bits} bits": wav(bits=bits) for bits in (0, 65_535)},
    **{f"codec {tag:#x}": wav(bytes(20_000), tag=tag)
       for tag in (0, 2, 0x11, 0x22, 0x31, 0x50, 0x161, 0x162, 0x163, 0x270, 0x566F, 0x674F, 0xF1AC, 0xFFFE, 0x2000,
                   0x2001, 0x1234, 0x5756, 0x77A1)},
    **{f"codec {codec.decode()}": renamed(codec)
       for codec in (b"A_NO/SUCH/ONE", b"A_TRUEHD/////", b"V_MPEG4/ISO/A", b"S_TEXT/UTF8//")},
    "not a number": floats(np.nan, 0.1),
    "infinite": floats(0.1, np.inf),
    "far too loud": floats(3e38, -3e38),
    "loud by turns": floats(1e25, 0.0, -1e24),
    "tags without a sound": id3(b"TIT2" + struct.pack(">I", 5) + b"\0\0\0abcd"),
    "a tag that grows": id3(compressed(64 << 20)),
    "many tags that grow": id3(*[compressed(1 << 20)] * 50),
    "a tag larger than the file": b"ID3\x03\x00\x00\x7f\x7f\x7f\x7f" + bytes(100),
    "Matroska of an endless size": b"\x1aE\xdf\xa3\x01\xff\xff\xff\xff\xff\xff\xff" + bytes(1000),
    "Matroska in Matroska": b"\x1aE\xdf\xa3\x80" + b"\x18S\x80g\x01\xff\xff\xff\xff\xff\xff\xff" * 10_000,
    "boxes in boxes": b"\0\0\0\x14ftypM4A \0\0\0\0M4A " + b"\x7f\xff\xff\xffmoov" * 10_000,
    "a box of 2^63": b"\0\0\0\x14ftypM4A \0\0\0\0M4A \0\0\0\x01moov" + b"\x7f" + b"\xff" * 7 + bytes(100),
    "Ogg pages without a stream": b"OggS\0\2" + bytes(20) + b"\x01\x00" * 5000,
    **dict(truncated()),
}  # fmt: skip
LONG = {
    "FLAC": silence("flac", "flac", 3600, 8000),
    "MP3": silence("mp3", "libmp3lame", 600),
    "Opus": silence("ogg", "libopus", 600, 48_000),
    "Matroska": silence("matroska", "flac", 3600, 8000),
    "WAV": wav(bytes(8 << 20)),
    **{f"rate {rate}": wav(bytes(8 << 20), rate) for rate in (1, 7, 100, 8000)},
    "more samples than there are in sounds": wav(bytes(24 << 20), 100_000_000),
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
def test_hostile_recordings_are_refused(decode: Decoder, data: bytes) -> None:
    before = processes(decode)
    with pytest.raises(ApiError, match=r"broken|known|no sound") as refused:
        decode(data)
    assert refused.value.status == 400
    assert processes(decode) == before, "a process was lost"


@pytest.mark.parametrize("data", LONG.values(), ids=LONG)
def test_long_recordings_are_not_decoded_to_their_end(decode: Decoder, data: bytes) -> None:
    before = processes(decode)
    with pytest.raises(ApiError, match=f"longer than {SECONDS} s") as refused:
        decode(data)
    assert refused.value.status == 400
    assert processes(decode) == before, "a process was lost"


@pytest.mark.parametrize("number", [0, 1 << 16, 0x7FFFFFFF, 0xFFFFFFFF])
@pytest.mark.parametrize(
    ("box", "at"),
    [
        *((b"stsz", 4), (b"stsz", 8), (b"stts", 4), (b"stts", 8), (b"stsc", 4), (b"stsc", 12), (b"stco", 4)),
        *((b"stco", 8), (b"mdhd", 12), (b"mdhd", 16), (b"mvhd", 12), (b"stsd", 4), (b"stsd", 8), (b"mp4a", 16)),
        *((b"mp4a", 24), (b"elst", 4), (b"elst", 8), (b"dref", 4), (b"dref", 8), (b"esds", 4), (b"moov", -8)),
        (b"mdat", -8),
    ],
)
def test_no_number_in_a_header_takes_a_process(decode: Decoder, box: bytes, at: int, number: int) -> None:
    """Some of them are of no consequence."""
    attempt(decode, counted(box, at, number))


def test_no_broken_bytes_take_a_process(decode: Decoder) -> None:
    rng = random.Random(5)
    for whole in WHOLE.values():
        for _ in range(20):
            data = bytearray(whole)
            for _ in range(rng.choice((1, 5, 50))):
                data[rng.randrange(min(len(data), rng.choice((200, 1 << 30))))] = rng.randrange(256)
            attempt(decode, bytes(data))
        attempt(decode, whole * 3)
        attempt(decode, whole[: len(whole) // 2])


def test_samples_of_extreme_shapes(decode: Decoder) -> None:
    for size in (1, 2, 3, 80, 159, 160, 161, 200, 201, 399, 400, 401):
        assert decode(wav(bytes(2 * size))).count >= 1
    for channels in (2, 8, 64):
        attempt(decode, wav(bytes(1 << 20), channels=channels))


def attempt(decode: Decoder, data: bytes) -> None:
    """Read it, or be refused."""
    before = processes(decode)
    try:
        decode(data, name=os.urandom(8))
    except ApiError as error:
        assert error.status == 400  # noqa: PT017
    assert processes(decode) == before, "a process was lost"


def processes(decode: Decoder) -> list[int]:
    return sorted(decode.pool.pids())
