"""Rights by the API server's audit log: nothing is refused, and nothing is granted that its feature does not use.

The API server of these tests checks who may write ownerReferences that block a deletion (as OpenShift's does): the
right to that is asked for by its admission, on behalf of whoever writes, and never by a request.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from support.control_plane import ControlPlane, control_plane_or_skip
from support.epp_io import running_picker
from support.kube_api import crd
from support.operator_run import DEPLOYMENTS, MODELS, POOLS, Room, condition, operator
from support.rbac_audit import Grants, Right, Witness, refused, rules_of, used
from treeline_operator.controller.lease import LeaseTiming
from treeline_operator.plan.facts import DOWNLOAD
from treeline_operator.rbac import RULES_GROUPS
from treeline_operator.world import Platform
from treeline_tools import rbac

pytestmark = [pytest.mark.integration, pytest.mark.deep]

AGGREGATED = "application/json;v=v2;g=apidiscovery.k8s.io;as=APIGroupDiscoveryList"

UNASKED: dict[Right, str] = {
    ("treeline.dev", "inferencepools/finalizers", "update"): (
        "looked for by the admission of ownerReferences; "
        "test_children_that_block_their_pools_deletion_need_the_right_to_its_finalizers shows that it is"
    ),
}
"""Rights that are granted though no request uses them, with the reason."""

OPTIONAL = (
    crd("monitoring.coreos.com", "v1", "PodMonitor", "podmonitors"),
    crd("leaderworkerset.x-k8s.io", "v1", "LeaderWorkerSet", "leaderworkersets"),
    crd("gateway.networking.k8s.io", "v1", "HTTPRoute", "httproutes"),
    crd("gateway.networking.k8s.io", "v1", "Gateway", "gateways"),
    crd("inference.networking.k8s.io", "v1", "InferencePool", "inferencepools"),
    crd(RULES_GROUPS[0], "v1alpha2", "InferenceObjective", "inferenceobjectives"),
    crd(RULES_GROUPS[0], "v1alpha2", "InferenceModelRewrite", "inferencemodelrewrites"),
)
ALWAYS = tuple(feature for feature in rbac.WATCHED if not feature.value)
PICKER = {"type": "Picker", "minReplicas": 1, "maxReplicas": 2}


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    """A control plane for these tests alone: its optional kinds come and go with them."""
    strict = "--enable-admission-plugins=OwnerReferencesPermissionEnforcement"
    plane = control_plane_or_skip(apiserver_args=(strict,))
    plane.start(crds=True)
    yield plane
    plane.stop()


@pytest.fixture
def room(plane: ControlPlane) -> Iterator[Room]:
    """A new namespace for pools, which are deleted before the next test has an operator of all namespaces."""
    room = Room(plane, fresh(plane))
    yield room
    plane.request("DELETE", POOLS.format(room.namespace))


def fresh(plane: ControlPlane) -> str:
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"generateName": "rights-"}}
    return str(plane.request("POST", "/api/v1/namespaces", body)["metadata"]["name"])


def identity(room: Room, watched: tuple[rbac.Feature, ...], *, everywhere: bool = False) -> tuple[Witness, str]:
    """An operator's identity with the rights that the chart gives it, and its own namespace."""
    user, own = f"operator-{room.namespace}", fresh(room.plane)
    grants = Grants(room.plane)
    grants.bind(user, rules_of(watched), "" if everywhere else room.namespace)
    grants.bind(user, rules_of(rbac.OWN), own)
    return Witness(room.plane, user, (*watched, *rbac.OWN)), own


@contextlib.asynccontextmanager
async def running(room: Room, witness: Witness, own: str, **options: Any) -> AsyncIterator[None]:
    kubeconfig = room.plane.kubeconfig(witness.user)
    patient = LeaseTiming(duration_s=30.0, renew_s=20.0, retry_s=0.5)
    rules = any(feature.value == "gatewayRules" for feature in witness.features)
    home = Platform(operator_namespace=own, rules_group=RULES_GROUPS[0] if rules else "")
    settings = {"leader_elect": True, "platform": home, "lease": patient, **options}
    async with operator(kubeconfig, room.namespace, **settings) as task:
        yield
        assert not task.done()


