"""A model that reads images, for servers with the fake scheduler; and images."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import AddedToken, Tokenizer
from treeline_runtime.media.files import MediaFiles, Stored
from treeline_runtime.media.pool import Image as Work
from treeline_runtime.media.pool import MediaPool
from treeline_wire.media import Kind

from support.runtime_server import make_checkpoint

IMAGE = "<|image_pad|>"
PIXELS = 4 << 20
"""The most of an image for `Decoder`."""
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif part.type == 'video' %}"
    "<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 64 * 64, "longest_edge": 512 * 512},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def make_media_checkpoint(folder: Path) -> Path:
    """Write a model as `make_checkpoint` does, with the processor's files and the placeholders of Qwen's models."""
    make_checkpoint(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    names = ("<|vision_start|>", "<|vision_end|>", IMAGE, "<|video_pad|>")
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"vocab_size": tokenizer.get_vocab_size(), "image_token_id": tokenizer.token_to_id(IMAGE)}
    config["video_token_id"] = tokenizer.token_to_id("<|video_pad|>")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def pixels(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    channels = len(Image.new(mode, (1, 1)).getbands())
    shape = (height, width) if channels == 1 else (height, width, channels)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, np.uint8), mode)


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def data_url(data: bytes, type: str = "image/png") -> str:
    return f"data:{type};base64,{base64.b64encode(data).decode()}"


def image_part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data)}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


class Decoder:
    """A pool of processes that decode images or recordings, with a loop of its own."""

    def __init__(self, model: Path, most: int = 1 << 30, kind: Kind = "image", limit: int = PIXELS) -> None:
        self.kind = kind
        self.runner = asyncio.Runner()
        self.files = MediaFiles(most)
        self.pool = MediaPool(
            str(model), {"image": PIXELS, kind: limit} if kind != "audio" else {kind: limit}, self.files
        )
        self.runner.run(self._start())

    async def _start(self) -> None:
        self.pool.start()

    def __call__(self, data: bytes, most: int = 1 << 20, name: bytes = b"", client: str | None = None) -> Stored:
        """Decode an image. Raises ApiError."""
        digest = name or hash(data).to_bytes(8, "big", signed=True)
        self.runner.run(self._process(digest, data, most, client))
        stored = self.files.hold(digest)
        assert stored is not None
        self.files.release(digest)
        return stored

    async def _process(self, digest: bytes, data: bytes, most: int, client: str | None) -> None:
        await self.pool.process(Work(digest, data, "messages[0]", most, client, self.kind))

    def close(self) -> None:
        self.runner.run(self.pool.stop())
        self.runner.close()
        self.files.close()


def output(stored: Stored) -> np.ndarray:
    return np.fromfile(stored.path, np.float32).reshape(stored.shape)
