"""Ids of requests and questions between the runtime's processes: none is used twice, and each says who made it.

An id is a name, `#`, a count, and for all HTTP processes but the first their rank before it: `cmpl-7#12`, `cmpl-7#2.0`.
So answers find their way back although no process on the way knows how many HTTP processes there are.
"""

from __future__ import annotations

import itertools


class IdMaker:
    """Makes the ids of one HTTP process."""

    def __init__(self, rank: int = 0) -> None:
        self._prefix = f"{rank}." if rank else ""
        self._count = itertools.count()

    def make(self, name: str) -> str:
        """An id that was never made before. `name` may be anything."""
        return f"{name}#{self._prefix}{next(self._count)}"


def maker(id: str) -> int:
    """The rank of the HTTP process that made an id."""
    rank, dot, _ = id.rpartition("#")[2].partition(".")
    return int(rank) if dot else 0
