"""A model that takes images, for tests of keys and routing: its tokenizer and template in Qwen's form, and requests."""

from __future__ import annotations

import base64
import functools
import hashlib
import random
from typing import Any

from tokenizers import AddedToken
from treeline_epp.index.items import Content
from treeline_wire.media import Item, MediaSpec, item_digest, with_items
from treeline_wire.tokenizer import TokenizerBundle

from support.wire import byte_level

PAD = "<|image_pad|>"
WRITTEN = f"<|vision_start|>{PAD}<|vision_end|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' %}" + WRITTEN + "{% elif 'text' in c %}{{ c.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PROCESSOR = "a processor"


@functools.cache
def tokenizer() -> Any:
    return byte_level(
        added=[AddedToken(text, special=True) for text in ("<|vision_start|>", "<|vision_end|>", PAD, "<|video_pad|>")]
    )


@functools.cache
def bundle(template: str = TEMPLATE) -> TokenizerBundle:
    spec = MediaSpec({"image": PAD}, PROCESSOR)
    return TokenizerBundle.build(tokenizer().to_str(), chat_template=template, media=spec)


def picture(seed: int, size: int = 60) -> bytes:
    return random.Random(seed).randbytes(size)


def url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def image_part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(data)}}


def item(data: bytes, count: int) -> Item:
    return Item("image", item_digest("image", data, PROCESSOR), count)


def content(data: bytes) -> Content:
    return Content("image", hashlib.sha256(base64.b64encode(data)).digest())


def ids_of(text: str, items: list[Item]) -> list[int]:
    """Return the ids that our runtime makes of a rendered text with images."""
    ids = tokenizer().encode(text, add_special_tokens=False).ids
    return with_items(ids, {tokenizer().token_to_id(PAD): "image"}, items)[0]


def rendered(messages: list[dict[str, Any]], *, asks: bool = True) -> str:
    """Return the text of a chat whose contents are texts or lists of parts."""
    text = ""
    for message in messages:
        content = message["content"]
        parts = [content] if isinstance(content, str) else content
        shown = "".join(part if isinstance(part, str) else part.get("text", WRITTEN) for part in parts)
        text += f"<|im_start|>{message['role']}\n{shown}<|im_end|>\n"
    return text + "<|im_start|>assistant\n" * asks
