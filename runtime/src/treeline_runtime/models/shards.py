"""The division of a model among the ranks of a group. No torch here."""

from __future__ import annotations

from typing import NamedTuple


class Rank(NamedTuple):
    """One of `count` processes that compute a model together, numbered from 0."""

    index: int
    count: int


def check_ranks(config, count): pass
