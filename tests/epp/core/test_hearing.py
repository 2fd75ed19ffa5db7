"""Detects whether an endpoint's events are heard."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from treeline_epp.kvevents.hearing import (
    SILENT_PROMPTS,
    SILENT_TOKENS,
    STEADY_S,
    UNREACHED_S,
    UNREAD_EVENTS,
    Hearing,
    HearingState,
    Prefills,
    Readings,
)

NONE = Prefills()
MANY = Prefills(SILENT_PROMPTS, SILENT_TOKENS)


def looks(
    hearing: Hearing,
    begin: float,
    seconds: float,
    *,
    connected: bool = True,
    breaks: int = 0,
    batches: int = 0,
    served: Prefills = NONE,
    readings: Readings = Readings(),  # noqa: B008
) -> list[HearingState]:
    """Look once a second and return the states."""
    states = []
    for second in range(round(seconds)):
        now = begin + second
        hearing.look(now, connected=connected, breaks=breaks, batches=batches, served=served, readings=readings)
        states.append(hearing.state)
    return states


def test_a_connected_endpoint_is_heard_at_once_and_an_unconnected_one_is_given_up() -> None:
    assert looks(Hearing(), 0, 1) == [HearingState.HEARD]
    states = looks(Hearing(), 0, UNREACHED_S + 2, connected=False)
    assert states == [HearingState.UNKNOWN] * round(UNREACHED_S) + [HearingState.UNREACHED] * 2


def test_only_a_long_loss_changes_the_state() -> None:
    hearing = Hearing()
    looks(hearing, 0, 2)
    assert set(looks(hearing, 2, UNREACHED_S - 1, connected=False)) == {HearingState.HEARD}
    assert set(looks(hearing, 1 + UNREACHED_S, 3, breaks=1)) == {HearingState.HEARD}
    states = looks(hearing, 20, UNREACHED_S + 1, connected=False, breaks=1)
    assert states[-1] is HearingState.UNREACHED
    states = looks(hearing, 40, STEADY_S + 1, breaks=1)
    assert states[-2:] == [HearingState.UNREACHED, HearingState.HEARD], "only when it lasts"


def test_an_endpoint_that_accepts_and_drops_counts_as_unreached() -> None:
    hearing = Hearing()
    for second in range(60):
        hearing.look(second, connected=True, breaks=second, batches=0, served=NONE)
    assert hearing.state is HearingState.UNREACHED


def test_an_engine_that_is_not_ready_is_not_judged() -> None:
    hearing = Hearing()
    looks(hearing, 0, 1)
    looks(hearing, 1, UNREACHED_S - 1, connected=False)
    hearing.rest()
    assert set(looks(hearing, 300, UNREACHED_S, connected=False)) == {HearingState.HEARD}


def test_prompts_without_events_mean_that_the_endpoint_is_unheard() -> None:
    for served in (Prefills(SILENT_PROMPTS - 1, 10 * SILENT_TOKENS), Prefills(100, SILENT_TOKENS - 1)):
        hearing = Hearing()
        looks(hearing, 0, 1)
        assert set(looks(hearing, 1, 30, served=served)) == {HearingState.HEARD}, "too few to know"
    hearing = Hearing()
    looks(hearing, 0, 1, served=MANY)
    assert set(looks(hearing, 1, 30, served=MANY)) == {HearingState.HEARD}, "those came before"
    served = Prefills(2 * MANY.prompts, 2 * MANY.tokens)
    states = looks(hearing, 31, 10, served=served)
    assert (states[0], states[-1]) == (HearingState.HEARD, HearingState.NOTHING)
    assert looks(hearing, 41, 2, batches=1, served=served) == [HearingState.HEARD] * 2
    assert set(looks(hearing, 43, 30, batches=1, served=Prefills(10**6, 10**9))) == {HearingState.HEARD}


def test_mostly_unreadable_events_count_as_unheard_until_most_are_readable() -> None:
    hearing, few, many = Hearing(), UNREAD_EVENTS - 1, 10 * UNREAD_EVENTS
    looks(hearing, 0, 1)
    assert looks(hearing, 1, 2, readings=Readings(0, few)) == [HearingState.HEARD] * 2, "too few to know"
    assert looks(hearing, 3, 2, readings=Readings(0, few + 1)) == [HearingState.UNREADABLE] * 2
    assert looks(hearing, 5, 2, batches=9, readings=Readings(few, few + 1)) == [HearingState.UNREADABLE] * 2
    assert looks(hearing, 7, 2, batches=9, readings=Readings(few + 1, few + 1)) == [HearingState.HEARD] * 2
    assert looks(hearing, 9, 1, batches=9, readings=Readings(many, many)) == [HearingState.HEARD], "as many"
    assert looks(hearing, 10, 1, batches=9, readings=Readings(many, 2 * many)) == [HearingState.UNREADABLE]
    assert looks(hearing, 11, UNREACHED_S + 1, connected=False, readings=Readings(many, 2 * many))[-1] is (
        HearingState.UNREACHED
    )


LOOK = st.tuples(st.booleans(), st.booleans(), st.booleans(), st.integers(0, 5))


@given(st.lists(LOOK, max_size=200))
def test_the_state_changes_at_most_once_for_each_connection(events: list[tuple[bool, bool, bool, int]]) -> None:
    hearing, breaks, batches, prompts = Hearing(), 0, 0, 0
    changed_at = -10.0
    for second, (connected, broke, came, served) in enumerate(events):
        breaks, batches, prompts = breaks + broke, batches + came, prompts + served
        before = hearing.state
        told = hearing.look(
            second, connected=connected, breaks=breaks, batches=batches, served=Prefills(prompts, 1000 * prompts)
        )
        assert told == (hearing.state is not before)
        if hearing.state is HearingState.UNREACHED and told:
            assert second - changed_at >= UNREACHED_S or before is HearingState.UNKNOWN
        if before is HearingState.UNREACHED and told:
            assert second - changed_at >= STEADY_S
        if told:
            changed_at = second
