"""Server-sent events, from the bytes of a stream: no I/O, and nothing of what the events say."""

from __future__ import annotations

import re
from typing import Final

_LINE_END: Final = re.compile(rb"\r\n|\n|\r")
"""And nothing else: a text may hold other characters that Python takes for the ends of lines (U+2028, U+0085)."""
_BOM: Final = b"\xef\xbb\xbf"


class EventStream:
    """Takes bytes as they come, cut anywhere. An event is its data: nothing else of one is read."""

    def __init__(self, max_bytes: int) -> None:
        """max_bytes: of one event, as a server may never end one."""
        self._max_bytes = max_bytes
        self._line = bytearray()
        """What there is of the line that has not ended."""
        self._data: list[bytes] = []
        self._held = 0
        """Bytes of the data."""
        self._after_return = False
        """A line has ended with what may be the half of its end."""
        self._begun = False

    def take(self, chunk: bytes) -> list[str]:
        """→ the events that end here. Raises ValueError for one that is too large."""
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
        """What the stream had not ended with an empty line, as some servers do with their last event."""
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
