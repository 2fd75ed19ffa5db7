"""A warning comes once, when a problem has lasted longer than a normal start or change takes."""

from __future__ import annotations

from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st
from support.operator_status import (
    NOW,
    conditions,
    event,
    gateway_children,
    observed,
    pod,
    pool,
    revision,
    view,
    world,
)
from treeline_operator import names
from treeline_operator.api.conditions import ConditionType, Reason
from treeline_operator.status.conditions import build
from treeline_operator.status.events import Alarms, transitions
from treeline_operator.status.pool import pool_status
from treeline_operator.world import Ref

POOL = Ref("treeline.dev/v1alpha1", "InferencePool", "shop", "tiny")
SICK = (ConditionType.GATEWAY_READY, ("False", Reason.GATEWAY_NOT_READY, "no"))
NOT_SO = (ConditionType.READY, ("False", Reason.GATEWAY_NOT_READY, "for want of a gateway"))
WELL = (ConditionType.GATEWAY_READY, ("True", Reason.GATEWAY_SERVING, "yes"))


def status(*findings, at=0.0, before=()):
    return {"conditions": build(dict(findings), 1, before, after(at))}


def after(seconds):
    return NOW + timedelta(seconds=seconds)


def told(alarms, new, seconds, old=None):
    due = alarms.due(POOL, old or {}, new, after(seconds))
    return [note.reason for note in due.notes], due.again_s


def test_short_problems_are_never_reported():
    alarms = Alarms()
    assert told(alarms, status(SICK, NOT_SO), 0) == ([], 60)
    assert told(alarms, status(SICK, NOT_SO), 59) == ([], 1)
    assert told(alarms, status(WELL), 60) == ([], None)
    assert told(alarms, status(SICK), 61) == ([], 60), "the patience begins again"


def test_lasting_problems_are_reported_once_with_their_conditions_message():
    alarms, sick = Alarms(), status(NOT_SO, SICK)
    told(alarms, sick, 0)
    due = alarms.due(POOL, sick, sick, after(60))
    (note,) = due.notes
    assert (note.type, note.reason, due.again_s) == ("Warning", Reason.GATEWAY_NOT_READY, None)
    assert note.message.startswith("no.")
    assert told(alarms, sick, 5000, sick) == ([], None)


def test_a_new_operator_continues_its_predecessors_state():
    sick = status(SICK)
    assert told(Alarms(), sick, 45, sick) == ([], 15), "its predecessor had seen it for 45 s"
    assert told(Alarms(), sick, 61, sick) == ([], None), "its predecessor has reported it"


def test_deleted_objects_are_forgotten():
    alarms = Alarms()
    model = Ref("treeline.dev/v1alpha1", "InferenceModel", "shop", "chat")
    for ref in (POOL, model):
        alarms.due(ref, {}, status(SICK), NOW)
    alarms.forget(POOL)
    alarms.retain("InferenceModel", "shop", {"other"})
    assert alarms == Alarms()


@given(st.lists(st.tuples(st.floats(0.1, 40), st.booleans()), max_size=20))
def test_a_warning_comes_exactly_after_an_unbroken_problem_of_its_patience(story):
    alarms, at, since, before, expected, seen = Alarms(), 0.0, None, status(WELL), [], []
    for seconds, sick in story:
        at += seconds
        if not sick:
            since = None
        elif since is None:
            since, open_ = at, True
        if sick and open_ and at - since >= 60:
            expected.append(at)
            open_ = False
        new = status(SICK if sick else WELL, at=at, before=before["conditions"])
        reasons, again_s = told(alarms, new, at, before)
        seen += [at] if reasons else []
        assert (again_s is not None) == (sick and open_)
        before = new
    assert seen == expected


def test_problems_that_should_pass_become_warnings_if_they_last():
    assert all(reason.info.good is False for reason in Reason if reason.info.patience_s)


# ---- a normal start -----------------------------------------------------------------------------------------


def part(component, seconds, **status):
    labels = {names.COMPONENT: component}
    made = (NOW - timedelta(seconds=seconds)).isoformat()
    return observed("Pod", f"treeline-{component}-1", meta={"labels": labels, "creationTimestamp": made}, status=status)


def test_a_normal_start_warns_of_nothing():
    """Pods that start within a minute, with every probe that fails once on the way; then all is well."""
    failed = [
        event(f"treeline-{component}-1", "Unhealthy", "Readiness probe failed: connection refused")
        for component in ("epp", "edge")
    ]
    running = {"name": "c", "image": "x", "ready": False, "restartCount": 0, "started": True}
    container = {"containerStatuses": [{**running, "state": {"running": {}}}], "phase": "Running"}
    mine = pool()
    alarms, before, warnings = Alarms(), {}, []
    steps = [
        world(mine, children=(), pods=(), gateway_parts=()),
        world(mine, children=(revision(mine, 1, 0),), pods=(), gateway_parts=gateway_children(epp=0, edge=0)),
        *(
            world(
                mine,
                children=(revision(mine, 1, 0),),
                pods=(pod(mine, "tiny-1", phase="Pending"),),
                gateway_parts=gateway_children(epp=0, edge=0),
                gateway_pods=(part("epp", age, **container), part("edge", age, **container)),
                events=tuple(failed),
                picker=None,
            )
            for age in (1, 5, 30, 55)
        ),
        world(mine, picker=None),
        world(mine, picker=view(mine)),
        world(mine),
    ]
    for number, seen in enumerate(steps):
        found = pool_status(seen)
        notes = [*transitions(before, found), *alarms.due(POOL, before, found, after(10 * number)).notes]
        warnings += [note for note in notes if note.type == "Warning"]
        before = found
    assert warnings == []
    assert conditions(before)[ConditionType.READY]["status"] == "True"
