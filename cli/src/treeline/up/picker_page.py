"""Reads the page `/endpoints` of the picker's admin port."""

from __future__ import annotations

from msgspec import MsgspecError, Struct, json


class Endpoint(Struct):
    """`problem` says why the endpoint is not ready. If it is `lasting`, waiting does not help."""

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
        """Return the endpoint of this name; None if the picker does not list it yet."""
        found = (one for pool in self.pools.values() for one in pool.endpoints if one.name == name)
        return next(found, None)


def url(admin_port: int) -> str:
    return f"http://127.0.0.1:{admin_port}/endpoints"


UNREADABLE = (MsgspecError, UnicodeDecodeError)
"""The errors of reading a page that is not the picker's."""


def read(page: bytes) -> Listing:
    return json.decode(page, type=Listing)
