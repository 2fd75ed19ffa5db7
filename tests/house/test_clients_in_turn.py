"""CI tries some of the field's clients each day, and all of them within days."""

from __future__ import annotations

import runpy
from pathlib import Path

CLIENTS = runpy.run_path(str(Path(__file__).resolve().parents[2] / "scripts" / "clients.py"))


def test_each_client_has_its_turn_and_is_pinned() -> None:
    names = list(CLIENTS["CLIENTS"])
    days = -(-len(names) // 4)
    for first in range(20_000, 20_000 + len(names)):
        turns = [CLIENTS["in_turn"](names, 4, day) for day in range(first, first + days)]
        assert all(len(set(turn)) == 4 for turn in turns)
        assert {name for turn in turns for name in turn} == set(names)
    assert CLIENTS["in_turn"](names, None, 3) == names
    pinned = [(client.without or client.packages)[0] for client in CLIENTS["CLIENTS"].values()]
    assert all("==" in package for package in pinned), pinned
