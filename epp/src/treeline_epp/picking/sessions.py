"""Sessions: requests that their clients say belong together, and the endpoint that each of them went to last.

A session is a preference, not a chain: its next request goes where the last one went while that costs at most twice as
much as elsewhere, so that no request is held up by one busy endpoint. What an endpoint is known to have cached is in
the costs already; a session adds what they lack: prompts without keys, events that were lost, predictions that ended.
Without an entry (a new session, one that was idle for long, a picker that has just started) costs alone decide.

A session is known by a number of 40 bits, made with a secret of the pool, the client and the name that the client gave.
The first eight are the client's: where there are too many sessions, those who have most lose theirs.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Final

LIFE_S: Final = 1800.0
"""Of a session without requests: what its endpoint had cached has made room for others by then, as a rule."""
MOST_SESSIONS: Final = 65_536
"""Some 15 MB."""
WORSE_SHARE, WORSE_S = 2.0, 0.020
"""How much a session's endpoint may cost, beside the best one: as for a hot prefix, about as much as computing the
prompt a second time. The constant is for costs that are too small for a comparison to mean anything."""
_OWN_BYTES: Final = 4


def session_number(secret: bytes, pool: str, client: str, name: str) -> int:
    """A number from 1 to 2⁴⁰ - 1, the same in every picker with this secret (at most 64 bytes)."""

    def digest(size: int, *words: str) -> bytes:
        text = "\0".join(words).encode("utf-8", "surrogatepass")  # no header holds a zero
        return hashlib.blake2b(text, digest_size=size, key=secret).digest()

    return int.from_bytes(digest(1, client) + digest(_OWN_BYTES, pool, client, name), "big") or 1


class Sessions:
    """Session → endpoint, for the `most` of them. All times are the caller's clock, in seconds.

    >>> sessions = Sessions(most=2)
    >>> for number, endpoint in (1, "a"), (2, "b"), (1, "b"), (3, "a"):
    ...     sessions.remember(number, endpoint, now=float(number))
    >>> [sessions.endpoint(number, now=5.0) for number in (1, 2, 3)]
    ['b', None, 'a']
    """

    def __init__(self, most: int = MOST_SESSIONS) -> None:
        self._most = most
        self._size = 0
        self._clients: dict[int, OrderedDict[int, tuple[str, float]]] = {}
        """By the client's part of their number, at most 256: its sessions, those first that were idle longest."""

    def __len__(self) -> int:
        return self._size

    def endpoint(self, session: int, now: float) -> str | None:
        """The name of the endpoint that its last request went to; None without one, or if it is too long ago. O(1)."""
        name, since = self._of(session).get(session, (None, now))
        return name if now - since < LIFE_S else None

    def remember(self, session: int, endpoint: str, now: float) -> None:
        """A request of it went there at `now`; what is older than what is known changes nothing. O(1), or O(clients)
        where there are too many."""
        own = self._clients.setdefault(session >> 8 * _OWN_BYTES, OrderedDict())
        known = own.get(session)
        if known is not None and known[1] > now:
            return
        self._size += known is None
        own[session] = endpoint, now
        own.move_to_end(session)
        if self._size > self._most:
            max(self._clients.values(), key=len).popitem(last=False)
            self._size -= 1

    def forget(self, session: int, endpoint: str) -> None:
        """It did not find there what it needs. Of a session that has gone on elsewhere nothing is forgotten. O(1)."""
        own = self._of(session)
        if own.get(session, ("", 0.0))[0] == endpoint:
            del own[session]
            self._size -= 1

    def expire(self, now: float) -> None:
        """Forget those that were idle for too long. O(clients + forgotten)."""
        for client, own in list(self._clients.items()):
            while own and now - next(iter(own.values()))[1] >= LIFE_S:
                own.popitem(last=False)
                self._size -= 1
            if not own:
                del self._clients[client]

    def _of(self, session: int) -> dict[int, tuple[str, float]]:
        return self._clients.get(session >> 8 * _OWN_BYTES, {})


def stays(cost_s: float, best_s: float) -> bool:
    """Does a session stay at an endpoint of this cost, where the best one costs so much?"""
    return cost_s <= WORSE_SHARE * best_s + WORSE_S
