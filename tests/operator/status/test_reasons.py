"""Each state of a pool and its gateway has its reason, and every reason belongs to a state."""

from __future__ import annotations

import pytest
from support.operator_gateway_states import GATEWAY_STATES
from support.operator_pool_states import POOL_STATES, PROGRESS
from support.operator_status import conditions_of
from support.operator_trouble import REJECTIONS, TROUBLES
from treeline_operator.api.conditions import Reason

ELSEWHERE = {
    # tested by name in the files beside this one
    Reason.SPEC_NOT_UNDERSTOOD,
    Reason.RECONCILE_FAILED,
    Reason.PRESET_MISSING,
    Reason.PRESET_CONFLICT,
    Reason.VERSIONS_DIFFER,
    Reason.NODES_TOO_SMALL,
    Reason.DEVICES_MISSING,
    Reason.ACCEPTED,
    Reason.POOL_NOT_FOUND,
    Reason.MODEL_NAME_IN_USE,
    Reason.WEIGHTS_INVALID,
    # Of adapters: test_adapters.py of the plan
    Reason.ADAPTER_LOADED,
    Reason.ADAPTER_LOADING,
    Reason.ADAPTER_FAILING,
    Reason.ADAPTER_REFUSED,
    # Events of the operator's own deeds
    Reason.CREATED,
    Reason.APPLIED,
    Reason.SCALED,
    Reason.AUTOSCALED,
    Reason.DELETED,
    Reason.DRIFT_CORRECTED,
    Reason.DRAIN_CANCELLED,
    Reason.DRAIN_TIMEOUT,
}


STATES = POOL_STATES | GATEWAY_STATES


@pytest.mark.parametrize(("seen", "told", "text"), STATES.values(), ids=STATES)
def test_each_state_has_its_reason(seen, told, text):
    kind, status, reason = told.split()
    condition = conditions_of(seen, PROGRESS)[kind]
    assert (condition["status"], condition["reason"]) == (status, reason), condition["message"]
    assert text in condition["message"]
    assert condition["message"].endswith(Reason(reason).fix)


def test_every_reason_comes_from_some_state():
    produced = {told.split()[2] for _, told, _ in STATES.values()} | {row[1] for row in TROUBLES.values()}
    produced |= set(REJECTIONS)
    assert produced | ELSEWHERE == set(Reason)
    assert not produced & ELSEWHERE
