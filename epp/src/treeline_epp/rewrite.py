"""Another model name in a request's body: only that JSON string changes, every other byte stays as it came."""

from __future__ import annotations

import re

import msgspec

# A string, or a bracket. The possessive repeats keep the matcher from ever going back over a long string.
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[{}\[\]]', re.DOTALL)
_COLON = re.compile(rb"[ \t\r\n]*:[ \t\r\n]*")
_QUOTE, _BACKSLASH, _OPEN, _CLOSE = ord('"'), b"\\", b"{[", b"}]"


def with_model(body: bytes, model: str) -> bytes:
    """``body``, a JSON object, with ``model`` as its model. O(bytes), most of it in one regular expression.

    Where the member occurs more than once each is replaced, since decoders differ in which one counts. A body without
    one is returned as it is.
    """
    name = msgspec.json.encode(model)
    parts: list[bytes] = []
    kept = depth = 0
    tokens = _TOKEN.finditer(body)
    for token in tokens:
        first = body[token.start()]
        if first in _OPEN:
            depth += 1
        elif first in _CLOSE:
            depth -= 1
        elif depth == 1 and (colon := _COLON.match(body, token.end())) and _is_model(token.group()):
            value = colon.end()
            if value < len(body) and body[value] == _QUOTE:
                end = next(tokens).end()
                parts += (body[kept:value], name)
                kept = end
    return b"".join((*parts, body[kept:])) if parts else body


def _is_model(key: bytes) -> bool:
    """Is this the member's name, in whatever spelling? JSON lets any character be escaped."""
    if _BACKSLASH in key:
        return bool(msgspec.json.decode(key) == "model")
    return key == b'"model"'
