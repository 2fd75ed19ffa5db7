"""What a connection knows of one of its streams."""

from __future__ import annotations

from treeline_epp.http2.sending import Answer


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
