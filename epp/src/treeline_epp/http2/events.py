"""What a connection tells whoever serves its streams."""

from __future__ import annotations

import msgspec

from treeline_epp.http2.fields import Fields


class Requested(msgspec.Struct, frozen=True, gc=False):
    """A new stream. `ended`: nothing follows."""

    stream: int
    fields: Fields
    ended: bool


class Came(msgspec.Struct, frozen=True, gc=False):
    """Bytes of a request's body; tell `Connection.read` when they are dealt with. `ended`: nothing follows."""

    stream: int
    data: bytes
    ended: bool


class Ended(msgspec.Struct, frozen=True, gc=False):
    """The peer took the stream back, or it was closed for a fault: nothing can be sent on it."""

    stream: int


class Roomy(msgspec.Struct, frozen=True, gc=False):
    """All that waited to be sent on a stream has gone."""

    stream: int


Event = Requested | Came | Ended | Roomy
