"""Decodes images and scales them, as the model's processor does. Imported only in a process for it."""

from __future__ import annotations

import io
import sys
import warnings
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from treeline_runtime.media.protocol import Made, Refused

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""What is decoded: decoders that are many people's target, and no others."""


class Images:
    def __init__(self, folder: str, pixels: int) -> None:
        """pixels: the most of an image."""
        warnings.simplefilter("ignore")
        Image.MAX_IMAGE_PIXELS = pixels  # also for frames that are larger than the header says
        # Nothing here computes with torch, whose import takes seconds and half a gigabyte.
        sys.modules["torch"] = None  # type: ignore[assignment]
        from transformers import AutoImageProcessor

        self._processor: Any = AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True)
        self._pixels = pixels
        self._too_large = f"it has more than {pixels} pixels (--max-image-pixels)"

    def read(self, data: bytes, most: int) -> tuple[Made, npt.NDArray[np.float32]]:
        """An image as the model's encoder takes it. Raises Refused."""
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
        return Made(grid[0] * grid[1] * grid[2] // merged, tuple(grid), pixels.shape), pixels

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

    def examples(self) -> list[bytes]:
        """An image in each format: decoding them does late imports."""
        made = []
        for kind in FORMATS:
            file = io.BytesIO()
            Image.new("RGB", (64, 64)).save(file, kind)
            made.append(file.getvalue())
        return made


def _upright(image: Image.Image) -> Image.Image:
    """The first frame as transformers' chats load it: turned as its EXIF says, RGB. Raises Refused."""
    try:
        ImageOps.exif_transpose(image, in_place=True)
        return image.convert("RGB")
    except MemoryError:
        raise
    except Exception:
        raise Refused("it is broken: it cannot be decoded") from None
