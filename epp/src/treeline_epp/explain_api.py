"""The messages between `treeline pick explain` and the debug pages of a picker's admin port."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

DECISIONS, EXPLAIN = "/debug/decisions", "/debug/explain"


class Asked(Struct, frozen=True, forbid_unknown_fields=True):
    """A request to be explained: its path, further headers (lower-case names), and its body. The body of a POST to
    `EXPLAIN`, as JSON."""

    path: str
    body: bytes
    headers: dict[str, str] = {}


class Verdict(Struct, frozen=True, omit_defaults=True):
    """One endpoint's part in a decision. `rank` is its place (1: chosen), None where it is no candidate or its policy
    does not rank it; `filter` and `why` say what left it out. `terms` are those of its score."""

    endpoint: str
    address: str
    pool: str
    rank: int | None = None
    filter: str = ""
    why: str = ""
    terms: Mapping[str, float | None] = {}
