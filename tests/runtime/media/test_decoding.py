"""Images as models get them: equal to what transformers makes of the same file. Whatever else a client sends is refused
with its name, and takes nobody else's answer."""

from __future__ import annotations

import io
import os
import random
import signal
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.media import PIXELS, Decoder, encoded, output, pixels
from transformers import AutoImageProcessor
from transformers.image_utils import load_image
from treeline_runtime.media import pool as pools
from treeline_runtime.server.errors import ApiError

SMALL = encoded(pixels(64, 64))


@pytest.fixture(scope="module")
def processor(media_model: Path) -> Any:
    return AutoImageProcessor.from_pretrained(media_model, backend="pil")


# ---- what is right --------------------------------------------------------------------------------------------------


def turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(pixels(90, 60, orientation), "JPEG", exif=exif)


def palette() -> bytes:
    return encoded(pixels(50, 50).quantize(16), "PNG", transparency=3)


GOOD = {
    **{f"{form} {size}": encoded(pixels(*size), form) for form in ("PNG", "JPEG", "WEBP", "BMP", "GIF")
       for size in ((1, 1), (33, 70), (640, 480), (1000, 30))},
    **{f"mode {mode}": encoded(pixels(70, 40, 1, mode)) for mode in ("L", "LA", "RGBA")},
    **{f"orientation {number}": turned(number) for number in range(1, 9)},
    "CMYK": encoded(pixels(70, 40, 1, "CMYK"), "JPEG"),
    "transparent WebP": encoded(pixels(70, 40, 1, "RGBA"), "WEBP", lossless=True),
    "palette": palette(),
    "bits": encoded(pixels(70, 40).convert("1")),
    "progressive": encoded(pixels(70, 40), "JPEG", progressive=True),
    "16 bits": encoded(Image.fromarray(np.arange(6400, dtype=np.uint16).reshape(80, 80))),
    "behind a zip's head": encoded(pixels(70, 40)) + b"PK\x03\x04" + bytes(1000),
    "animated GIF": encoded(pixels(60, 40), "GIF", save_all=True, append_images=[pixels(60, 40, 1)]),
    "animated WebP": encoded(pixels(60, 40), "WEBP", save_all=True, append_images=[pixels(60, 40, 1)]),
}  # fmt: skip


@pytest.mark.parametrize("data", GOOD.values(), ids=GOOD)
def test_outputs_are_those_of_transformers(decode: Decoder, processor: Any, data: bytes) -> None:
    stored = decode(data)
    expected = processor(images=[load_image(Image.open(io.BytesIO(data)))], return_tensors="np")
    np.testing.assert_array_equal(output(stored), expected["pixel_values"])
    assert [list(stored.grid)] == expected["image_grid_thw"].tolist()
    assert stored.count == stored.grid[1] * stored.grid[2] // 4


def test_an_image_of_several_pieces(decode: Decoder, processor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(pixels(512, 512, 3))
    stored = decode(data)
    assert stored.size == 6 << 20
    np.testing.assert_array_equal(
        output(stored), processor(images=[Image.open(io.BytesIO(data))], return_tensors="np")["pixel_values"]
    )


# ---- what is hostile ------------------------------------------------------------------------------------------------


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, *more: bytes, depth: int = 8, color: int = 2, rows: bytes = b"") -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(more) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def zeros(size: int) -> bytes:
    return zlib.compress(bytes(size), 9)


def jpeg(width: int, height: int) -> bytes:
    data = bytearray(encoded(pixels(16, 16), "JPEG"))
    at = data.index(b"\xff\xc0")
    data[at + 5 : at + 9] = struct.pack(">HH", height, width)
    return bytes(data)


def webp(width: int, height: int) -> bytes:
    """An extended header with this canvas."""
    body = b"VP8X" + struct.pack("<I", 10) + bytes([2, 0, 0, 0])
    body += (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body += encoded(pixels(16, 16), "WEBP")[12:]
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body


def gif(width: int, height: int, frames: int = 1, frame: tuple[int, int] = (1, 1)) -> bytes:
    one = b"\x2c" + struct.pack("<HHHH", 0, 0, *frame) + b"\x00\x02\x02\x44\x01\x00"
    return b"GIF89a" + struct.pack("<HH", width, height) + b"\x80\x00\x00" + bytes(6) + one * frames + b";"


def bmp(width: int, height: int, bits: int = 24, compression: int = 0, colors: int = 0) -> bytes:
    info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, bits, compression, 0, 0, 0, colors, 0)
    return b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + info + bytes(64)


def as_pillow_writes(form: str) -> bytes:
    return encoded(pixels(40, 40), form)


