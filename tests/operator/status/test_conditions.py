"""Conditions over time: generations, transition times, order; and the page that explains their words."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from support.operator_status import NOW
from treeline_operator.api.conditions import ConditionType, Reason
from treeline_operator.status.conditions import build, same_status, timestamp, with_fix

ROOT = Path(__file__).resolve().parents[3]

findings = st.dictionaries(
    st.sampled_from(ConditionType),
    st.tuples(
        st.sampled_from(["True", "False", "Unknown"]), st.sampled_from(Reason), st.sampled_from(["one", "two. ", "  3"])
    ),
)
steps = st.lists(st.tuples(findings, st.integers(1, 5), st.integers(-30, 60)), min_size=1, max_size=6)


@settings(max_examples=100, deadline=None)
@given(steps)
def test_through_all_changes_times_move_only_forward_and_only_when_a_status_turns(course):
    previous, now = [], NOW
    for found, generation, seconds in course:
        now += timedelta(seconds=seconds)  # clocks of two operators differ
        told = build(found, generation, previous, now)
        assert {one["observedGeneration"] for one in told} <= {generation}
        assert [one["type"] for one in told] == [k for k in ConditionType if k in found]
        before = {one["type"]: one for one in previous}
        for one in told:
            was = before.get(one["type"])
            if was is None:
                assert one["lastTransitionTime"] == timestamp(now)
            elif was["status"] == one["status"]:
                assert one["lastTransitionTime"] == was["lastTransitionTime"]
            else:
                assert one["lastTransitionTime"] == max(was["lastTransitionTime"], timestamp(now))
        assert build(dict(reversed(found.items())), generation, told, now + timedelta(hours=1)) == told
        previous = told


@settings(max_examples=50, deadline=None)
@given(findings, st.randoms(use_true_random=False))
def test_equal_statuses_may_differ_in_order_times_and_empty_fields(found, shuffler):
    told = build(found, 1, (), NOW)
    mixed = [{**one, "lastTransitionTime": "2020-01-01T00:00:00Z"} for one in told]
    shuffler.shuffle(mixed)
    assert same_status(
        {"conditions": told, "replicas": 0}, {"replicas": 0, "conditions": mixed, "url": "", "endpoints": []}
    )
    for place, one in enumerate(mixed):
        for key, value in (
            ("status", "Other"),
            ("reason", "Other"),
            ("message", "Other"),
            ("observedGeneration", 2),
        ):
            other = [*mixed[:place], {**one, key: value}, *mixed[place + 1 :]]
            assert not same_status({"conditions": told}, {"conditions": other})


def test_statuses_with_different_figures_differ():
    assert not same_status({"replicas": 0}, {})
    assert not same_status({"endpoints": [{"name": "a"}]}, {"endpoints": [{"name": "b"}]})
    assert same_status({}, {"conditions": []})


def test_a_message_says_the_state_and_then_the_fix():
    assert (
        with_fix(Reason.QUOTA_EXCEEDED, "exceeded quota: gpus.")
        == "exceeded quota: gpus. Raise the ResourceQuota or lower replicas or resources."
    )


def test_every_reason_is_explained_and_every_bad_one_has_a_fix():
    for reason in Reason:
        assert re.fullmatch(r"([A-Z][a-z]+)+", reason)
        assert reason.info.summary.endswith(".")
        assert (reason.info.good is True) or reason.fix.endswith("."), reason
