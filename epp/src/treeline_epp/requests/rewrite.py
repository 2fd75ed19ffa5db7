"""Sets members of a request's body (the model's name, a salt); all other bytes stay the same."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from treeline_epp.picking.request import Request
from treeline_epp.requests.body import Body, Edit
from treeline_epp.requests.forms import model_field
from treeline_epp.requests.outline import Outline

# A string, or a bracket. The possessive repeats keep the matcher from backtracking over a long string.
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[{}\[\]]', re.DOTALL)
_COLON = re.compile(rb"[ \t\r\n]*:[ \t\r\n]*")
_SCALAR = re.compile(rb"[^,}\s]*")
_BEGIN = re.compile(rb"[ \t\r\n]*\{[ \t\r\n]*")
_QUOTE, _BACKSLASH, _OPEN, _CLOSE = ord('"'), b"\\", b"{[", b"}]"
_NAME_BYTES = 4096
_NO_MEMBERS: Mapping[str, Any] = {}


def to_send(
    body: bytes | Body | None, outline: Outline | None, request: Request, more: Mapping[str, Any] = _NO_MEMBERS
) -> bytes | Body | None:
    """Return the body to send instead of the client's, with the request's changes and the members `more`; None if the
    proxy shows none. `outline` is that of a `Body`.
    """
    if not body:
        return None
    members = {**(request.members or {}), **more}
    if request.rewrite is not None and (field := model_field(body)) is not None:
        made = (body if isinstance(body, Body) else Body([body])).edited(
            [replace(field, text=request.rewrite.encode())]
        )
        return made if isinstance(body, Body) else made.joined()
    if isinstance(body, Body):
        assert outline is not None, "a large body was read by its outline"
        return edited(body, outline, request.rewrite, members)
    return edited(Body([body]), _outline(body), request.rewrite, members).joined()


def edited(body: Body, outline: Outline, model: str | None, members: Mapping[str, Any]) -> Body:
    """Return `body` with another model (unless None), and with exactly the values of `members` under their names.

    Every occurrence is replaced, since decoders differ in which one counts. A missing member is added, unless its value
    is None; a missing model is not. O(pieces).
    """
    edits = [] if model is None else _model_edits(body, outline, msgspec.json.encode(model))
    added = b""
    for name, value in members.items():
        text = msgspec.json.encode(value)
        places = outline.spans.get(name, ())
        edits += [Edit(start, stop, text) for start, stop in places]
        if not places and value is not None:
            added += msgspec.json.encode(name) + b":" + text + b","
    if added:
        edits.append(Edit(outline.first, outline.first, added if outline.spans else added[:-1]))
    return body.edited(sorted(edits, key=lambda edit: edit.start))


def _model_edits(body: Body, outline: Outline, name: bytes) -> list[Edit]:
    edits = []
    for start, stop in outline.spans.get("model", ()):
        text = body.slice(start, min(stop, start + _NAME_BYTES))
        begin = start + len(text) - len(text.lstrip())
        if text.lstrip()[:1] == b'"':
            end = stop if stop - start > _NAME_BYTES else start + len(text.rstrip())
            edits.append(Edit(begin, end, name))
    return edits


def _outline(body: bytes) -> Outline:
    """Find the outermost object's members, and the places of their values without the blanks around them."""
    begin = _BEGIN.match(body)
    if begin is None:
        raise ValueError("the body is no JSON object")
    outline = Outline()
    outline.first = begin.end()
    spans = outline.spans
    depth = 0
    tokens = _TOKEN.finditer(body)
    for token in tokens:
        first = body[token.start()]
        if first in _OPEN:
            depth += 1
        elif first in _CLOSE:
            depth -= 1
        elif depth == 1 and (colon := _COLON.match(body, token.end())):
            start = colon.end()
            name = _name(token.group())
            spans.setdefault(name, []).append((start, _end_of_value(body, start, tokens)))
    return outline


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


def _name(key: bytes) -> str:
    """Return a member's name in any spelling: JSON lets any character be escaped."""
    return msgspec.json.decode(key, type=str) if _BACKSLASH in key else str(key[1:-1], "utf-8", "replace")
