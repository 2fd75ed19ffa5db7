"""Decodes images and scales them, as the model's processor does. Imported only in a process for it."""

from __future__ import annotations

import io
import math
import sys
import warnings
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from treeline_runtime.media.protocol import Made, Refused, check_room
from treeline_runtime.media.settings import settings_of

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
        given = settings_of(Path(folder), "processor_config.json")
        self._merge: int = getattr(self._processor, "merge_size", 0)
        self._of_picture: int = given.get("image_seq_length") or 256
        """Tokens of a picture, for processors that make pictures of one size: Gemma 3's one, InternVL's several."""
        self._tiles = {"crop_to_patches": True} if hasattr(self._processor, "crop_to_patches") else {}
        """InternVL's processor is always called with this."""
        self._pixels = pixels
        self._too_large = f"it has more than {pixels} pixels (--max-image-pixels)"

    def read(self, data: bytes, most: int) -> tuple[Made, npt.NDArray[np.float32]]:
        """An image as the model's encoder takes it. Raises Refused."""
        image = self._opened(data)
        try:
            # EXIF may turn it, which changes the number of InternVL's tiles
            least = min(self._count(*image.size), self._count(*image.size[::-1]))
        except ValueError as error:
            raise Refused(str(error)) from None
        check_room(least, most)
        made = self._processor(images=[_upright(image)], return_tensors="np", **self._tiles)
        pixels = made["pixel_values"]
        grid, count = (len(pixels), 1, 1), len(pixels) * self._of_picture
        if self._merge:
            (grid,) = map(tuple, made["image_grid_thw"].tolist())
            count = math.prod(grid) // self._merge**2
        check_room(count, most)
        return Made(count, grid, pixels.shape), pixels

    def _count(self, height: int, width: int) -> int:
        """Tokens of an image. Raises ValueError for an extreme shape."""
        if not self._merge and not self._tiles:
            return self._of_picture
        count: int = self._processor.get_number_of_image_patches(height, width, self._tiles)
        return count // self._merge**2 if self._merge else count * self._of_picture

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
