"""Other members in a request's body (the model's name, a salt): only those values change, every other byte stays."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

import msgspec

# A string, or a bracket. The possessive repeats keep the matcher from ever going back over a long string.
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[{}\[\]]', re.DOTALL)
_COLON = re.compile(rb"[ \t\r\n]*:[ \t\r\n]*")
_SCALAR = re.compile(rb"[^,}\s]*")
_BEGIN = re.compile(rb"[ \t\r\n]*\{[ \t\r\n]*")
_QUOTE, _BACKSLASH, _OPEN, _CLOSE = ord('"'), b"\\", b"{[", b"}]"


def with_model(body: bytes, model: str) -> bytes:
    """`body`, a JSON object, with `model` as its model. O(bytes), most of it in one regular expression.

    Where the member occurs more than once each is replaced, since decoders differ in which one counts. A body without
    one is returned as it is.
    """
    name = msgspec.json.encode(model)
    found = _values(body, {b"model"})
    return _spliced(body, [(start, end, name) for _, start, end in found if body[start] == _QUOTE])


def with_members(body: bytes, values: Mapping[str, str | None]) -> bytes:
    """`body`, a JSON object, with these values and no others under these names, whatever was there. O(bytes).

    Every occurrence is replaced. A name that does not occur is added, unless its value is None.
    """
    encoded = {name.encode(): msgspec.json.encode(value) for name, value in values.items()}
    changes, missing = [], {name.encode(): None for name, value in values.items() if value is not None}
    for name, start, end in _values(body, encoded.keys()):
        changes.append((start, end, encoded[name]))
        missing.pop(name, None)
    begin = _BEGIN.match(body)
    if begin is None:
        raise ValueError("the body is no JSON object")
    members = b",".join(b'"%s":%s' % (name, encoded[name]) for name in missing)
    if members and body[begin.end() : begin.end() + 1] != b"}":
        members += b","
    return _spliced(body, [(begin.end(), begin.end(), members), *changes])


def _spliced(body: bytes, changes: Iterable[tuple[int, int, bytes]]) -> bytes:
    """`body` with the given ranges, in order, replaced."""
    parts: list[bytes] = []
    kept = 0
    for start, end, value in changes:
        parts += (body[kept:start], value)
        kept = end
    return b"".join((*parts, body[kept:])) if parts else body


def _values(body: bytes, names: Iterable[bytes]) -> Iterator[tuple[bytes, int, int]]:
    """`(name, start, end)` of the values of these members of the outermost object, in order."""
    depth = 0
    tokens = _TOKEN.finditer(body)
    for token in tokens:
        first = body[token.start()]
        if first in _OPEN:
            depth += 1
        elif first in _CLOSE:
            depth -= 1
        elif depth == 1 and (colon := _COLON.match(body, token.end())):
            name = _name(token.group())
            if name in names and colon.end() < len(body):
                yield name, colon.end(), _end_of_value(body, colon.end(), tokens)


def _end_of_value(body: bytes, start: int, tokens: Iterator[re.Match[bytes]]) -> int:
    if body[start] == _QUOTE:
        return next(tokens).end()
    if body[start] in _OPEN:
        depth = 0
        for token in tokens:
            first = body[token.start()]
            depth += (first in _OPEN) - (first in _CLOSE)
            if not depth:
                return token.end()
        return len(body)
    scalar = _SCALAR.match(body, start)
    return scalar.end() if scalar is not None else start


def _name(key: bytes) -> bytes:
    """A member's name, in whatever spelling: JSON lets any character be escaped."""
    if _BACKSLASH in key:
        return str(msgspec.json.decode(key)).encode()
    return key[1:-1]
