"""The client against a real API server: server-side apply, preconditions and paging."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import yaml
from support.control_plane import ControlPlane
from treeline_kube.client import Client
from treeline_kube.errors import (
    AlreadyExists,
    Conflict,
    Forbidden,
    Invalid,
    NotFound,
    Unauthorized,
    Unavailable,
)
from treeline_kube.resources import Ref

pytestmark = [pytest.mark.integration, pytest.mark.deep]

NOBODY = "00000000-0000-0000-0000-000000000000"


@pytest.fixture
async def cluster(control_plane: ControlPlane) -> AsyncIterator[Client]:
    async with await Client.from_config(control_plane.admin) as cluster:
        yield cluster


def deployment(namespace: str, **spec: Any) -> dict[str, Any]:
    labels = {"app": "it"}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "it", "namespace": namespace},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"containers": [{"name": "runtime", "image": "none"}]},
            },
            **spec,
        },
    }


def configmap(namespace: str, name: str = "it", **data: str) -> dict[str, Any]:
    metadata = {"name": name, "namespace": namespace, "labels": {"number": name[-1]}}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def ref(obj: dict[str, Any]) -> Ref:
    return Ref(obj["apiVersion"], obj["kind"], obj["metadata"]["namespace"], obj["metadata"]["name"])


async def test_fields_no_longer_applied_are_removed_and_others_fields_stay(cluster: Client, namespace: str) -> None:
    await cluster.apply(configmap(namespace, ours="1", dropped="1"))
    await cluster.apply(configmap(namespace, theirs="2"), field_manager="them")
    after = await cluster.apply(configmap(namespace, ours="3"))
    assert after["data"] == {"ours": "3", "theirs": "2"}
    assert await cluster.get(ref(after)) == after


async def test_a_field_of_another_owner_is_taken_over(cluster: Client, namespace: str) -> None:
    await cluster.apply(configmap(namespace, field="theirs"), field_manager="them")
    assert (await cluster.apply(configmap(namespace, field="ours")))["data"] == {"field": "ours"}


async def test_replicas_that_we_do_not_apply_keep_their_scale(cluster: Client, namespace: str) -> None:
    made = await cluster.apply(deployment(namespace, replicas=2))
    uid = made["metadata"]["uid"]
    scaled = await cluster.scale(ref(made), uid, 5)
    assert scaled["spec"]["replicas"] == 5
    assert scaled["spec"]["template"] == made["spec"]["template"]
    with pytest.raises(Conflict):
        await cluster.scale(ref(made), NOBODY, 7)
    with pytest.raises(NotFound):
        await cluster.scale(ref(made)._replace(name="other"), uid, 7)
    assert (await cluster.get(ref(made)))["spec"]["replicas"] == 5


async def test_a_status_is_applied_by_itself(cluster: Client, namespace: str) -> None:
    made = await cluster.apply(deployment(namespace))
    status = {**{key: made[key] for key in ("apiVersion", "kind")}, "metadata": dict(made["metadata"])}
    for key in set(status["metadata"]) - {"name", "namespace", "uid"}:
        del status["metadata"][key]
    after = await cluster.apply_status({**status, "status": {"collisionCount": 3}, "spec": {"replicas": 9}})
    assert after["status"]["collisionCount"] == 3
    assert after["spec"]["replicas"] == 1
    status["metadata"]["uid"] = NOBODY
    with pytest.raises(Conflict):
        await cluster.apply_status({**status, "status": {"collisionCount": 4}})


async def test_refusals_name_the_field(cluster: Client, namespace: str) -> None:
    with pytest.raises(Invalid) as unknown:
        await cluster.apply(deployment(namespace, replica=3))
    assert [(c.field, c.reason) for c in unknown.value.causes] == [("spec.replica", "FieldValueUnknown")]
    with pytest.raises(Invalid) as negative:
        await cluster.apply(deployment(namespace, replicas=-1))
    assert [cause.field for cause in negative.value.causes] == ["spec.replicas"]


async def test_a_name_can_be_created_once(cluster: Client, namespace: str) -> None:
    await cluster.create(configmap(namespace))
    with pytest.raises(AlreadyExists):
        await cluster.create(configmap(namespace))


async def test_only_the_observed_object_is_deleted(cluster: Client, namespace: str) -> None:
    made = await cluster.create(configmap(namespace))
    meta = made["metadata"]
    with pytest.raises(Conflict):
        await cluster.delete(ref(made), uid=NOBODY)
    await cluster.delete(ref(made), uid=meta["uid"])
    with pytest.raises(NotFound):
        await cluster.delete(ref(made), uid=meta["uid"])


async def test_patches(cluster: Client, namespace: str) -> None:
    made = await cluster.create(configmap(namespace, a="1", b="2"))
    merged = await cluster.patch_merge(ref(made), {"data": {"a": None}})
    assert merged["data"] == {"b": "2"}
    with pytest.raises(Conflict):
        await cluster.update(made)


async def test_a_list_comes_in_pages_and_whole(cluster: Client, namespace: str) -> None:
    for number in range(7):
        await cluster.create(configmap(namespace, f"it-{number}"))
    asked: list[str] = []
    cluster.on_request = lambda verb, resource, code, seconds: asked.append(verb)
    listed = [item async for item in cluster.list("v1", "ConfigMap", namespace, "number", page=3)]
    assert [item["metadata"]["name"] for item in listed] == [f"it-{number}" for number in range(7)]
    assert {(item["apiVersion"], item["kind"]) for item in listed} == {("v1", "ConfigMap")}
    assert asked == ["list"] * 3
    chosen = [item async for item in cluster.list("v1", "ConfigMap", label_selector="number in (2, 4)")]
    assert [item["metadata"]["name"] for item in chosen] == ["it-2", "it-4"]


async def test_refusals_for_missing_rights_and_missing_objects_are_typed(
    control_plane: ControlPlane, namespace: str
) -> None:
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "robot"}}
    control_plane.request("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts", account)
    config = control_plane.service_account(namespace, "robot")
    async with await Client.from_config(config) as cluster:
        with pytest.raises(Forbidden, match="robot"):
            await cluster.apply(configmap(namespace))
    changed = yaml.safe_load(config.read_text())
    changed["users"][0]["user"]["token"] = "guessed"
    config.write_text(yaml.safe_dump(changed))
    async with await Client.from_config(config) as cluster:
        with pytest.raises(Unauthorized):
            await cluster.get(Ref("v1", "ConfigMap", namespace, "it"))
    user = f"system:serviceaccount:{namespace}:robot"
    asked = [(event["verb"], event["objectRef"]["resource"]) for event in control_plane.audit_events(user)]
    assert asked == [("patch", "configmaps")]
    with pytest.raises(Unavailable, match="no file"):
        await Client.from_config(config.with_name("missing.yaml"))
