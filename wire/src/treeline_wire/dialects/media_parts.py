"""Images, videos and recordings among the parts of messages: which parts they are, and where their bytes are."""

from __future__ import annotations

import binascii
from collections.abc import Container, Iterator, Mapping
from typing import Any, Final

from msgspec import Struct

from ..errors import PromptError
from ..media import Kind

_KINDS: Final[Mapping[str, Kind]] = {
    "image_url": "image",
    "video_url": "video",
    "audio_url": "audio",
    "input_audio": "audio",
}
"""Types of parts, which are also the names of their members, and the kinds of items that they are."""
_REMOTE: Final = ("https://", "http://")


class MediaPart(Struct, frozen=True):
    """An item of a chat. `param`: its place in the body."""

    kind: Kind
    param: str
    url: str
    """`data:` with its bytes, or the place to fetch it from."""


def kind_of(part: Any, known: Container[str]) -> Kind | None:
    """The kind of item that a part is, if it is among the `known` ones; a part may leave out its type, as for vLLM."""
    if not isinstance(part, dict):
        return None
    kind = next((kind for name, kind in _KINDS.items() if part.get("type", name) == name and name in part), None)
    return kind if kind in known else None


def media_parts(messages: Any, known: Container[str]) -> Iterator[MediaPart]:
    """The items of messages that a dialect has accepted, in order. Raises `PromptError`."""
    for i, message in enumerate(messages):
        content = message.get("content")
        for j, part in enumerate(content if isinstance(content, list) else ()):
            if (kind := kind_of(part, known)) is not None:
                where = f"messages[{i}].content[{j}]"
                yield MediaPart(kind, where, url_of(part, where))


def url_of(part: Mapping[str, Any], where: str) -> str:
    """The URL of a part that has a kind; of bytes in base64, as a `data:` URL. Raises `PromptError`."""
    value = next(part[name] for name in _KINDS if name in part)
    url = value.get("url") if isinstance(value, dict) else value
    if "input_audio" in part and isinstance(value, dict) and isinstance(value.get("data"), str):
        url = f"data:audio;base64,{value['data']}"
    if not isinstance(url, str):
        raise PromptError(where, "must have a URL, https: or data:, with the bytes in base64")
    return url


def bytes_of(url: str, where: str, *, bare: bool = False) -> bytes | None:
    """The bytes of a `data:` URL, or of base64 alone if it may be `bare`; None for a URL to fetch. Raises `PromptError`
    for anything else: a file's path or another scheme."""
    scheme = url[:8].lower()
    if scheme.startswith(_REMOTE):
        return None
    if scheme.startswith("data:"):
        head, comma, text = url.partition(",")
        if not (comma and head.lower().endswith(";base64")):
            raise PromptError(where, "must have its bytes in base64 (data:TYPE;base64,…)")
    elif bare:
        text = url
    else:
        raise PromptError(where, "must be a URL, https: or data:; files of the server are never read")
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError:  # also for characters beyond ASCII
        raise PromptError(where, "is not valid base64") from None
