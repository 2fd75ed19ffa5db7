"""How many requests of each client are at the picker: none may have more than its share.

A request is here from its headers on until its answer begins, which is as long as the proxy holds its body. The proxy
must be one that says who the client is and lets nobody else say it, as our own Envoy does.
"""

from __future__ import annotations

from collections.abc import Mapping

from treeline_wire import headers as names


class Clients:
    """Counts requests by client. `limit` is the most that one may have."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._present: dict[str, int] = {}

    def enter(self, headers: Mapping[str, str]) -> str | None:
        """A request comes: its client, to be given to `leave` when it goes; `None` where it may not come in."""
        client = client_of(headers)
        present = self._present.get(client, 0)
        if present >= self.limit:
            return None
        self._present[client] = present + 1
        return client

    def leave(self, client: str) -> None:
        """A request that `enter` let in has gone. Clients without a request are forgotten."""
        left = self._present[client] - 1
        if left:
            self._present[client] = left
        else:
            del self._present[client]

    def __len__(self) -> int:
        """Clients that have a request here."""
        return len(self._present)


def client_of(headers: Mapping[str, str]) -> str:
    """The client's name where the proxy knows it by its key, else the address that the proxy saw, which it appends to
    the list in `x-forwarded-for`."""
    named = headers.get(names.CLIENT)
    return named if named is not None else headers.get(names.FORWARDED_FOR, "").rpartition(",")[2].strip()
