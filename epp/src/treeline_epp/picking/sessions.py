"""Sessions: requests that belong together by their clients' word, and the endpoint of the last one.

A session is a preference, not a chain: its next request goes where the last one went while that costs at most twice as
much as elsewhere, so that no request is held up by one busy endpoint. Known cached prefixes are in the costs already; a
session adds what they lack: prompts without keys, events that were lost, predictions that ended. Without an entry (a
new session, one that was idle for long, a picker that has just started) costs alone decide.

A session is identified by a number of 40 bits, made with a secret from the pool, the client and the client's name for
it. The first eight are the client's: if there are too many sessions, the clients with most lose theirs.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Final

LIFE_S: Final = 1800.0
"""Life of a session without requests: by then its endpoint has usually evicted its prefix."""
MOST_SESSIONS: Final = 65_536
"""Most sessions that are remembered: some 15 MB."""
WORSE_SHARE, WORSE_S = 2.0, 0.020
"""Most that a session's endpoint may cost, against the best one: as for a hot prefix, about as much as computing the
prompt a second time. The constant is for costs that are too small to compare."""
_OWN_BYTES: Final = 4


def session_number(secret: bytes, pool: str, client: str, name: str) -> int:
    """Return a number from 1 to 2⁴⁰ - 1, the same in every picker with this secret (at most 64 bytes)."""

    def digest(size: int, *words: str) -> bytes:
        text = "\0".join(words).encode("utf-8", "surrogatepass")  # no header contains a zero
        return hashlib.blake2b(text, digest_size=size, key=secret).digest()

    return int.from_bytes(digest(1, client) + digest(_OWN_BYTES, pool, client, name), "big") or 1


class Sessions:
    """The endpoint of each session, at most `most` of them. All times are the caller's clock, in seconds.

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
        """The sessions by the client's part of their number, at most 256; the longest idle are first."""

    def __len__(self) -> int:
        return self._size

    def endpoint(self, session: int, now: float) -> str | None:
        """Return the name of the endpoint of its last request; None without one, or if that is too long ago. O(1)."""
        name, since = self._of(session).get(session, (None, now))
        return name if now - since < LIFE_S else None

    def remember(self, session: int, endpoint: str, now: float) -> None:
        """Record that a request of it went there at `now`; an older one changes nothing. O(1), or O(clients) if there
        are too many.
        """
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
        """Forget this endpoint, unless the session has moved on: it did not find its prefix there. O(1)."""
        own = self._of(session)
        if own.get(session, ("", 0.0))[0] == endpoint:
            del own[session]
            self._size -= 1

    def expire(self, now: float) -> None:
        """Forget sessions that were idle for too long. O(clients + forgotten)."""
        for client, own in list(self._clients.items()):
            while own and now - next(iter(own.values()))[1] >= LIFE_S:
                own.popitem(last=False)
                self._size -= 1
            if not own:
                del self._clients[client]

    def _of(self, session: int) -> dict[int, tuple[str, float]]:
        return self._clients.get(session >> 8 * _OWN_BYTES, {})


def stays(cost_s: float, best_s: float) -> bool:
    """Return whether a session stays at an endpoint of this cost, if the best one costs `best_s`."""
    return cost_s <= WORSE_SHARE * best_s + WORSE_S
