"""The model's name in responses, put back to the one that the client asked for.

Names are where the APIs have them: `model` of each JSON object of a body (one, or one an event of a stream), and of the
objects `message` (Anthropic's streams) and `response` (OpenAI's Responses) in them. The body is not parsed: its strings
and brackets are followed across pieces, whatever their edges, and all bytes but the name's stay what they were. The
same words in a text, in deeper objects or in lists are left alone.
"""

from __future__ import annotations

import json
import re
from typing import Final

_TOKEN: Final = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\]:,]', re.DOTALL)
_STRING_END: Final = re.compile(rb'(?:[^"\\]|\\.)*"', re.DOTALL)
_HOLDERS: Final = frozenset({b'"message"', b'"response"'})
_LONGEST: Final = 2048
"""Bytes of a string that may be a name: a longer one is passed on before its end."""
_MOST_DEPTH: Final = 2
_OBJECT: Final = 0x7B


class ModelRenamer:
    """Is fed the pieces of one body, in order. `shown` is the name that the engine says, `asked` the client's."""

    def __init__(self, shown: str, asked: str) -> None:
        self._shown = shown
        self._asked = json.dumps(asked).encode()
        self._held = b""
        """The beginning of a string whose end has not come."""
        self._in_string = False
        """A long string, whose beginning was passed on."""
        self._open: list[int] = []
        """The brackets that are open, as far as they matter."""
        self._depth = 0
        self._key = b""
        self._holder = b""
        """The key of the object at depth 2."""
        self._last = b""
        """A string, and whether a colon came after it."""
        self._value = False

    def feed(self, piece: bytes | bytearray | memoryview, *, end: bool = False) -> bytes:
        """What may be passed on now; all of it at the end. O(bytes)."""
        data = self._held + bytes(piece)
        self._held = b""
        at = 0
        if self._in_string:
            found = _STRING_END.match(data)
            if found is None:
                return self._keep(data, _odd_backslashes(data), end=end)
            self._in_string, at = False, found.end()
        out, start = [], 0
        while (token := _TOKEN.search(data, at)) is not None:
            quote = data.find(b'"', at, token.start())
            if quote >= 0:  # a string that has no end here
                break
            if (new := self._on(token.group())) is not None:
                out += [data[start : token.start()], new]
                start = token.end()
            at = token.end()
        rest = data.find(b'"', at)
        if rest < 0 or end:
            out.append(data[start:])
            return b"".join(out)
        if len(data) - rest > _LONGEST:
            self._in_string, self._last = True, b""
            cut = len(data) - _odd_backslashes(data)
            out.append(data[start:cut])
            self._held = data[cut:]
        else:
            out.append(data[start:rest])
            self._held = data[rest:]
        return b"".join(out)

    def _keep(self, data: bytes, count: int, *, end: bool) -> bytes:
        cut = len(data) if end else len(data) - count
        self._held = data[cut:]
        return data[:cut]

    def _on(self, token: bytes) -> bytes | None:
        """The next token of the body; what stands in its place, if another."""
        first = token[0]
        if first == 0x22:
            named = self._is_name() and self._says(token)
            self._last = token
            return self._asked if named else None
        if first in b"{[":
            self._depth += 1
            if self._depth <= _MOST_DEPTH:
                self._open.append(first)
                if self._depth == _MOST_DEPTH:
                    self._holder = self._key
        elif first in b"}]":
            if 0 < self._depth <= _MOST_DEPTH:
                self._open.pop()
            self._depth = max(0, self._depth - 1)
        elif first == 0x3A and self._depth <= _MOST_DEPTH:
            self._key, self._value = self._last, True
            return None
        self._value = False
        return None

    def _is_name(self) -> bool:
        if not self._value or self._key != b'"model"' or not self._open or self._open[-1] != _OBJECT:
            return False
        if self._depth == 1:
            return True
        return self._depth == _MOST_DEPTH and self._open[0] == _OBJECT and self._holder in _HOLDERS

    def _says(self, token: bytes) -> bool:
        try:
            return bool(json.loads(token) == self._shown)
        except ValueError:
            return False


def _odd_backslashes(data: bytes) -> int:
    """1 where the last byte escapes the next one."""
    return (len(data) - len(data.rstrip(b"\\"))) % 2
