"""Server-sent events from the bytes of a stream, without I/O."""

from __future__ import annotations

import re
from typing import Final

_LINE_END: Final = re.compile(rb"\r\n|\n|\r")
"""Only these end a line: Python's splitlines would also split at characters such as U+2028 and U+0085."""
_BOM: Final = b"\xef\xbb\xbf"


class EventStream:
    """Takes bytes in pieces of any size. Only the data of an event is read."""

    def __init__(self, max_bytes: int) -> None:
        """Makes a reader; `max_bytes` bounds an event, since a server might never end one."""
        self._max_bytes = max_bytes
        self._line = bytearray()
        """The beginning of the line that has not ended."""
        self._data: list[bytes] = []
        self._held = 0
        """Bytes of the data so far."""
        self._after_return = False
        """Whether a line has ended with a carriage return, whose line feed may follow."""
        self._begun = False

    def take(self, chunk: bytes) -> list[str]:
        """Returns the events that end here. Raises ValueError for one that is too large."""
        if self._after_return:
            chunk = chunk.removeprefix(b"\n")
            self._after_return = False
        self._after_return = chunk.endswith(b"\r")
        *ended, rest = _LINE_END.split(chunk)
        found = []
        for end in ended:
            line = bytes(self._line) + end
            self._line.clear()
            found += self._end_of(line)
        self._line += rest
        if self._held + len(self._line) > self._max_bytes:
            raise ValueError(f"an event of more than {self._max_bytes} bytes")
        return found

    def end(self) -> list[str]:
        """Returns the last event, if the server did not end it with an empty line."""
        return [*self._end_of(bytes(self._line)), *self._end_of(b"")]

    def _end_of(self, line: bytes) -> list[str]:
        if not self._begun:
            self._begun, line = True, line.removeprefix(_BOM)
        if not line:
            event = [b"\n".join(self._data).decode(errors="replace")] if self._data else []
            self._data, self._held = [], 0
            return event
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
            self._held += len(value)
            if self._held > self._max_bytes:
                raise ValueError(f"an event of more than {self._max_bytes} bytes")
        return []
