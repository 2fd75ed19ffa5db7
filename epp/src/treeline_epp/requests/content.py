"""The contents of images and the like in request bodies, hashed where they stand.

Bodies carry them in base64, by the megabyte. In a large body each is hashed piece by piece, neither copied nor decoded,
and what is read of the body afterwards has a short stand-in instead: `#` and the hash.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Any, Final

from treeline_wire.dialects.media_parts import kind_of, url_of
from treeline_wire.errors import PromptError

from treeline_epp.index.items import Content
from treeline_epp.requests.body import Body, Edit
from treeline_epp.requests.outline import Outline

MAX_CONTENTS: Final = 128
"""Most contents of a key, each of some 15 µs; it ends before the next."""
_URL: Final = re.compile(rb"(?i:data:)[\w.+/;=\\-]{0,100}(?i:;base64,)")
_MEMBER: Final = re.compile(rb'"(?:data|image_data|images)"\s*:\s*\[?\s*"\Z')
_NEXT: Final = re.compile(rb'"\s*,\s*"\Z')
_BASE64: Final = re.compile(rb"[A-Za-z0-9+/\\]{64}")
_STAND_IN: Final = re.compile("#([0-9a-f]{64})")
_BEFORE, _AFTER = 128, 256
_PIECES, _STRINGS = 4, 64
"""Most pieces, and most strings, that are read in one go: some tenths of a millisecond."""
_NAMES: Final = {"image": "image_url", "audio": "audio_url"}


def hash_contents(body: Body, outline: Outline) -> Iterator[None]:
    """Find and hash the first contents among the long strings of a body, for its finished `outline`. Yields where
    others should have a turn. O(bytes).
    """
    for number, (start, stop) in enumerate(outline.long_strings, 1):
        if number % _STRINGS == 0:
            yield
        before, after = body.slice(max(0, start - _BEFORE), start), body.slice(start, min(start + _AFTER, stop))
        url = _URL.match(after)
        if url is not None:
            begin = start + url.end()
        elif _BASE64.match(after) and (_MEMBER.search(before) or _follows(outline.contents, before, start)):
            begin = start
        else:
            continue
        made = hashlib.sha256()
        escaped = b"\\" in body.slice(begin, min(begin + 4096, stop))  # some write every / as \/
        for at, piece in enumerate(body.parts(begin, stop), 1):
            made.update(bytes(piece).replace(b"\\", b"") if escaped else piece)
            if at % _PIECES == 0:
                yield
        outline.contents.append(Edit(begin, stop, b"#" + made.hexdigest().encode()))
        if len(outline.contents) == MAX_CONTENTS:
            return


def _follows(contents: list[Edit], before: bytes, start: int) -> bool:
    """Return whether a string is the next one of a list after the last content; `before` are the bytes before it."""
    between = _NEXT.search(before)
    return bool(contents) and between is not None and contents[-1].stop == start - len(before) + between.start()


def content_of(part: dict[str, Any]) -> Content | None:
    """Return the content of a chat's part; None if it is not in the request (it has a URL), or in another form."""
    kind = kind_of(part, _NAMES)
    if kind is None:
        return None
    try:
        head, _, data = url_of(part, "").partition(",")
    except PromptError:
        return None
    head = head.lower()
    return _content(kind, data) if head.startswith("data:") and head.endswith(";base64") else None


def stand_in(content: Content) -> dict[str, Any]:
    """Return a chat's part with this content, in a few bytes."""
    name = _NAMES[content.kind]
    return {"type": name, name: {"url": f"data:;base64,#{content.sha256.hex()}"}}


def contents_of(image_data: Any) -> list[Content]:
    """Return the contents of the native API's images, up to the first that is not in the request, or one too many,
    which has no kind; of a list for each prompt, those of the first.
    """
    images = image_data if isinstance(image_data, list) else [image_data]
    images = images[0] if images and isinstance(images[0], list) else images
    found: list[Content] = []
    for image in images:
        known = isinstance(image, str) and not image.startswith(("http:", "https:", "file:"))
        if not known or len(found) == MAX_CONTENTS:
            return [*found, Content("", b"")]
        found.append(_content("image", image.rpartition(";base64,")[2]))
    return found


def _content(kind: str, data: str) -> Content:
    if (known := _STAND_IN.fullmatch(data)) is not None:
        return Content(kind, bytes.fromhex(known[1]))
    return Content(kind, hashlib.sha256(data.encode("utf-8", "replace")).digest())
