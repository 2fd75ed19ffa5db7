"""InferenceModels: which object owns a name, the status of the others, and the successor."""

from __future__ import annotations

import pytest
from support.operator_status import LATER, NOW, conditions_of, model, pool, world
from treeline_operator.api.conditions import Reason
from treeline_operator.plan.model_names import rule_of
from treeline_operator.status.conditions import same_status
from treeline_operator.status.models import model_statuses
from treeline_wire.models import ModelRule


def told(models, pools, now=NOW):
    return {name: status["conditions"][0] for name, status in model_statuses(models, pools, now).items()}


def test_a_rule_has_everything_that_the_picker_resolves_names_by():
    made = model(
        "m",
        criticality="Critical",
        targetModels=[{"name": "a", "weight": 9}, {"name": "b", "weight": 1}],
        fallbackPools=[{"name": "other"}],
    )
    assert rule_of(made) == ModelRule(
        "m", "chat", "tiny", "Critical", (("a", 9), ("b", 1)), ("other",), "2026-11-01T00:00:00Z", "uid-m"
    )


BAD_WEIGHTS = [{"name": "a", "weight": 9}, {"name": "b"}]


@pytest.mark.parametrize(
    ("spec", "status", "reason", "text"),
    [
        ({}, "True", Reason.ACCEPTED, "requests for `chat` go to pool `tiny`"),
        ({"fallbackPools": [{"name": "gone"}]}, "True", Reason.ACCEPTED, "fallback pool `gone` is not used"),
        (
            {"poolRef": {"name": "gone"}},
            "False",
            Reason.POOL_NOT_FOUND,
            "create it, or correct spec.poolRef.name",
        ),
        ({"targetModels": BAD_WEIGHTS}, "False", Reason.WEIGHTS_INVALID, "give every target one, or none"),
    ],
)
def test_a_model_is_accepted_or_refused_with_the_reason(spec, status, reason, text):
    found = model_statuses([model("m", **spec)], [pool()], NOW)["m"]
    (condition,) = found["conditions"]
    assert (condition["type"], condition["status"], condition["reason"]) == ("Accepted", status, reason)
    assert text in condition["message"]
    assert found["observedGeneration"] == condition["observedGeneration"] == 2
    assert "conflictingModel" not in found


def test_the_oldest_has_the_name_and_when_it_goes_the_next_does():
    young, old = model("a-young", created="2026-11-02T00:00:00Z"), model("b-old")
    first = model_statuses([young, old], [pool()], NOW)
    assert first["b-old"]["conditions"][0]["status"] == "True"
    assert first["a-young"]["conflictingModel"] == "b-old"
    assert first["a-young"]["conditions"][0]["reason"] == Reason.MODEL_NAME_IN_USE
    assert "delete `b-old`: this one then takes over" in first["a-young"]["conditions"][0]["message"]
    leaving = old.model_copy(update={"metadata": old.metadata.model_copy(update={"deletion_timestamp": NOW})})
    young = young.model_copy(update={"status": first["a-young"]})
    for models in ([young], [young, leaving]):
        later = model_statuses(models, [pool()], LATER)
        assert set(later) == {"a-young"}
        assert later["a-young"]["conditions"][0]["status"] == "True"
        assert later["a-young"]["conditions"][0]["lastTransitionTime"] == "2026-11-20T12:05:00Z"
        assert "conflictingModel" not in later["a-young"]


def test_pools_behind_another_gateway_have_names_of_their_own():
    pools = [pool(), pool("other", gateway={"name": "second"})]
    conditions = told([model("m"), model("n", poolRef={"name": "other"})], pools)
    assert [condition["status"] for condition in conditions.values()] == ["True", "True"]


def test_a_status_computed_from_itself_is_the_same():
    models = [model("m"), model("n"), model("o", poolRef={"name": "gone"})]
    first = model_statuses(models, [pool()], NOW)
    again = model_statuses([m.model_copy(update={"status": first[m.name]}) for m in models], [pool()], LATER)
    assert again == first
    assert all(same_status(again[name], first[name]) for name in first)


def test_a_younger_model_does_not_take_a_pools_name_and_names_the_owner():
    taker = pool("taker", created="2026-11-03T00:00:00Z", model={"uri": "builtin://tiny", "name": "other"})
    made = model("m", model_name="tiny", poolRef={"name": "taker"}, created="2026-11-02T00:00:00Z")
    found = model_statuses([made], [pool(), taker], NOW)["m"]
    assert (found["conditions"][0]["status"], found["conditions"][0]["reason"]) == ("False", Reason.MODEL_NAME_IN_USE)
    assert found["conflictingModel"] == "tiny"


def test_a_younger_pool_of_the_same_name_names_the_owner():
    young = pool("young", created="2026-11-03T00:00:00Z")
    condition = conditions_of(world(young, others=(pool(),)))["GatewayReady"]
    assert (condition["status"], condition["reason"]) == ("True", Reason.MODEL_NAME_IN_USE)
    assert "requests for `tiny` go to pool `tiny`: InferencePool `tiny` is older" in condition["message"]
