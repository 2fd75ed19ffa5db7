"""The transitions of a subscription: a method and its possible next states, for every state and every event."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from treeline_wire.frames import Request

from treeline_epp.kvevents.states import EVENT_OF, SubscriptionEvent, SubscriptionState


@dataclass(frozen=True, slots=True)
class Cell:
    """The transition for an event in a state: the method that handles it, and the possible next states."""

    handle: Callable[[Any, Any, float], list[Request]]
    leads_to: frozenset[SubscriptionState]


Row = dict[SubscriptionEvent, tuple[Any, set[SubscriptionState]]]
"""By event: the method, and the possible next states; an empty set means that the state stays."""


def table_of(k: Any) -> dict[SubscriptionState, dict[SubscriptionEvent, Cell]]:
    """Return the table of class `k`, which has the methods: every state with every event."""
    s, e = SubscriptionState, SubscriptionEvent
    asking = {s.HELLO, s.REPLAY, s.BACKOFF, s.LIVE}  # by recovering; foreign publishers may be LIVE at once
    answered = {*asking, s.SNAPSHOT}
    live = {*asking, s.CHECKING}
    rows: dict[SubscriptionState, Row] = {
        s.DISCONNECTED: {e.TIMEOUT: (k._ignore, set())},
        s.HELLO: {e.TIMEOUT: (k._no_hello, asking), e.HELLO: (k._hello, answered)},
        s.REPLAY: {
            e.TIMEOUT: (k._no_answer, asking),
            e.REPLAY_ITEM: (k._replay_item, set()),
            e.REPLAY_END: (k._replay_end, answered),
        },
        s.SNAPSHOT: {
            e.TIMEOUT: (k._no_answer, {s.BACKOFF}),
            e.SNAPSHOT_HEADER: (k._snapshot_header, {s.CHUNKS}),
        },
        s.CHUNKS: {
            e.TIMEOUT: (k._no_answer, {s.BACKOFF}),
            e.SNAPSHOT_HEADER: (k._snapshot_header, set()),
            e.SNAPSHOT_CHUNK: (k._snapshot_chunk, set()),
            e.SNAPSHOT_END: (k._snapshot_end, asking),
        },
        s.BACKOFF: {e.TIMEOUT: (k._recover, asking)},
        s.LIVE: {
            e.TIMEOUT: (k._ignore, set()),
            e.TICK: (k._live_tick, live),
            e.HEARTBEAT: (k._heartbeat, asking),
            e.BATCH: (k._take, asking),
            e.HELLO: (k._late_hello, asking),
            e.TURN: (k._drain, asking),
        },
        s.CHECKING: {
            e.TIMEOUT: (k._missed_check, asking),
            e.TICK: (k._live_tick, live),
            e.HEARTBEAT: (k._heartbeat, live),
            e.BATCH: (k._take, live),
            e.HELLO: (k._checked, asking),
        },
    }
    everywhere = _everywhere(k, asking)
    return {
        state: {
            event: Cell(handle, frozenset(leads_to or {state}))
            for event, (handle, leads_to) in {**everywhere, **row}.items()
        }
        for state, row in rows.items()
    }


def _everywhere(k: Any, asking: set[SubscriptionState]) -> Row:
    """Return the transitions that hold in all states without their own."""
    e = SubscriptionEvent
    return {
        e.CONNECTED: (k._connected, asking),
        e.DISCONNECTED: (k._disconnected, {SubscriptionState.DISCONNECTED}),
        e.BATCH: (k._keep, set()),
        e.HEARTBEAT: (k._ignore, set()),
        e.TICK: (k._ignore, set()),
        e.TURN: (k._ignore, set()),
        **{answer: (k._unasked, set()) for answer in EVENT_OF.values()},
        e.HELLO: (k._late_hello, set()),
    }
