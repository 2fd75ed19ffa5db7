"""What is sent, as far as the peer's windows allow (RFC 9113, section 5.2), in the order in which it is written."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator

from treeline_epp.http2 import frames
from treeline_epp.http2.frames import FIRST_WINDOW, LEAST_FRAME_BYTES, MOST_WINDOW, Code


class WindowTooLarge(Exception):
    """The peer gave more room than numbers have."""


class Answer:
    """What is sent of one stream."""

    __slots__ = ("begun", "ending", "queue", "room")

    def __init__(self, room: int) -> None:
        self.room = room
        """Bytes that the peer takes of this stream."""
        self.begun = False
        """Its fields are sent."""
        self.queue: deque[bytes | memoryview] = deque()
        """Waits for room."""
        self.ending: bytes | None = None
        """A block of trailers, to be sent behind the queue."""

    def grow(self, more: int) -> None:
        """Raises WindowTooLarge. `more` is below zero where the peer has made all windows smaller."""
        self.room += more
        if self.room > MOST_WINDOW:
            raise WindowTooLarge


class Sending:
    """The frames of a connection, and the room for its data."""

    def __init__(self) -> None:
        self.stream_window = FIRST_WINDOW
        """That new streams begin with."""
        self.frame_bytes = LEAST_FRAME_BYTES
        """The largest that the peer takes."""
        self.sent_bytes = 0
        """Of data, since the beginning."""
        self._room = FIRST_WINDOW
        self._out: list[bytes | memoryview] = []
        self._blocked: OrderedDict[int, Answer] = OrderedDict()
        """Streams that wait for the connection's room alone, in the order in which they began to. Those whose own
        windows are full are looked at when these grow."""

    def take(self) -> list[bytes | memoryview]:
        """What is to be written now."""
        out, self._out = self._out, []
        return out

    def control(self, frame: bytes) -> None:
        """A frame that no window holds back."""
        self._out.append(frame)

    def data(self, stream: int, answer: Answer, fields: bytes, data: bytes) -> None:
        """Bytes of a body, behind `fields` if these are not sent yet."""
        if not answer.begun:
            answer.begun = True
            self._out.append(frames.head(frames.HEADERS, frames.END_HEADERS, stream, len(fields)) + fields)
        size = len(data)
        if answer.queue or size > answer.room or size > self._room or size > self.frame_bytes:
            answer.queue.append(memoryview(data))
            self.drain(stream, answer)
            return
        self._spend(answer, size)
        self._out.append(frames.head(frames.DATA, 0, stream, size))
        self._out.append(data)

    def trailers(self, stream: int, block: bytes, *, whole: bool) -> None:
        """The end of an answer; an empty block is none.

        whole: the request has ended, too; else no more of it is needed (RFC 9113, section 8.1)."""
        if block:
            flags = frames.END_HEADERS | frames.END_STREAM
            self._out.append(frames.head(frames.HEADERS, flags, stream, len(block)) + block)
        else:
            self._out.append(frames.head(frames.DATA, frames.END_STREAM, stream, 0))
        if not whole:
            self._out.append(frames.rst_stream(stream, Code.NO_ERROR))

    def forget(self, stream: int) -> None:
        """It is closed: nothing more is sent of it."""
        self._blocked.pop(stream, None)

    def grow(self, more: int) -> None:
        """The connection has more room. Raises WindowTooLarge."""
        self._room += more
        if self._room > MOST_WINDOW:
            raise WindowTooLarge

    def resume(self) -> Iterator[int]:
        """Send what has room now; yields the streams of which nothing waits any more. O(what is sent)."""
        while self._room > 0 and self._blocked:
            stream, answer = next(iter(self._blocked.items()))
            if self.drain(stream, answer):
                yield stream

    def drain(self, stream: int, answer: Answer) -> bool:
        """Send of this stream what has room now; whether nothing waits in it any more."""
        queue = answer.queue
        self._blocked.pop(stream, None)
        while queue:
            # A peer may have made a window smaller than what it holds already: there is less than no room then.
            size = max(0, min(len(queue[0]), answer.room, self._room, self.frame_bytes))
            if not size and len(queue[0]):
                if answer.room > 0:
                    self._blocked[stream] = answer  # behind the others
                return False
            self._out.append(frames.head(frames.DATA, 0, stream, size))
            self._out.append(queue[0][:size])
            if size == len(queue[0]):
                queue.popleft()
            else:
                queue[0] = queue[0][size:]
            self._spend(answer, size)
        return True

    def _spend(self, answer: Answer, size: int) -> None:
        answer.room -= size
        self._room -= size
        self.sent_bytes += size


class Stream:
    """What is known of an open one."""

    __slots__ = ("announced", "answer", "came", "peer_ended", "unread", "window")

    def __init__(self, room: int, window: int, announced: int | None) -> None:
        self.answer = Answer(room)
        self.window = window
        """Bytes that the peer may send."""
        self.unread = 0
        """Bytes that were read, and not credited again."""
        self.peer_ended = False
        self.announced = announced
        """`content-length`."""
        self.came = 0
