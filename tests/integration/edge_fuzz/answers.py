"""Reads the answers on a connection, complete or not, and finds those that no client should ever get."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import hpack
from hyperframe import frame as h2
from hyperframe.exceptions import HyperframeError

_STATUS = re.compile(rb"(?:^|\n)HTTP/1\.[01] (\d{3})[^\n]*\r\n")
THEIRS = frozenset({501, 505})
"""Statuses that HTTP itself prescribes for an unknown transfer coding or version: the client's fault."""
FULL = re.compile(rb'"code": ?"(overloaded|rate_limited|too_many_requests|server_overloaded)"')
"""An answer that says "no room now" is no failure."""


@dataclass
class Answer:
    """A status with the head and body that have arrived."""

    status: int
    text: bytes = field(default=b"")

    @property
    def is_defect(self) -> bool:
        """Return whether it is a 5xx of our own making."""
        return self.status >= 500 and self.status not in THEIRS and FULL.search(self.text) is None


def read(data: bytes, http2: bool) -> list[Answer]:
    """Return the answers in a server's bytes. Never raises: unreadable ones are left out."""
    return _read2(data) if http2 and not data.startswith(b"HTTP/1") else _read1(data)


def _read1(data: bytes) -> list[Answer]:
    starts = list(_STATUS.finditer(data))
    ends = [*(match.start() for match in starts[1:]), len(data)]
    return [
        Answer(int(match[1]), data[match.start() : end][:2000])
        for match, end in zip(starts, ends, strict=False)  # no status, one end
    ]


def _read2(data: bytes) -> list[Answer]:
    decoder = hpack.Decoder()
    found: dict[int, Answer] = {}
    at = 0
    while at + 9 <= len(data):
        try:
            frame, length = h2.Frame.parse_frame_header(memoryview(data[at : at + 9]))
            frame.parse_body(memoryview(data[at + 9 : at + 9 + length]))
            if isinstance(frame, h2.HeadersFrame):
                headers = [(str(name), str(value)) for name, value in decoder.decode(frame.data)]
                status = dict(headers).get(":status")
                if status is not None:
                    found[frame.stream_id] = Answer(int(status), repr(headers).encode())
            elif isinstance(frame, h2.DataFrame) and frame.stream_id in found:
                found[frame.stream_id].text += frame.data[:2000]
        except (HyperframeError, hpack.HPACKError, ValueError):
            break
        at += 9 + length
    return list(found.values())
