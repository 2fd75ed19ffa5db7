"""The output of a connection, in order, within the peer's windows (RFC 9113, section 5.2)."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator

from treeline_epp.http2 import frames
from treeline_epp.http2.frames import FIRST_WINDOW, LEAST_FRAME_BYTES, MOST_WINDOW, Code


class WindowTooLarge(Exception):
    """The peer raised a window beyond its largest value."""


class Answer:
    """The output of one stream."""

    __slots__ = ("begun", "ending", "queue", "room")

    def __init__(self, room: int) -> None:
        self.room = room
        """Bytes that the peer takes on this stream."""
        self.begun = False
        """Whether its fields are sent."""
        self.queue: deque[bytes | memoryview] = deque()
        """Data that wait for room."""
        self.ending: bytes | None = None
        """A block of trailers, to be sent after the queue."""

    def grow(self, more: int) -> None:
        """Change the window. `more` is negative if the peer has made all windows smaller. Raises WindowTooLarge."""
        self.room += more
        if self.room > MOST_WINDOW:
            raise WindowTooLarge


class Sending:
    """The frames of a connection, and the room for its data."""

    def __init__(self) -> None:
        self.stream_window = FIRST_WINDOW
        """The window of new streams."""
        self.frame_bytes = LEAST_FRAME_BYTES
        """The largest frame that the peer takes."""
        self.sent_bytes = 0
        """Bytes of data since the beginning."""
        self._room = FIRST_WINDOW
        self._out: list[bytes | memoryview] = []
        self._blocked: OrderedDict[int, Answer] = OrderedDict()
        """Streams that wait for the connection's window alone, in order. Streams whose own windows are full wait
        until these grow."""

    def take(self) -> list[bytes | memoryview]:
        """Return the bytes to write now."""
        out, self._out = self._out, []
        return out

    def control(self, frame: bytes) -> None:
        """Add a frame that no window holds back."""
        self._out.append(frame)

    def data(self, stream: int, answer: Answer, fields: bytes, data: bytes) -> None:
        """Send bytes of a body, after `fields` if these are not sent yet."""
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
        """End an answer; an empty block means no trailers.

        `whole`: the request has ended, too; otherwise its rest is not needed (RFC 9113, section 8.1).
        """
        if block:
            flags = frames.END_HEADERS | frames.END_STREAM
            self._out.append(frames.head(frames.HEADERS, flags, stream, len(block)) + block)
        else:
            self._out.append(frames.head(frames.DATA, frames.END_STREAM, stream, 0))
        if not whole:
            self._out.append(frames.rst_stream(stream, Code.NO_ERROR))

    def forget(self, stream: int) -> None:
        """Send nothing more of a closed stream."""
        self._blocked.pop(stream, None)

    def grow(self, more: int) -> None:
        """Raise the connection's window. Raises WindowTooLarge."""
        self._room += more
        if self._room > MOST_WINDOW:
            raise WindowTooLarge

    def resume(self) -> Iterator[int]:
        """Send the data that have room now; yield the streams that have no more. O(bytes sent)."""
        while self._room > 0 and self._blocked:
            stream, answer = next(iter(self._blocked.items()))
            if self.drain(stream, answer):
                yield stream

    def drain(self, stream: int, answer: Answer) -> bool:
        """Send the data of this stream that have room now; return whether none is left."""
        queue = answer.queue
        self._blocked.pop(stream, None)
        while queue:
            # A peer may make a window smaller than the data in flight: then its room is negative.
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
    """The state of an open stream."""

    __slots__ = ("announced", "answer", "came", "peer_ended", "unread", "window")

    def __init__(self, room: int, window: int, announced: int | None) -> None:
        self.answer = Answer(room)
        self.window = window
        """Bytes that the peer may send."""
        self.unread = 0
        """Bytes that were read, and not credited yet."""
        self.peer_ended = False
        self.announced = announced
        """`content-length`."""
        self.came = 0
