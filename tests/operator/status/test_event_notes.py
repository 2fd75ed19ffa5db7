"""Events: important changes are reported once, others never."""

from __future__ import annotations

import dataclasses
from datetime import timedelta

import pytest
from support.operator_pool_states import audited
from support.operator_status import NOW, pod, pool, view, world
from support.operator_trouble import RUNNING, TROUBLES, init, runtime
from treeline_operator.api.conditions import ConditionType, Reason
from treeline_operator.status.conditions import build
from treeline_operator.status.events import Alarms, transitions
from treeline_operator.status.pool import pool_status
from treeline_operator.world import PickerEndpoint, PickerView, Ref

SERVING = pool_status(world())
STARTING = pool_status(world(pods=(pod(pool(), "tiny-1", **runtime(RUNNING, started=False)),)))
LOADING = pool_status(world(pods=(pod(pool(), "tiny-1", **init(RUNNING)),), picker=view(pool())))


def status(*findings):
    return {"conditions": build(dict(findings), 1, (), NOW)}


def reasons(old, new):
    return [note.reason for note in transitions(old, new)]


def test_unchanged_statuses_and_other_wording_are_not_reported():
    other = {"conditions": [{**one, "message": "in other words"} for one in SERVING["conditions"]]}
    assert transitions(SERVING, SERVING) == transitions(SERVING, other) == []


def test_the_way_to_serving_is_reported_in_few_words():
    assert reasons({}, STARTING) == []
    assert reasons(STARTING, LOADING) == [Reason.WEIGHTS_DOWNLOADING]
    assert reasons(LOADING, SERVING) == [Reason.ROLLOUT_COMPLETE, Reason.MODEL_LOADED, Reason.SERVING]
    assert all(note.type == "Normal" for note in transitions(LOADING, SERVING))


@pytest.mark.parametrize("name", TROUBLES)
def test_problems_are_reported_once_as_warnings(name):
    found, reason, text, *events = TROUBLES[name]
    if reason.info.good is not False or ("phase" in found and found["phase"] == "Failed"):
        return
    bad = pool_status(world(pods=(pod(pool(), "tiny-1", **found),), events=tuple(events), picker=view(pool())))
    ref, alarms = Ref("treeline.dev/v1alpha1", "InferencePool", "shop", "tiny"), Alarms()
    notes = [note for note in transitions(STARTING, bad) if note.type == "Warning"]
    assert alarms.due(ref, STARTING, bad, NOW).notes == ()
    later = NOW + timedelta(seconds=reason.info.patience_s)
    notes += alarms.due(ref, bad, bad, later).notes
    assert alarms.due(ref, bad, bad, later + timedelta(hours=1)).notes == ()
    assert [note.reason for note in notes] == [reason]
    assert text in notes[0].message
    assert reason.fix in notes[0].message


def test_an_audits_alarm_is_told_once_also_by_an_operator_that_starts_and_so_is_its_end():
    wrong = pool_status(audited("disk"))
    assert reasons(SERVING, wrong) == [Reason.CACHE_WRONG]
    assert reasons(wrong, pool_status(audited("disk", "tree"))) == []
    assert reasons(wrong, SERVING) == [Reason.CACHES_IN_USE]
    (said,) = (one for one in wrong["conditions"] if one["type"] == "CachesTrusted")
    mine = audited().pool.model_copy(update={"status": wrong})
    unasked = PickerView(True, {"tiny": (PickerEndpoint("tiny-1", "10.0.0.1:8000"),)})
    both = (*unasked.pools["tiny"], PickerEndpoint("tiny-2", "10.0.0.2:8000", True))
    views = (None, PickerView(False), unasked, PickerView(True, {"tiny": both}), PickerView(True))
    for picker, kept in zip(views, (True, True, True, True, False), strict=True):
        status = pool_status(dataclasses.replace(audited(), pool=mine, picker=picker))
        assert [one for one in status["conditions"] if one["type"] == "CachesTrusted"] == [said] * kept


def test_the_reasons_of_another_release_are_replaced():
    strange = {"conditions": [{**one, "reason": "Strange"} for one in SERVING["conditions"]]}
    mine = audited().pool.model_copy(update={"status": strange})
    status = pool_status(dataclasses.replace(audited(), pool=mine, picker=None))
    assert "Strange" not in {one["reason"] for one in status["conditions"]}
    assert Reason.SERVING in reasons(strange, SERVING)


def test_recovery_is_reported():
    bad = status((ConditionType.GATEWAY_READY, ("False", Reason.GATEWAY_NOT_READY, "no")))
    good = status((ConditionType.GATEWAY_READY, ("True", Reason.GATEWAY_SERVING, "yes")))
    assert reasons(bad, good) == [Reason.GATEWAY_SERVING]
    assert reasons({}, good) == []
    assert reasons(good, {}) == []


def test_a_conflict_warns_though_the_gateway_is_ready():
    told = status((ConditionType.GATEWAY_READY, ("True", Reason.GATEWAY_CONFLICT, "policy")))
    assert [(note.type, note.reason) for note in transitions(SERVING, told)] == [("Warning", Reason.GATEWAY_CONFLICT)]


def test_a_known_reason_is_not_reported_again_as_readys():
    sick = (ConditionType.GATEWAY_READY, ("False", Reason.GATEWAY_NOT_READY, "no"))
    missing = (ConditionType.READY, ("False", Reason.WEIGHTS_MISSING, "none"))
    taken_up = (ConditionType.READY, ("False", Reason.GATEWAY_NOT_READY, "no"))
    assert reasons(status(sick, missing), status(sick, taken_up)) == []


def test_models_are_reported_when_they_fail_and_recover():
    yes = status((ConditionType.ACCEPTED, ("True", Reason.ACCEPTED, "yes")))
    no = status((ConditionType.ACCEPTED, ("False", Reason.MODEL_NAME_IN_USE, "no")))
    assert reasons({}, yes) == reasons(no, yes) == [Reason.ACCEPTED]
    assert [(note.type, note.reason) for note in transitions(yes, no)] == [("Warning", Reason.MODEL_NAME_IN_USE)]
