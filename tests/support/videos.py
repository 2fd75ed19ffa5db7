"""Small videos, and what transformers' processors make of the text around them."""

from __future__ import annotations

import io
from fractions import Fraction
from typing import Any

import av
import numpy as np

from support.media import data_url


def video(
    frames: int, rate: int = 10, size: tuple[int, int] = (160, 96), form: str = "mp4", codec: str = "mpeg4"
) -> bytes:
    file = io.BytesIO()
    noise = np.random.default_rng(frames)
    small = noise.integers(0, 256, (frames, size[1] // 16, size[0] // 16, 3), np.uint8)
    with av.open(file, "w", format=form) as container:
        stream: Any = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        stream.time_base = Fraction(1, rate)
        for picture in small:
            large = picture.repeat(16, axis=0).repeat(16, axis=1)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(large, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def decoded(data: bytes) -> np.ndarray:
    with av.open(io.BytesIO(data)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def video_part(data: bytes) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": data_url(data, "video/mp4")}}
