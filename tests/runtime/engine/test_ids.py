"""Ids between processes: unique, and each says who made it, whatever clients call their requests."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from treeline_runtime.ids import IdMaker, maker

NAMES = st.text() | st.text(alphabet="#.0123456789", max_size=6)


@given(st.lists(st.tuples(st.sampled_from([0, 1, 10, 63]), NAMES), max_size=20))
def test_ids_are_never_made_twice_and_lead_back_to_their_maker(asked: list[tuple[int, str]]) -> None:
    makers = {rank: IdMaker(rank) for rank in (0, 1, 10, 63)}
    made = [(rank, makers[rank].make(name)) for rank, name in asked]
    assert len({id for _, id in made}) == len(asked)
    assert [maker(id) for _, id in made] == [rank for rank, _ in asked]
