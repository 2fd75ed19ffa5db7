"""An upgrade of the operator restarts no pods of existing pools."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from support.pool_world import a_pool, kinds, settled
from treeline_epp.kube.pools import own_pool
from treeline_operator import names
from treeline_operator.actions import Apply, Scale
from treeline_operator.api.pool import InferencePool
from treeline_operator.plan import revision, runtime
from treeline_operator.world import Images


def test_an_upgrade_rolls_no_pods_until_the_pool_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = settled(a_pool(replicas=2))
    (before,) = cluster.deployments()
    cluster.platform = replace(cluster.platform, images=Images(runtime="treeline-runtime:next"))
    monkeypatch.setattr(runtime, "_DEPLOY_MARGIN_S", 7)
    monkeypatch.setattr(runtime, "_GRACE_MARGIN_S", 11)
    plan = cluster.plan(a_pool(replicas=2))
    assert plan.actions == ()
    assert any("it stays unchanged" in note for note in plan.notes)
    assert [type(a) for a in cluster.plan(a_pool(replicas=3)).actions] == [Scale]

    changed = a_pool(replicas=2, template={"metadata": {"annotations": {"example.com/restarted": "1"}}})
    cluster.converge(changed)
    (serving,) = [obj for obj in cluster.deployments().values() if obj["spec"]["replicas"]]
    assert serving["metadata"]["name"] != before
    assert _runtime(serving)["image"] == "treeline-runtime:next"
    # A rollback of the operator leaves alone what the newer one made.
    monkeypatch.undo()
    cluster.platform = replace(cluster.platform, images=Images())
    assert cluster.plan(changed).actions == ()


def test_new_default_images_change_no_revision_and_drift_is_still_repaired() -> None:
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
    assert any("it stays unchanged" in note for note in plan.notes)


LATER: dict[str, Any] = {"ofALaterVersion": {"a": [1, None]}}


@pytest.mark.parametrize("more", [{}, {"engine": {"type": "vllm"}, "accelerator": {"type": "nvidia"}}])
def test_fields_of_a_later_version_are_ignored_and_change_no_revision(more: dict[str, Any]) -> None:
    """CRDs are upgraded first, and an operator may be rolled back: both give an operator fields that it does not
    know."""
    known = {"model": {"uri": "builtin://tiny"}, "engine": {}, "gateway": {}, "drain": {}, **more}
    meta = {"name": "tiny", "namespace": "serving", "uid": "pool-uid"}
    body = {"apiVersion": "treeline.dev/v1alpha1", "kind": "InferencePool", "metadata": meta}
    sections = ("model", "engine", "gateway", "drain")
    grown = {**known, **{section: {**known[section], **LATER} for section in sections}, **LATER}
    then, now = (InferencePool.from_object({**body, "spec": spec}) for spec in (known, grown))
    assert now.spec == then.spec
    assert revision.inputs(now) == revision.inputs(then)
    of_picker = (own_pool(msgspec.Raw(msgspec.json.encode({**body, "spec": spec}))) for spec in (known, grown))
    assert len(set(map(repr, of_picker))) == 1


def _runtime(deployment: dict[str, Any]) -> dict[str, Any]:
    containers = deployment["spec"]["template"]["spec"]["containers"]
    found: dict[str, Any] = next(c for c in containers if c["name"] == "runtime")
    return found