def change(room: Room, pool: str, **spec: Any) -> Any:
    return room.patch(f"{POOLS}/{pool}", {"spec": spec})


async def said(room: Room, pool: str) -> Any:
    """Return the pool, once its status is about its current generation."""

    async def look() -> Any:
        found = await room.pool(pool)
        current = condition(found, "Ready").get("observedGeneration") == found["metadata"]["generation"]
        return found if current else None

    return await room.until(look, f"the status of {pool}")


async def names_of(room: Room, path: str, prefix: str) -> list[str]:
    names = [obj["metadata"]["name"] for obj in await room.items(path)]
    return [name for name in names if name.startswith(prefix)]


async def test_every_right_of_a_plain_cluster_is_used_by_the_feature_that_declares_it(room: Room) -> None:
    """The operator has Roles in one namespace, as in a namespaced install; the cluster has no optional kinds."""
    witness, own = identity(room, ALWAYS)
    async with running(room, witness, own, namespaces=(room.namespace,)):
        await witness.uses_all_of("leader-election")
        await room.create_pool("a", replicas=0)
        model = {"modelName": "chat", "poolRef": {"name": "a"}, "targetModels": [{"name": "tiny"}]}
        await room.request(
            "POST",
            MODELS.format(room.namespace),
            {"apiVersion": "treeline.dev/v1alpha1", "kind": "InferenceModel", "metadata": {"name": "chat"}}
            | {"spec": model},
        )
        await said(room, "a")
        await witness.uses_all_of("resources", "picker-role")
        await of_a_picker(room)

        await witness.has_only_read("model-cache")
        # Old revisions go, all but one; a Gateway instead of our Envoy takes away what Envoy had.
        for seconds in (10, 20, 30):
            await change(room, "a", drain={"timeoutSeconds": seconds})
            await said(room, "a")
        await room.until(lambda: two_revisions(room), "the oldest revisions to be deleted")
        await change(room, "a", gateway={"parentRefs": [{"name": "front"}]})
        await witness.uses_all_of("disruption", "network")

        await room.create_pool("c", model={"uri": "hf://org/name", "cache": {"size": "1Gi"}})
        await witness.uses_all_of("model-cache")
        await downloading(room, "c")
        # A pod that is to go is marked first.
        await change(room, "c", replicas=0)
        await witness.uses_all_of("workloads", "events")

        await change(room, "a", autoscaling=PICKER)
        await witness.uses_all_of("picker-scaling")
    witness.conclude(UNASKED)


async def two_revisions(room: Room) -> bool:
    return len(await names_of(room, DEPLOYMENTS, "a-")) == 2


async def downloading(room: Room, pool: str) -> None:
    """Report a pod whose download runs, as a kubelet does; there is no kubelet, and so no log."""
    pods = "/api/v1/namespaces/{}/pods"
    (pod, *_) = await room.until(lambda: names_of(room, pods, f"{pool}-"), f"a pod of {pool}")
    running = {"running": {"startedAt": "2026-11-01T00:00:00Z"}}
    state = {
        "name": DOWNLOAD,
        "image": "",
        "imageID": "",
        "ready": False,
        "restartCount": 0,
        "state": running,
    }
    await room.patch(f"{pods}/{pod}/status", {"status": {"initContainerStatuses": [state]}}, "kubelet")


async def of_a_picker(room: Room) -> None:
    """Run a picker with the operator's flags and identity, and check that it uses all rights of its Role."""
    name = "treeline-epp"
    await room.until(lambda: room.get(f"{DEPLOYMENTS}/{name}"), "the picker's Deployment")
    user = f"system:serviceaccount:{room.namespace}:{name}"
    role = await room.get(f"/apis/rbac.authorization.k8s.io/v1/namespaces/{{}}/roles/{name}")
    await asyncio.to_thread(Grants(room.plane).heard, user, role["rules"][-1], room.namespace)
    (container,) = (await room.get(f"{DEPLOYMENTS}/{name}"))["spec"]["template"]["spec"]["containers"]
    elsewhere = ("--curve-dir", "--peers", "--host", "--drain-timeout")  # what is only in a pod
    told = [a for a in container["args"] if not a.startswith(elsewhere)]
    config = await asyncio.to_thread(room.plane.service_account, room.namespace, name)
    granted = {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }

    async def used_all() -> bool:  # a watch is in the audit log a little after it has begun
        return used(await asyncio.to_thread(room.plane.audit_events, user)) == granted

    async with running_picker(*told, "--kubeconfig", str(config)):
        await room.until(used_all, f"the picker to use all of {sorted(granted)} and nothing else")
    assert refused(room.plane.audit_events(user)) == []


