"""What one client may hold of the memory of all requests in flight."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from treeline_runtime.server.http import ApiError
from treeline_runtime.server.limits import ByteBudget, Reservation, TooMuchInFlight

CLIENTS = st.sampled_from(["one", "two", "three", None])


def test_a_client_that_fills_its_share_leaves_room_for_another() -> None:
    budget = ByteBudget(1 << 20)
    hostile = [Reservation(budget, "hostile", free=0) for _ in range(1 << 10)]
    with suppress(TooMuchInFlight):
        for reservation in hostile:
            reservation.grow(1 << 10)
    assert budget.used == 1 << 19
    other = Reservation(budget, "other", free=0)
    other.grow(1 << 18)
    for reservation in hostile:
        reservation.release()
    other.grow(1 << 18)
    other.release()
    assert budget.used == 0


def test_a_request_that_never_fits_is_refused_for_good() -> None:
    budget = ByteBudget(1 << 20)
    with pytest.raises(ApiError) as refused:
        Reservation(budget, "one", free=0).grow((1 << 19) + 1)
    assert refused.value.status == 413
    Reservation(budget, None, free=0).grow(1 << 20)


@given(st.lists(st.tuples(CLIENTS, st.integers(0, 300)), max_size=60))
def test_every_sequence_keeps_within_the_budget_and_gives_all_back(steps: list[tuple[str | None, int]]) -> None:
    budget = ByteBudget(1000)
    held: list[tuple[int, str | None]] = []
    for client, size in steps:
        try:
            budget.reserve(size, client)
        except TooMuchInFlight:
            if held:
                budget.release(*held.pop(0))
        else:
            held.append((size, client))
        named = sum(size for size, owner in held if owner == client)
        assert budget.used == sum(size for size, _ in held) <= 1000
        assert client is None or named <= 500
    for one in held:
        budget.release(*one)
    assert (budget.used, budget._held) == (0, {})
