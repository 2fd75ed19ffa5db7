"""What the picker says of its endpoints, on its admin port."""

from __future__ import annotations

from msgspec import MsgspecError, Struct, json


class Endpoint(Struct):
    """`problem` is why it is not ready; where that is `lasting`, waiting is in vain."""

    name: str
    ready: bool
    problem: str | None
    lasting: bool


class Pool(Struct):
    models: list[str]
    endpoints: list[Endpoint]


class Listing(Struct):
    """The page `/endpoints`."""

    pools: dict[str, Pool]

    def endpoint(self, name: str) -> Endpoint | None:
        """The endpoint of this name, None while the picker has not heard of it."""
        found = (one for pool in self.pools.values() for one in pool.endpoints if one.name == name)
        return next(found, None)


def url(admin_port: int) -> str:
    return f"http://127.0.0.1:{admin_port}/endpoints"


UNREADABLE = (MsgspecError, UnicodeDecodeError)
"""The errors of reading a page that is not the picker's."""


def read(page: bytes) -> Listing:
    return json.decode(page, type=Listing)
