"""Ready is true: in random worlds it is True exactly when a request would succeed."""

from __future__ import annotations

from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st
from support.operator_status import conditions_of, gateway_children, pod, pool, ready, revision, view, world
from support.operator_trouble import TROUBLES
from treeline_operator.api.conditions import ConditionType
from treeline_operator.world import PoolWorld


class Drawn(NamedTuple):
    """A pod: ready or in trouble, its revision, in rotation, draining or ending, listed or not."""

    trouble: str
    current: bool
    serving: bool
    deleting: bool
    listed: bool

    @property
    def counts(self) -> bool:
        """Return whether it answers requests as the spec says: an older revision may serve another model."""
        return not self.trouble and self.current and self.serving and not self.deleting and self.listed


class Case(NamedTuple):
    world: PoolWorld
    ready: bool


often = st.sampled_from([True] * 9 + [False])
seldom = often.map(lambda drawn: not drawn)
drawn_pods = st.lists(
    st.builds(
        Drawn,
        st.one_of(*[st.just("")] * 5, st.sampled_from(list(TROUBLES))),
        often,
        often,
        seldom,
        often,
    ),
    min_size=1,
    max_size=4,
)


@st.composite
def cases(draw: Any) -> Case:
    replicas = draw(st.sampled_from([1, 1, 2, 2, 3, 0]))
    mine = pool(replicas=replicas, rollout={"paused": draw(seldom)})
    drawn = draw(drawn_pods)
    pods, events, listed = [], [], []
    for number, one in enumerate(drawn):
        name = f"tiny-{number}"
        status, _, _, *about = TROUBLES[one.trouble] if one.trouble else (ready(number), None, None)
        marks: dict[str, Any] = {"revision": "" if one.current else "before", "deleting": one.deleting}
        pods.append(pod(mine, name, serving="true" if one.serving else "false", **marks, **status))
        events.extend(about)
        if one.listed:
            listed.append(name)
    synced, epp, edge = draw(often), draw(often), draw(often)
    usable = [one for one in drawn if one.counts]
    there = draw(often)
    seen = world(
        mine,
        children=(revision(mine, replicas, len(usable)),) if there else (),
        pods=tuple(pods),
        events=tuple(events),
        picker=view(mine, *listed, synced=synced),
        gateway_parts=gateway_children(epp=int(epp), edge=int(edge)),
    )
    return Case(seen, bool(replicas and usable) and synced and epp and edge)


@settings(max_examples=120, deadline=None)
@given(cases())
def test_ready_exactly_when_a_request_would_succeed(case):
    told = conditions_of(case.world)[ConditionType.READY]
    assert (told["status"] == "True") == case.ready, told