def truncated() -> Iterator[tuple[str, bytes]]:
    for form in ("PNG", "JPEG", "WEBP", "BMP", "GIF"):
        whole = encoded(pixels(80, 80), form)
        for percent in (1, 5, 20, 50, 80):
            yield f"{percent} % of a {form}", whole[: max(1, len(whole) * percent // 100)]


TEXT_BOMB = zeros(200 << 20)
HOSTILE = {
    "a byte": b"\x00",
    "text": b"hello " * 100,
    "zeros": bytes(1 << 16),
    "noise": random.Random(0).randbytes(1 << 16),
    **{f"PNG {w} x {h}, {bits} bits of type {color}": png(w, h, depth=bits, color=color)
       for w, h in ((65_000, 65_000), (1, (1 << 31) - 1), ((1 << 31) - 1, 1), (PIXELS, 2), (0, 0), (0xFFFFFFFF, 5))
       for bits, color in ((1, 0), (8, 2), (8, 3), (16, 6))},
    "a PNG bomb of bits": png(65_000, 65_000, depth=1, color=0, rows=bytes(65_000 * 8126)),
    "a PNG without rows": png(2000, 2000),
    "a PNG with more rows than it says": png(4, 100_000, rows=bytes(13 * 10)),
    "zTXt bomb": png(4, 4, chunk(b"zTXt", b"k\0\0" + TEXT_BOMB), rows=bytes(52)),
    "iTXt bomb": png(4, 4, chunk(b"iTXt", b"k\0\1\0\0\0" + TEXT_BOMB), rows=bytes(52)),
    "iCCP bomb": png(4, 4, chunk(b"iCCP", b"k\0\0" + TEXT_BOMB), rows=bytes(52)),
    "many text bombs": png(4, 4, *[chunk(b"zTXt", b"k\0\0" + zeros(900_000))] * 100, rows=bytes(52)),
    "a chunk longer than the file": b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 0x7FFFFFFF) + b"IHDR" + bytes(50),
    "a wrong checksum": SMALL[:29] + b"\0\0\0\0" + SMALL[33:],
    **{f"JPEG {w} x {h}": jpeg(w, h) for w, h in ((65_000, 65_000), (65_535, 65_535), (0, 0), (65_500, 1000))},
    "JPEG of nothing but its head": b"\xff\xd8\xff\xe0" + bytes(100),
    "JPEG of markers": b"\xff\xd8" + b"\xff\xc4\x00\x02" * 10_000,
    **{f"WebP {w} x {h}": webp(w, h) for w, h in ((16_383, 16_383), (1 << 24, 1 << 24), (4096, 4096))},
    "WebP without frames": b"RIFF\x10\0\0\0WEBPVP8 \x04\0\0\0abcd",
    **{f"GIF {w} x {h}": gif(w, h) for w, h in ((65_535, 65_535), (65_535, 100))},
    "GIF with a frame beyond it": gif(1, 1, 1, (65_535, 65_535)),
    **{f"BMP {w} x {h}": bmp(w, h) for w, h in ((1 << 30, 1 << 30), (65_000, -65_000), (0, 0), (-5, 5), (3000, 3000))},
    "BMP of a strange depth": bmp(10, 10, 7),
    "BMP of a strange compression": bmp(10, 10, 24, 77),
    "BMP with too many colors": bmp(10, 10, 8, 0, 1 << 31),
    **{f"a {form} file": as_pillow_writes(form) for form in
       ("TIFF", "PPM", "ICO", "TGA", "PCX", "SGI", "EPS", "PDF", "DDS", "IM", "DIB", "AVIF",
        "JPEG2000", "ICNS", "QOI")},
    "SVG": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
    "SVG with entities": b'<!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/passwd">]><svg>&a;</svg>',
    "PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) (r) file\n",
    "PDF": b"%PDF-1.7\n1 0 obj<</Type/Catalog>>endobj\n",
    "a zip": b"PK\x03\x04" + bytes(1000),
    "gzip": zeros(1000),
    "a program": b"\x7fELF" + bytes(1000),
    "a film": b"\0\0\0\x18ftypmp42" + bytes(1000),
    "HEIC": b"\0\0\0\x18ftypheic" + bytes(1000),
    "HTML": b"<html><img src=x onerror=alert(1)></html>",
    "a script that begins as GIF": b"GIF89a/*" + b"*/=alert(1)//" * 20,
    "a PNG's head before a TIFF": b"\x89PNG\r\n\x1a\n" + as_pillow_writes("TIFF"),
    "a JPEG's head before a PNG": b"\xff\xd8\xff" + SMALL,
    "a shape": encoded(Image.new("RGB", (4000, 2))),
    "a pickle": b"\x80\x04\x95" + b"cos\nsystem\n(S'true'\ntR.",
    "MVG": b"push graphic-context\nimage over 0,0 0,0 'https://e.org/'\npop graphic-context",
    **dict(truncated()),
}  # fmt: skip


def test_there_are_many_attempts() -> None:
    assert len(HOSTILE) >= 100


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_hostile_files_are_refused(decode: Decoder, data: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        decode(data)
    assert refused.value.status == 400, refused.value
    assert refused.value.told["param"] == "messages[0]"
    assert decode(SMALL, name=b"again" + os.urandom(8)).count == 4, "others are still served"


HARMLESS = {
    "100,000 frames": gif(100, 100, 100_000),
    "a frame larger than the picture": gif(0, 0),
    "a bomb behind the picture": SMALL + TEXT_BOMB,
}


@pytest.mark.parametrize("data", HARMLESS.values(), ids=HARMLESS)
def test_what_is_never_looked_at_costs_nothing(decode: Decoder, data: bytes) -> None:
    assert decode(data).count > 0


def test_broken_bytes_never_end_the_service(decode: Decoder) -> None:
    """Some of them still decode, to something."""
    rng = random.Random(5)
    for form in ("PNG", "JPEG", "WEBP", "BMP", "GIF"):
        whole = encoded(pixels(64, 64), form)
        for _ in range(20):
            data = bytearray(whole)
            for _ in range(rng.choice((1, 5, 50))):
                data[rng.randrange(len(data))] = rng.randrange(256)
            try:
                decode(bytes(data))
            except ApiError as error:
                assert error.status == 400  # noqa: PT017


def test_an_image_larger_than_the_context_is_not_decoded(decode: Decoder) -> None:
    with pytest.raises(ApiError, match="takes 256 tokens of the context, which has room for 255"):
        decode(encoded(pixels(512, 512, 9)), most=255)


# ---- limits of the process ------------------------------------------------------------------------------------------


def test_too_much_memory_ends_one_request(media_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "MEMORY_BYTES", 8 << 20)
    decode = Decoder(media_model)
    try:
        with pytest.raises(ApiError, match="too much time or memory") as refused:
            decode(encoded(Image.new("RGB", (2048, 2048))))
        assert refused.value.status == 400
        assert decode(encoded(Image.new("RGB", (64, 64)))).count == 4
    finally:
        decode.close()


def test_too_much_time_ends_one_request(media_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "WORKERS", 2)
    monkeypatch.setattr(pools, "SECONDS", 0.005)
    decode = Decoder(media_model)
    try:
        for seed in range(3):  # more than there are processes
            with pytest.raises(ApiError, match="too much time or memory"):
                decode(encoded(pixels(2048, 2048, seed)))
    finally:
        decode.close()


def test_a_client_whose_images_take_long_is_refused(media_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "QUICK_S", 0.0)
    monkeypatch.setattr(pools, "CLIENT_S", 0.0)
    decode = Decoder(media_model)
    try:
        decode(SMALL, client="a")
        with pytest.raises(ApiError, match="try again in") as refused:
            decode(SMALL, client="a")
        assert refused.value.status == 429
        for client in ("b", None, None):
            decode(SMALL, client=client)
    finally:
        decode.close()


def test_a_processor_that_cannot_be_loaded_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pools, "PAUSE_S", 0.01)
    decode = Decoder(tmp_path)
    try:
        with pytest.raises(ApiError, match="the server's log says why") as refused:
            decode(SMALL)
        assert refused.value.status == 503
        assert "preprocessor_config.json" in capfd.readouterr().err
    finally:
        decode.close()


def test_a_client_whose_images_end_processes_is_refused(media_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "MEMORY_BYTES", 8 << 20)
    monkeypatch.setattr(pools, "CLIENT_S", pools.SECONDS / 2)
    decode = Decoder(media_model)
    try:
        with pytest.raises(ApiError, match="too much time or memory"):
            decode(encoded(Image.new("RGB", (2048, 2048))), client="a")
        with pytest.raises(ApiError, match="try again in"):
            decode(SMALL, client="a")
        decode(SMALL, client="b")
    finally:
        decode.close()


def test_a_killed_process_is_replaced_and_its_image_decoded_again(
    media_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "WORKERS", 1)  # of two that are killed, both may have had it
    decode = Decoder(media_model)
    try:
        decode(SMALL)
        (pid,) = decode.pool.pids()
        os.kill(pid, signal.SIGKILL)
        assert decode(SMALL, name=b"after the kill").count == 4
    finally:
        decode.close()


def test_processes_cannot_open_anything(media_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "WORKERS", 1)
    decode = Decoder(media_model)
    try:
        decode(SMALL)
        (pid,) = decode.pool.pids()
        limits = Path(f"/proc/{pid}/limits").read_text()
        assert [line.split()[3] for line in limits.splitlines() if line.startswith("Max open files")] == ["0"]
        assert len(os.listdir(f"/proc/{pid}/fd")) <= 3
        assert Path(f"/proc/{pid}/environ").read_bytes() == b""
    finally:
        decode.close()
