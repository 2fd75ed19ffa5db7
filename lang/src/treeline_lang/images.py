"""Images and videos of a program as APIs expect them: a URL, or a data URL."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Final

_SIGNATURES: Final = {
    "image": {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp", b"BM": "bmp"},
    "video": {b"ftyp": "mp4", b"\x1aE\xdf\xa3": "webm", b"RIFF": "x-msvideo"},
}
_FORMATS: Final = {"image": "PNG, JPEG, GIF, WebP or BMP", "video": "MP4, MOV, WebM, Matroska or AVI"}
MAX_BYTES: Final = 50 << 20


def is_url(source: str) -> bool:
    """Not a path."""
    return source.startswith(("http:", "https:", "data:"))


def url_of(source: str | bytes, kind: str = "image") -> str:
    """The URL of an image or video given by path, URL or bytes. Raises OSError, and ValueError for other content."""
    if isinstance(source, str) and is_url(source):
        return source
    if isinstance(source, str):
        path = Path(source).expanduser()
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"{source} is larger than {MAX_BYTES >> 20} MiB")
        data = path.read_bytes()
    else:
        data = source
    beginnings = (data, data[4:]) if kind == "video" else (data,)  # the first bytes of an MP4 are a length
    known = _SIGNATURES[kind].items()
    form = next((form for signature, form in known for one in beginnings if one.startswith(signature)), None)
    if form is None:
        raise ValueError(f"{source if isinstance(source, str) else 'these bytes'}: not a {_FORMATS[kind]}")
    return f"data:{kind}/{form};base64,{base64.b64encode(data).decode()}"
