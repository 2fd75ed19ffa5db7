"""What an upgrade of the operator does to pools that are there: it rolls nothing by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from support.pool_world import SimCluster, a_pool, kinds, settled
from treeline_operator import names
from treeline_operator.actions import Apply, Scale
from treeline_operator.world import TEMPLATE_VERSION, Images

NEXT = TEMPLATE_VERSION + 1


def test_an_upgrade_rolls_no_pods_until_it_is_asked_to() -> None:
    cluster = settled(a_pool(replicas=2))
    (before,) = cluster.deployments()
    cluster.platform = replace(cluster.platform, template_version=NEXT, images=Images(runtime="treeline-runtime:next"))
    plan = cluster.plan(a_pool(replicas=2))
    assert plan.actions == ()
    assert any(f"rollout.templateVersion: {NEXT} asks for the newest" in note for note in plan.notes)
    assert [type(a) for a in cluster.plan(a_pool(replicas=3)).actions] == [Scale]

    asked = a_pool(replicas=2, rollout={"templateVersion": NEXT})
    cluster.converge(asked)
    (serving,) = [obj for obj in cluster.deployments().values() if obj["spec"]["replicas"]]
    assert serving["metadata"]["name"] != before
    assert serving["metadata"]["annotations"][names.TEMPLATE_VERSION] == str(NEXT)
    # Asked no more: what is there stays.
    assert cluster.plan(a_pool(replicas=2)).actions == ()


def test_other_default_images_alone_touch_no_revision_and_drift_is_still_mended() -> None:
    cluster = settled(a_pool())
    cluster.platform = replace(cluster.platform, images=Images(pull_secrets=("registry",)))
    assert cluster.plan(a_pool()).actions == ()
    cluster.platform = replace(cluster.platform, images=Images(runtime="treeline-runtime:next", pull_policy="Always"))
    assert cluster.plan(a_pool()).actions == ()
    (deployment,) = cluster.deployments().values()
    _runtime(deployment)["args"][1] = "/elsewhere"
    (action,) = cluster.plan(a_pool()).actions
    assert isinstance(action, Apply)
    assert action.drift == ("spec.template.spec.containers[runtime].args[1]",)
    assert _runtime(action.object)["image"] == "treeline-runtime:cpu"


def test_more_than_this_operator_has_is_told() -> None:
    plan = SimCluster().plan(a_pool(rollout={"templateVersion": 7}))
    assert any(f"asks for 7, this operator has {TEMPLATE_VERSION}" in note for note in plan.notes)


def test_lost_annotations_start_no_rollout() -> None:
    cluster = settled(a_pool(replicas=2))
    (deployment,) = cluster.deployments().values()
    deployment["metadata"]["annotations"] = {}
    deployment["metadata"]["labels"].pop(names.REVISION)
    plan = cluster.plan(a_pool(replicas=2))
    assert kinds(plan) == [f"Apply Deployment {deployment['metadata']['name']}"]
    cluster.do(plan)
    assert cluster.plan(a_pool(replicas=2)).actions == ()

    deployment = next(iter(cluster.deployments().values()))
    deployment["metadata"]["annotations"] = {}
    _runtime(deployment)["image"] = "of-a-former-operator"
    (action,) = cluster.plan(a_pool(replicas=2)).actions
    assert isinstance(action, Apply)
    assert _runtime(action.object)["image"] == "of-a-former-operator"
    _runtime(deployment)["args"] = ["of-a-former-operator"]
    plan = cluster.plan(a_pool(replicas=2))
    assert plan.actions == ()
    assert any("left as it was made" in note for note in plan.notes)


def _runtime(deployment: dict[str, Any]) -> dict[str, Any]:
    containers = deployment["spec"]["template"]["spec"]["containers"]
    found: dict[str, Any] = next(c for c in containers if c["name"] == "runtime")
    return found
