"""The process that decodes images: `python -m treeline_runtime.media.worker FOLDER PIXELS`.

It is confined (`confined.child`) once it has loaded the processor of the model in FOLDER. A request is the most tokens
that an image may take, and its bytes; the answer is `Made` or `Unreadable`. Each empty request that follows is answered
by the next piece of the output, float32.
"""

from __future__ import annotations

import io
import sys
import warnings
from typing import Any, Final

import msgspec
from PIL import Image, ImageOps

from treeline_runtime.confined.child import serve
from treeline_runtime.media.protocol import MOST, PIECE_BYTES, Made, Unreadable

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""What is decoded: decoders that are many people's target, and no others."""


class Refused(Exception):
    """The image cannot be read; the text is for the client."""


class Worker:
    """Raises MemoryError, which ends the process."""

    def __init__(self, processor: Any, pixels: int) -> None:
        """processor: of transformers. pixels: the most of an image."""
        self._processor = processor
        self._pixels = pixels
        self._too_large = f"it has more than {pixels} pixels (--max-image-pixels)"
        self._left = memoryview(b"")

    def answer(self, frame: bytearray) -> bytes:
        if not frame:
            piece, self._left = bytes(self._left[:PIECE_BYTES]), self._left[PIECE_BYTES:]
            return piece
        (most,) = MOST.unpack_from(frame)
        self._left = memoryview(b"")
        try:
            return msgspec.msgpack.encode(self._made(bytes(memoryview(frame)[MOST.size :]), most))
        except Refused as error:
            return msgspec.msgpack.encode(Unreadable(str(error)))

    def _made(self, data: bytes, most: int) -> Made:
        image = self._opened(data)
        merged = self._processor.merge_size**2
        try:
            count = self._processor.get_number_of_image_patches(image.height, image.width, {}) // merged
        except ValueError as error:  # an extreme shape
            raise Refused(str(error)) from None
        if count > most:
            raise Refused(f"it takes {count} tokens of the context, which has room for {most}")
        made = self._processor(images=[_upright(image)], return_tensors="np")
        pixels, (grid,) = made["pixel_values"], made["image_grid_thw"].tolist()
        self._left = memoryview(pixels.astype("<f4", copy=False)).cast("B")
        return Made(grid[0] * grid[1] * grid[2] // merged, tuple(grid), pixels.shape)

    def _opened(self, data: bytes) -> Image.Image:
        """The image, whose header alone has been read. Raises Refused."""
        try:
            image = Image.open(io.BytesIO(data), formats=FORMATS)
        except MemoryError:
            raise
        except Image.DecompressionBombError:
            raise Refused(self._too_large) from None
        except Exception:
            raise Refused(f"it is no image in a known format ({', '.join(FORMATS)}), or a broken one") from None
        if image.width * image.height > self._pixels:
            raise Refused(self._too_large)
        return image


def _upright(image: Image.Image) -> Image.Image:
    """The first frame as transformers' chats load it: turned as its EXIF says, RGB. Raises Refused."""
    try:
        ImageOps.exif_transpose(image, in_place=True)
        return image.convert("RGB")
    except MemoryError:
        raise
    except Exception:
        raise Refused("it is broken: it cannot be decoded") from None


def _examples() -> list[bytes]:
    """An image in each format: decoding them does late imports."""
    made = []
    for kind in FORMATS:
        file = io.BytesIO()
        Image.new("RGB", (64, 64)).save(file, kind)
        made.append(file.getvalue())
    return made


def main() -> None:
    folder, pixels = sys.argv[1:]
    warnings.simplefilter("ignore")
    Image.MAX_IMAGE_PIXELS = int(pixels)  # also for frames that are larger than the header says
    # Nothing here computes with torch, whose import takes seconds and half a gigabyte.
    sys.modules["torch"] = None  # type: ignore[assignment]
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True)
    worker = Worker(processor, int(pixels))
    for example in _examples():
        worker.answer(bytearray(MOST.pack(1 << 30) + example))
    serve(worker.answer)


if __name__ == "__main__":
    main()
