"""Images of a program as APIs expect them: a URL, or a data URL."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Final

_SIGNATURES: Final = {
    b"\x89PNG\r\n\x1a\n": "png",
    b"\xff\xd8\xff": "jpeg",
    b"GIF8": "gif",
    b"RIFF": "webp",
    b"BM": "bmp",
}
MAX_BYTES: Final = 50 << 20


def is_url(source: str) -> bool:
    """Not a path."""
    return source.startswith(("http:", "https:", "data:"))


def url_of(source: str | bytes) -> str:
    """The URL of an image given by path, URL or bytes. Raises OSError, and ValueError for other content."""
    if isinstance(source, str) and is_url(source):
        return source
    if isinstance(source, str):
        path = Path(source).expanduser()
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"{source} is larger than {MAX_BYTES >> 20} MiB")
        data = path.read_bytes()
    else:
        data = source
    kind = next((kind for signature, kind in _SIGNATURES.items() if data.startswith(signature)), None)
    if kind is None:
        raise ValueError(f"{source if isinstance(source, str) else 'these bytes'}: not a PNG, JPEG, GIF, WebP or BMP")
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
