"""Decodes videos and makes patches of their frames, as the model's processor does. Imported only in a process for it.

The processors of transformers need torchvision, so their arithmetic stands here: which frames are taken, their size,
and the order of patches. A patch has `temporal_patch_size` frames.
"""

from __future__ import annotations

import io
import math
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import av
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from treeline_runtime.media.protocol import Made, Refused, check_room
from treeline_runtime.media.settings import TOGETHER, read_settings

_BEGINNINGS: Final = ((4, b"ftyp", "mov"), (0, b"\x1aE\xdf\xa3", "matroska"), (0, b"RIFF", "avi"))
"""Offset, bytes, and the format that they begin: FFmpeg may not guess, since it has formats that name other files."""
_CODECS: Final = ("av1", "h264", "hevc", "libdav1d", "mpeg4", "vp8", "vp9")
"""The codecs that are decoded; FFmpeg has hundreds of others."""
MAX_PACKETS: Final = 100_000
"""Frames of a video, of which few are taken: nearly an hour."""


class Videos:
    def __init__(self, folder: str, pixels: int, seconds: int) -> None:
        """pixels: the most of a frame. seconds: the most of a video. Raises ValueError as `read_settings`."""
        self._settings = settings = read_settings(Path(folder))
        self._least, self._most = (settings["size"][name] for name in ("shortest_edge", "longest_edge"))
        self._together = settings["video_processor_type"] == TOGETHER
        self._factor: int = settings["patch_size"] * settings["merge_size"]
        self._pixels, self._seconds = pixels, seconds

    def read(self, data: bytes, most: int) -> tuple[Made, npt.NDArray[np.float32]]:
        """A video as the model's encoder takes it. Raises Refused."""
        form = next((form for at, head, form in _BEGINNINGS if data.startswith(head, at)), None)
        if form is None:
            raise Refused("it is no video in a known format (MP4, MOV, WebM, Matroska or AVI)")
        try:
            total, rate = self._measured(data, form)
            taken = self.sampled(total, float(rate))
            with _opened(data, form) as container:
                stream = container.streams.video[0]
                height, width = self._size(stream, len(taken), most)
                frames = _frames(container, stream, taken, (height, width), self._pixels)
        except Exception as error:  # whatever a decoder stumbles over
            if isinstance(error, Refused) or type(error) is MemoryError:
                raise
            raise Refused("it is broken, or has no pictures: it cannot be decoded") from None
        made, output = self.patches(frames)
        step = self._settings["temporal_patch_size"]
        if not self._together:
            return replace(made, seconds=float(step * total / len(taken) / rate)), output
        taken += taken[-1:] * (-len(taken) % step)
        times = (
            (first + last) / float(rate) / 2 for first, last in zip(taken[::step], taken[step - 1 :: step], strict=True)
        )
        return replace(made, times=tuple(times)), output

    def examples(self) -> list[bytes]:
        """A video: decoding it does late imports."""
        file = io.BytesIO()
        with av.open(file, "w", format="mp4") as container:
            stream: Any = container.add_stream("mpeg4", rate=4)
            stream.width = stream.height = 64
            stream.pix_fmt = "yuv420p"
            for _ in range(4):
                container.mux(stream.encode(av.VideoFrame(64, 64, "yuv420p")))
            container.mux(stream.encode())
        return [file.getvalue()]

    def _measured(self, data: bytes, form: str) -> tuple[int, Fraction]:
        """How many frames there are, by counting and not by what the file says, and how many a second. Nothing is
        decoded. Raises Refused."""
        with _opened(data, form) as container:
            stream = container.streams.video[0]
            if stream.codec_context.name not in _CODECS:
                raise Refused(f"its codec is not known here ({', '.join(_CODECS)} are)")
            rate = stream.average_rate
            if not rate or rate < 0:
                raise Refused("it does not say how many frames a second it has")
            total = 0
            for packet in container.demux(stream):
                total += packet.size > 0
                if total > min(MAX_PACKETS, self._seconds * rate):
                    limits = f"{self._seconds} s (--max-video-seconds), or has more than {MAX_PACKETS} frames"
                    raise Refused(f"it is longer than {limits}")
        if total < self._settings["temporal_patch_size"]:
            raise Refused("it has too few frames")
        return total, rate

    def sampled(self, total: int, rate: float) -> list[int]:
        """The numbers of the frames that are taken of `total`, at `rate` a second, in order."""
        wanted, fps, step = self._settings["num_frames"], self._settings["fps"], self._settings["temporal_patch_size"]
        least, most = self._settings["min_frames"], self._settings["max_frames"]
        if self._together:
            if wanted is None:
                wanted = min(max(int(total / rate * fps) if fps else total, least), most, total)
            return np.linspace(0, total - 1, min(wanted, total)).round().astype(int).tolist()
        if not self._settings["do_sample_frames"] or (wanted is None and fps is None):
            if total > most:
                raise Refused(f"it has more than {most} frames")
            return list(range(total))
        if wanted is None:
            most = min(most, total) // step * step
            wanted = math.floor(min(max(total / rate * fps, least), most, total) / step) * step
        else:
            wanted = min(round(wanted / step), total // step) * step
        return np.arange(0, total, total / wanted).astype(np.float32).astype(int).tolist()

    def _size(self, stream: Any, frames: int, most: int) -> tuple[int, int]:
        """Height and width of scaled frames. Raises Refused before anything is decoded."""
        height, width = stream.codec_context.height, stream.codec_context.width
        _check_pixels(height, width, self._pixels)
        height, width = self.scaled(frames, height, width)
        count = -(-frames // self._settings["temporal_patch_size"]) * height * width // self._factor**2
        check_room(count, most)
        return height, width

    def scaled(self, frames: int, height: int, width: int) -> tuple[int, int]:
        """`smart_resize` of the processor. Raises Refused for an extreme shape."""
        factor, step, times = self._factor, self._settings["temporal_patch_size"], 1
        if self._together:
            times = frames
            if min(height, width) < factor:
                scale = max(factor / height, factor / width)
                height, width = int(height * scale), int(width * scale)
        if max(height, width) > 200 * min(height, width):
            raise Refused("its frames are more than 200 times as long as wide")
        high, wide = round(height / factor) * factor, round(width / factor) * factor
        pixels = high * wide * (round(frames / step) * step if self._together else 1)
        if pixels > self._most:
            beta = math.sqrt(times * height * width / self._most)
            high, wide = (max(factor, math.floor(side / beta / factor) * factor) for side in (height, width))
        elif pixels < self._least:
            beta = math.sqrt(self._least / (times * height * width))
            high, wide = (math.ceil(side * beta / factor) * factor for side in (height, width))
        return high, wide

    def patches(self, frames: npt.NDArray[np.uint8]) -> tuple[Made, npt.NDArray[np.float32]]:
        """Scaled frames (frames, height, width, 3) → patches (grid, numbers), in the order of merged squares."""
        patch, merge, step = (self._settings[name] for name in ("patch_size", "merge_size", "temporal_patch_size"))
        if pad := -len(frames) % step:
            frames = np.concatenate((frames, np.repeat(frames[-1:], pad, axis=0)))
        mean, std = (np.array(self._settings[name], np.float32) * 255 for name in ("image_mean", "image_std"))
        grid = len(frames) // step, frames.shape[1] // patch, frames.shape[2] // patch
        values = (frames - mean) / std
        shape = (grid[0], step, grid[1] // merge, merge, patch, grid[2] // merge, merge, patch, 3)
        made = values.reshape(shape).transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
        made = made.reshape(math.prod(grid), -1)
        return Made(math.prod(grid) // merge**2, grid, made.shape), made


def _opened(data: bytes, form: str) -> Any:
    return av.open(io.BytesIO(data), "r", format=form, options={"codec_whitelist": ",".join(_CODECS)})


def _check_pixels(height: int, width: int, most: int) -> None:
    """Raises Refused."""
    if height * width > most:
        raise Refused(f"its frames have more than {most} pixels (--max-image-pixels)")


def _frames(container: Any, stream: Any, taken: list[int], size: tuple[int, int], pixels: int) -> npt.NDArray[np.uint8]:
    """The frames of these numbers, each scaled before the next is decoded. Raises Refused if there are fewer."""
    made = list[npt.NDArray[np.uint8]]()
    for number, frame in enumerate(container.decode(stream)):
        _check_pixels(frame.height, frame.width, pixels)  # they may grow in between
        if number == taken[len(made)]:
            made += [resized(frame.to_ndarray(format="rgb24"), size)] * taken.count(number)
        if len(made) == len(taken):
            return np.stack(made)
    raise Refused("it is broken: it has fewer frames than it says")


def resized(image: npt.NDArray[np.uint8], size: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """An image (height, width, 3) of another height and width, to the bit as torch scales bytes (bicubic, antialiased):
    first along rows, with whole weights of 16 bits. Pillow's differ by one in some numbers of ten thousand."""
    for axis in (1, 0):
        if image.shape[axis] != size[axis]:
            image = _along(image, axis, size[axis])
    return image


def _along(image: npt.NDArray[np.uint8], axis: int, size: int) -> npt.NDArray[np.uint8]:
    scale = image.shape[axis] / size
    stretch = max(scale, 1.0)
    centers = scale * (np.arange(size) + 0.5)
    first = np.maximum((centers - 2 * stretch + 0.5).astype(int), 0)
    last = np.minimum((centers + 2 * stretch + 0.5).astype(int), image.shape[axis])
    places = first[:, None] + np.arange((last - first).max())
    away = np.abs((places - centers[:, None] + 0.5) / stretch)
    near, far = (1.5 * away - 2.5) * away**2 + 1, ((-0.5 * away + 2.5) * away - 4) * away + 2
    weights = np.where(away < 1, near, np.where(away < 2, far, 0)) * (places < last[:, None])
    weights /= weights.sum(axis=1, keepdims=True)
    bits = next(bits for bits in range(23) if bits == 22 or int(0.5 + weights.max() * (2 << bits)) >= 1 << 15)
    whole = (weights * (1 << bits) + np.copysign(0.5, weights)).astype(np.int32)
    shape = (1, size, 1) if axis else (size, 1, 1)
    total: Any = 1 << bits - 1
    for column, weight in zip(np.minimum(places, image.shape[axis] - 1).T, whole.T, strict=True):
        total = total + image.take(column, axis).astype(np.int32) * weight.reshape(shape)
    return (total >> bits).clip(0, 255).astype(np.uint8)
