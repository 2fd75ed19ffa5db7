"""The whole operator against a real API server and its controllers."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from support.kube_api import expired
from support.kube_proxy import KubeProxy, collection, is_watch, status
from support.operator_run import (
    DEPLOYMENTS,
    MODELS,
    PODS,
    POOLS,
    RESOURCES,
    SERVICES,
    Room,
    condition,
    operator,
    quiet,
    ready,
    runtime,
    settled,
    versions,
)

pytestmark = [pytest.mark.integration, pytest.mark.deep]


async def events(room: Room, reason: str) -> list[str]:
    return [e["message"] for e in await room.items("/api/v1/namespaces/{}/events") if e["reason"] == reason]


async def test_a_converged_world_gets_no_more_writes(room: Room, tmp_path: Path) -> None:
    async with KubeProxy(room.plane.admin, tmp_path) as proxy:
        async with operator(proxy.kubeconfig, room.namespace, resync_s=0.3):
            await room.create_pool("a")
            await room.request("POST", MODELS.format(room.namespace), model("chat", "a"))
            await settled(room)
            await room.until(lambda: told_of_model(room, "chat"), "the status of the model")
            await quiet(proxy)
            before, count = await versions(room), proxy.writes.total()
            watched = dict(proxy.watches)
            await asyncio.sleep(1.5)  # five resyncs, in which nothing may be written
            assert proxy.writes.total() == count, proxy.writes
            assert await versions(room) == before
            assert dict(proxy.watches) == watched
        # Another operator finds everything as it should be, too.
        count = proxy.writes.total()
        async with operator(proxy.kubeconfig, room.namespace, resync_s=0.3):
            await room.until(lambda: proxy.watches["deployments"] > watched["deployments"], "the second operator")
            await asyncio.sleep(1.0)
        assert proxy.writes.total() == count, proxy.writes
        assert ("secrets", "GET") not in proxy.watches


def model(name: str, pool: str) -> dict[str, Any]:
    return {
        "apiVersion": "treeline.dev/v1alpha1",
        "kind": "InferenceModel",
        "metadata": {"name": name},
        "spec": {"modelName": name, "poolRef": {"name": pool}, "targetModels": [{"name": "tiny"}]},
    }


async def told_of_model(room: Room, name: str) -> bool:
    return condition(await room.get(f"{MODELS}/{name}"), "Accepted").get("status") == "True"


async def test_from_a_pool_to_a_url_and_back_to_nothing(room: Room) -> None:
    """The test makes the pods ready and its picker lists them; the pool becomes Ready, and is then deleted."""
    listed: dict[str, Any] = {"synced": True, "pools": {}}
    app = web.Application()
    app.router.add_get("/endpoints", lambda _: web.json_response(listed))
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    try:
        async with operator(room.plane.admin, room.namespace, picker_port=port):
            await room.create_pool("a", replicas=2)
            await settled(room)
            pods = await room.until(lambda: pods_of(room, 4), "four pods")
            for pod in pods:
                await ready(room, pod)
            pool = await room.until(
                lambda: reason(room, "a", "Ready", "EndpointsMissing"), "the picker's list to be missed"
            )
            runtimes = [pod["metadata"]["name"] for pod in pods if "treeline.dev/pool" in pod["metadata"]["labels"]]
            listed["pools"] = {
                "a": {
                    "models": ["tiny"],
                    "endpoints": [{"name": name, "address": "127.0.0.1:8000", "ready": True} for name in runtimes],
                }
            }
            pool = await room.until(lambda: reason(room, "a", "Ready", "Serving"), "the pool to be Ready")
            assert condition(pool, "Ready")["status"] == "True"
            assert pool["status"]["readyReplicas"] == 2
            assert pool["status"]["url"] == f"http://treeline-gateway.{room.namespace}.svc"
            await room.request("DELETE", f"{POOLS.format(room.namespace)}/a")
            await room.until(lambda: nothing_left(room), "the garbage collector to take the children", 30.0)
    finally:
        await runner.cleanup()


async def pods_of(room: Room, count: int) -> list[Any]:
    found = await room.items(PODS)
    return found if len(found) == count else []


async def reason(room: Room, pool: str, kind: str, wanted: str) -> Any:
    found = await room.pool(pool)
    return found if condition(found, kind).get("reason") == wanted else None


async def nothing_left(room: Room) -> bool:
    ours = {"treeline.dev/gateway", "treeline.dev/pool"}
    children = (resource.path(room.namespace) for resource in RESOURCES)
    for path in (*children, "/api/v1/namespaces/{}/secrets"):
        if any(ours & set(obj["metadata"].get("labels", {})) for obj in await room.items(path)):
            return False
    return True


async def test_fields_of_others_stay_and_ours_are_restored(room: Room) -> None:
    async with operator(room.plane.admin, room.namespace, resync_s=1.0):
        await room.create_pool("a")
        await settled(room)
        # An autoscaler sets the pool's replicas through /scale, and the Deployment follows it.
        await room.patch(f"{POOLS}/a/scale", {"spec": {"replicas": 3}}, manager="autoscaler")

        async def follows() -> bool:
            return (await runtime(room))["spec"]["replicas"] == 3

        await room.until(follows, "the Deployment to follow the autoscaler")
        # A user labels and restarts the picker, points a port elsewhere and removes our label.
        restart = {"metadata": {"annotations": {"kubectl.kubernetes.io/restartedAt": "2026-11-28T12:00:00Z"}}}
        await room.patch(
            f"{DEPLOYMENTS}/treeline-epp",
            {"metadata": {"labels": {"team": "ml"}}, "spec": {"template": restart}},
            kind="strategic-merge",
        )
        await room.patch(
            f"{DEPLOYMENTS}/treeline-edge",
            {"metadata": {"labels": {"app.kubernetes.io/managed-by": "me"}}},
            kind="strategic-merge",
        )
        ports = (await room.get(f"{SERVICES}/treeline-gateway"))["spec"]["ports"]
        await room.patch(f"{SERVICES}/treeline-gateway", {"spec": {"ports": [{**ports[0], "targetPort": 9}]}})

        async def mended() -> bool:
            service = await room.get(f"{SERVICES}/treeline-gateway")
            edge = await room.get(f"{DEPLOYMENTS}/treeline-edge")
            labelled = edge["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "treeline"
            return service["spec"]["ports"][0]["targetPort"] == ports[0]["targetPort"] and labelled

        await room.until(mended, "the drift to be corrected")
        told = await room.until(lambda: events(room, "DriftCorrected"), "an Event of it")
        assert "Service treeline-gateway" in told[0]
        assert "ports" in told[0]
        epp = await room.get(f"{DEPLOYMENTS}/treeline-epp")
        assert epp["metadata"]["labels"]["team"] == "ml"
        assert epp["spec"]["template"]["metadata"]["annotations"] == restart["metadata"]["annotations"]
        assert (await runtime(room))["spec"]["replicas"] == 3


async def test_additions_to_selectors_ports_and_templates_are_removed(room: Room) -> None:
    """Each addition breaks the URL or changes pods, and an apply alone leaves it there or is refused forever."""
    async with operator(room.plane.admin, room.namespace, resync_s=1.0):
        await room.create_pool("a", gateway={"standalone": {"serviceType": "NodePort"}})
        await settled(room)
        deployment = (await runtime(room))["metadata"]["name"]
        service, pods = f"{SERVICES}/treeline-gateway", f"{SERVICES}/a-pods"
        budget = "/apis/policy/v1/namespaces/{}/poddisruptionbudgets/treeline-edge"
        policy = "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies/a-pods"
        before = {path: await room.get(path) for path in (service, pods, budget, policy)}
        foreign = {"somebody": "else"}
        port = before[service]["spec"]["ports"][0]
        edits: list[tuple[str, Any, str]] = [
            (service, {"selector": foreign, "ports": [{**port, "port": 81}]}, "merge"),
            (pods, {"selector": foreign}, "merge"),
            (budget, {"selector": {"matchLabels": foreign}}, "merge"),
            (policy, {"podSelector": {"matchLabels": foreign}}, "merge"),
        ]
        added = [{"name": "ADDED", "value": "1"}]
        for name, container in (("treeline-epp", "epp"), ("treeline-edge", "edge"), (deployment, "runtime")):
            meta = {"labels": foreign}
            pod = {"nodeSelector": foreign, "containers": [{"name": container, "env": added}]}
            edits.append((f"{DEPLOYMENTS}/{name}", {"template": {"metadata": meta, "spec": pod}}, "strategic-merge"))
            before[f"{DEPLOYMENTS}/{name}"] = await room.get(f"{DEPLOYMENTS}/{name}")
        for path, spec, kind in edits:
            await room.patch(path, {"spec": spec}, kind=kind)

        async def mended() -> bool:
            now = {path: (await room.get(path))["spec"] for path in before}
            return now == {path: obj["spec"] for path, obj in before.items()}

        await room.until(mended, "everything to be as before, the port of the nodes, too")
        # A change of the pool's own still finds its way through what the repair wrote.
        await room.patch(f"{POOLS}/a", {"spec": {"gateway": {"standalone": {"port": 8080}}}})

        async def moved() -> bool:
            return [one["port"] for one in (await room.get(service))["spec"]["ports"]] == [8080]

        await room.until(moved, "the new port")


async def test_api_keys_outlive_the_pool_that_stated_them_until_another_pool_drops_them(room: Room) -> None:
    async with operator(room.plane.admin, room.namespace):
        keys = {"apiKeysSecretRef": {"name": "clients"}}
        await room.create_pool("a", gateway={"standalone": keys})
        await settled(room)
        await room.create_pool("b")

        async def shared_by(*pools: str) -> bool:
            anchor = await room.get("/api/v1/namespaces/{}/configmaps/treeline-gateway")
            return bool(anchor["data"]["pools"].split() == list(pools))

        await room.until(lambda: shared_by("a", "b"), "both to share the gateway")

        async def secrets() -> list[str]:
            pod = (await room.get(f"{DEPLOYMENTS}/treeline-edge"))["spec"]["template"]["spec"]
            return [one["secret"]["secretName"] for one in pod["volumes"] if "secret" in one]

        assert await secrets() == ["clients"]
        await room.request("DELETE", f"{POOLS.format(room.namespace)}/a")

        await room.until(lambda: shared_by("b"), "the gateway to be b's")
        assert await secrets() == ["clients"]
        await room.patch(f"{POOLS}/b", {"spec": {"gateway": {"unprotected": ["ApiKeys", "Isolation"]}}})

        async def dropped() -> bool:
            return await secrets() == []

        await room.until(dropped, "the keys to be dropped")


async def test_a_child_deleted_by_hand_comes_back(room: Room) -> None:
    async with operator(room.plane.admin, room.namespace):
        await room.create_pool("a")
        await settled(room)
        was = (await room.get(f"{SERVICES}/a-pods"))["metadata"]["uid"]
        await room.request("DELETE", f"{SERVICES.format(room.namespace)}/a-pods")

        async def back() -> bool:
            service = await room.get(f"{SERVICES}/a-pods")
            return service is not None and service["metadata"]["uid"] != was

        await room.until(back, "the Service to be made anew")


BAD = (
    ("terminationMessagePolicy", {"containers": [{"name": "runtime", "terminationMessagePolicy": "Sometimes"}]}),
    ("nodeSelectr", {"nodeSelectr": {"disk": "fast"}}),
    ("containers[0].livenessProb", {"containers": [{"name": "runtime", "livenessProb": None, "livenessProbes": {}}]}),
    ("priority", {"priority": "high"}),
)


@pytest.mark.parametrize(("field", "bad"), BAD, ids=[field for field, _ in BAD])
async def test_a_refusal_is_reported_with_the_servers_words_and_retried(
    room: Room, field: str, bad: dict[str, Any]
) -> None:
    async with operator(room.plane.admin, room.namespace):
        await room.create_pool("a", template={"spec": bad})
        pool = await room.until(lambda: reason(room, "a", "Ready", "TemplateInvalid"), "the refusal to be reported")
        assert field.rpartition(".")[2] in condition(pool, "Ready")["message"]
        assert await room.get(f"{SERVICES}/a-pods"), "the other children are there"
        await room.patch(f"{POOLS}/a", {"spec": {"template": None}})
        await settled(room)
        await room.until(lambda: reason(room, "a", "Ready", "PodsStarting"), "the refusal to be forgotten")


async def test_a_refused_picker_template_is_reported_and_blocks_nothing_else(room: Room) -> None:
    async with operator(room.plane.admin, room.namespace):
        await room.create_pool("a", endpointPicker={"template": {"spec": {"nodeSelectr": {"disk": "fast"}}}})
        pool = await room.until(lambda: reason(room, "a", "EndpointPickerReady", "TemplateInvalid"), "the refusal")
        assert "nodeSelectr" in condition(pool, "EndpointPickerReady")["message"]
        await room.until(lambda: room.get(f"{DEPLOYMENTS}/treeline-edge"), "Envoy all the same")
        await room.patch(f"{POOLS}/a", {"spec": {"endpointPicker": {"template": None}}})
        await settled(room)


async def test_cut_watches_and_lost_versions_are_recovered(room: Room, tmp_path: Path) -> None:
    """Objects made or deleted while no watch is open are noticed: by resuming, and after 410 by a new list."""
    sent_away: Counter[str] = Counter()

    def away(request: web.Request) -> web.Response | None:
        reads = request.method == "GET" and "namespaces" in request.path
        return status(503, "ServiceUnavailable") if reads else None

    def lost(request: web.Request) -> web.Response | None:
        if not is_watch(request):
            return None
        sent_away[collection(request.path)] += 1
        return web.Response(body=expired())

    async with (
        KubeProxy(room.plane.admin, tmp_path) as proxy,
        operator(proxy.kubeconfig, room.namespace),
    ):
        await room.create_pool("a")
        await settled(room)
        assert proxy.cut() >= 10
        await room.create_pool("b")
        await settled(room, "b")
        # Nobody watches while a child goes, and when watching is possible again, its going is forgotten.
        proxy.fault = away
        proxy.cut()
        await room.request("DELETE", f"{SERVICES.format(room.namespace)}/a-pods")
        proxy.fault = lost
        await room.until(lambda: sent_away["services"], "the watch of Services to be sent away")
        proxy.fault = None
        await room.until(lambda: room.get(f"{SERVICES}/a-pods"), "the Service that went unseen to be made anew")


async def test_a_storm_of_429_is_survived(room: Room, tmp_path: Path) -> None:
    async with KubeProxy(room.plane.admin, tmp_path) as proxy:
        seen = 0

        def storm(request: web.Request) -> web.Response | None:
            nonlocal seen
            seen += 1
            return status(429, "TooManyRequests", Retry_After="0") if seen < 80 and seen % 2 else None

        proxy.fault = storm
        async with operator(proxy.kubeconfig, room.namespace):
            await room.create_pool("a")
            await settled(room)


async def test_an_api_server_that_restarts_is_waited_for(room: Room) -> None:
    async with operator(room.plane.admin, room.namespace) as running:
        await room.create_pool("a")
        await settled(room)
        await asyncio.to_thread(room.plane.restart_apiserver)
        await room.create_pool("b")
        await settled(room, "b")
        assert not running.done()
