"""Limits that a good answer keeps, as `--goodput ttft:200 tpot:30` gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

MEASURES = ("ttft", "tpot", "e2e")


def parse_limits(words: Sequence[str]) -> dict[str, float]:
    """Measure → milliseconds. Raises ValueError, which says how a limit is written."""
    limits: dict[str, float] = {}
    for word in words:
        name, colon, number = word.partition(":")
        try:
            limit = float(number)
        except ValueError:
            limit = 0.0
        if name not in MEASURES or not colon or not limit > 0:
            raise ValueError(f"a limit is one of {', '.join(MEASURES)}, a colon and milliseconds, not {word!r}")
        if name in limits:
            raise ValueError(f"there are two limits for {name}")
        limits[name] = limit
    return limits


def is_good(measured: Mapping[str, float | None], limits: Mapping[str, float]) -> bool:
    """Whether an answer kept all limits. What an answer does not have (time per token, of one token) keeps any."""
    return all((value := measured[name]) is None or value <= limit for name, limit in limits.items())
