"""Clients take turns, and the client with most waiting items loses one when there is no room."""

from __future__ import annotations

import pytest
from treeline_runtime.turns import ClientSeconds, Turns


def anything(_: int) -> bool:
    return True


def filled(most: int = 100, **lines: range) -> Turns[int]:
    turns = Turns[int](most)
    for client, items in lines.items():
        for item in items:
            assert turns.put(client, item) is None
    return turns


def test_a_client_that_comes_late_is_served_after_one_item_of_each_other_one() -> None:
    turns = filled(a=range(10), b=range(10, 20))
    turns.put(None, 99)
    assert [turns.take(anything) for _ in range(6)] == [0, 10, 99, 1, 11, 2]


def test_an_item_that_does_not_fit_lets_others_of_its_client_pass_and_keeps_its_place() -> None:
    turns = filled(a=range(4), b=range(11, 13))
    assert [turns.take(lambda item: item % 2 == 1) for _ in range(4)] == [1, 11, 3, None]
    assert [turns.take(anything) for _ in range(4)] == [12, 0, 2, None]


def test_without_room_the_client_with_most_loses_its_last() -> None:
    turns = filled(4, a=range(3), b=range(10, 11))
    assert turns.put("c", 20) == 2
    assert turns.put("a", 3) == 3, "among equals, the one that comes"
    assert turns.put("d", 30) == 1
    assert turns.put("d", 31) == 31
    assert len(turns) == 4


def test_a_returned_item_is_its_clients_next() -> None:
    turns = filled(a=range(3), b=range(10, 12))
    assert turns.take(anything) == 0
    turns.put_back("a", 0)
    turns.put_back("c", 20)
    assert [turns.take(anything) for _ in range(5)] == [10, 0, 20, 11, 1]


def test_a_removed_item_no_longer_waits() -> None:
    turns = filled(a=range(3), b=range(10, 11))
    turns.remove("b", 10)
    turns.remove("a", 1)
    with pytest.raises(ValueError, match="not in"):
        turns.remove("b", 10)
    assert turns.drop("a") == [0, 2]
    assert turns.drop("a") == []
    assert len(turns) == 0
    assert turns.take(anything) is None


def test_a_client_over_its_budget_waits_until_enough_is_returned() -> None:
    now = 0.0
    seconds = ClientSeconds(30.0, 0.5, lambda: now)
    seconds.charge("a", 20.0)
    assert seconds.wait_s("a") == 0
    seconds.charge("a", 20.0)
    assert (seconds.wait_s("a"), seconds.owed("a"), seconds.wait_s("b"), seconds.wait_s(None)) == (20, 40.0, 0, 0)
    now = 19.5
    assert seconds.wait_s("a") == 1
    now = 20.0
    assert seconds.wait_s("a") == 0
    seconds.charge("a", 1.0)
    assert seconds.owed("a") == 31.0
    now = 999.0
    seconds.charge("b", 1.0)
    assert seconds._used.keys() == {"b"}, "what was given back is forgotten"