async def test_every_right_of_an_optional_feature_is_used_by_it(room: Room) -> None:
    """The operator has a ClusterRole, as in an install for all namespaces; the cluster has every optional kind."""
    await asyncio.to_thread(install, room.plane)
    witness, own = identity(room, rbac.WATCHED, everywhere=True)
    async with running(room, witness, own, namespaces=()):
        await room.create_pool("a", replicas=0)
        await said(room, "a")
        monitors = "/apis/monitoring.coreos.com/v1/namespaces/{}/podmonitors"
        await room.until(lambda: names_of(room, monitors, "treeline-edge"), "the monitor of Envoy")

        await witness.has_only_read("gateway-api")
        await change(room, "a", gateway={"parentRefs": [{"name": "front"}]})
        routes = "/apis/gateway.networking.k8s.io/v1/namespaces/{}/httproutes"
        await room.until(lambda: names_of(room, routes, "a"), "the route")
        await of_a_picker(room)
        await said(room, "a")  # whether its Gateway listens, too
        await witness.uses_all_of("prometheus")  # there is no Envoy to be read any more
        await change(room, "a", gateway={"parentRefs": None})
        await witness.uses_all_of("gateway-api")

        await witness.has_only_read("groups")
        groups = "/apis/leaderworkerset.x-k8s.io/v1/namespaces/{}/leaderworkersets"
        over_two = {"accelerator": {"nodes": 2}, "engine": {"tensorParallel": 2}}
        for seconds in (10, 20, 30):
            await change(room, "a", drain={"timeoutSeconds": seconds}, **over_two)
            await said(room, "a")
            for name in await room.until(lambda: names_of(room, groups, "a-"), "the groups of the revision"):
                await room.patch(f"{groups}/{name}", {"status": {"replicas": 0}})
        await witness.uses_all_of("groups")  # the oldest revision is deleted
    events = witness.events()
    assert refused(events) == []
    assert used(events) <= rbac.granted(witness.features)


def install(plane: ControlPlane) -> None:
    """Install the optional kinds, and wait until discovery lists them."""
    base = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    for obj in OPTIONAL:
        plane.request("POST", base, obj)
    wanted = {(obj["spec"]["group"], obj["spec"]["names"]["kind"]) for obj in OPTIONAL}
    with plane.http() as http:
        while True:
            groups = http.get("/apis", headers={"Accept": AGGREGATED}).json()["items"]
            listed = {
                (group["metadata"]["name"], resource.get("responseKind", {}).get("kind"))
                for group in groups
                for version in group["versions"]
                for resource in version.get("resources", ())
            }
            if wanted <= listed:
                return


async def test_children_that_block_their_pools_deletion_need_the_right_to_its_finalizers(room: Room) -> None:
    pool = await room.create_pool("a")
    without = tuple(feature for feature in ALWAYS if feature.name != "ownership")
    answers = {}
    for user, features in (("all", ALWAYS), ("without", without)):
        name = f"{user}-{room.namespace}"
        await asyncio.to_thread(Grants(room.plane).bind, name, rules_of(features), room.namespace)
        owner = {"apiVersion": pool["apiVersion"], "kind": pool["kind"], "name": "a", "controller": True}
        owner |= {"uid": pool["metadata"]["uid"], "blockOwnerDeletion": True}
        body = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "a", "ownerReferences": [owner]},
        }
        with room.plane.http(name, ()) as http:
            path = f"/api/v1/namespaces/{room.namespace}/configmaps?dryRun=All"
            answers[user] = (await asyncio.to_thread(http.post, path, json=body)).json()
    assert answers["all"]["kind"] == "ConfigMap", answers
    assert "cannot set blockOwnerDeletion" in answers["without"]["message"]
