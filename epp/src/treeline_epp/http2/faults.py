"""What ends a connection."""

from __future__ import annotations

from treeline_epp.http2.frames import Code


class ConnectionFault(Exception):
    """The peer broke the protocol of the connection."""

    def __init__(self, code: Code, why: str) -> None:
        super().__init__(why)
        self.code = code


def unpadded(payload: memoryview) -> memoryview:
    """The payload of a padded frame. Raises ConnectionFault."""
    if not payload or payload[0] >= len(payload):
        raise ConnectionFault(Code.PROTOCOL_ERROR, "more padding than frame")
    return payload[1 : len(payload) - payload[0]]
