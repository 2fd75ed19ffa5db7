"""The suite's Kubernetes API, used by the official Python client, and by requests as client-go sends them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from treeline_bench.api_server import LEASES, NAMESPACE, OBJECTIVES, PODS, ApiServer


@pytest.fixture
async def api() -> AsyncIterator[ApiServer]:
    server = ApiServer()
    server.held.set()
    await server.start()
    yield server
    await server.stop()


def url(api: ApiServer, path: str) -> str:
    return f"http://127.0.0.1:{api.port}{path}"


@pytest.mark.deep  # its import takes seconds
async def test_the_official_client_lists_watches_and_sees_deletions(api: ApiServer, tmp_path: Path) -> None:
    from kubernetes.aio import client, config, watch

    api.put(PODS, "a", labels={"app": "x"}, spec={"containers": []}, status={"podIP": "127.0.0.2"})
    await config.load_kube_config(str(api.write_kubeconfig(tmp_path)))
    async with client.ApiClient() as one:
        pods = client.CoreV1Api(one)
        found = await pods.list_namespaced_pod(NAMESPACE, label_selector="app=x")
        assert [pod.metadata.name for pod in found.items] == ["a"]
        assert (await pods.list_namespaced_pod(NAMESPACE, label_selector="app=y")).items == []
        api.put(PODS, "b", spec={"containers": []}, status={})
        api.mark_deleted(PODS, "b")
        api.delete(PODS, "b")
        seen = []
        async with watch.Watch().stream(
            pods.list_namespaced_pod, NAMESPACE, resource_version=found.metadata.resource_version
        ) as events:
            async for event in events:
                seen.append((event["type"], event["object"].metadata.name))
                if event["type"] == "DELETED":
                    break
        assert seen == [("ADDED", "b"), ("MODIFIED", "b"), ("DELETED", "b")]


async def test_a_watch_with_a_selector_sees_objects_that_begin_or_cease_to_match(api: ApiServer) -> None:
    path = f"/api/v1/namespaces/{NAMESPACE}/pods?watch=1&labelSelector=app%3Dx&fieldSelector=metadata.name%3Da"
    async with (
        httpx.AsyncClient(trust_env=False, timeout=60) as http,
        http.stream("GET", url(api, path)) as response,
    ):
        for name, app in (("b", "x"), ("a", "y"), ("a", "x"), ("a", "x"), ("a", "z")):
            api.put(PODS, name, labels={"app": app}, spec={}, status={})
        seen = await lines(response, 3)
    assert [(event["type"], event["object"]["metadata"]["labels"]["app"]) for event in seen] == [
        ("ADDED", "x"),
        ("MODIFIED", "x"),
        ("DELETED", "x"),
    ]
    versions = [int(event["object"]["metadata"]["resourceVersion"]) for event in seen]
    assert versions == sorted(set(versions))


async def lines(response: httpx.Response, count: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    async for text in response.aiter_lines():
        found.append(json.loads(text))
        if len(found) == count:
            break
    return found


async def test_a_watch_may_begin_with_all_objects_and_marks_the_end_of_them(api: ApiServer) -> None:
    api.put(OBJECTIVES, "a", spec={"priority": 1})
    path = f"/apis/inference.networking.x-k8s.io/v1alpha2/namespaces/{NAMESPACE}/inferenceobjectives"
    query = "?watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true"
    async with (
        httpx.AsyncClient(trust_env=False, timeout=60) as http,
        http.stream("GET", url(api, path + query)) as response,
    ):
        added, bookmark = await lines(response, 2)
    assert (added["type"], added["object"]["kind"]) == ("ADDED", "InferenceObjective")
    assert bookmark["object"]["metadata"]["annotations"] == {"k8s.io/initial-events-end": "true"}
    assert bookmark["object"]["metadata"]["resourceVersion"] == added["object"]["metadata"]["resourceVersion"]


async def test_pods_and_pools_can_be_held_back_and_discovery_answers_all_the_same(api: ApiServer) -> None:
    api.held.clear()
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        asked = asyncio.create_task(http.get(url(api, f"/api/v1/namespaces/{NAMESPACE}/pods")))
        await asyncio.wait_for(api.followed.wait(), 60)
        told = (await http.get(url(api, "/apis/inference.networking.x-k8s.io/v1alpha2"))).json()
        assert {one["kind"] for one in told["resources"]} == {"InferenceObjective", "InferenceModelRewrite"}
        assert not asked.done()
        api.held.set()
        assert (await asked).json()["kind"] == "PodList"


async def test_leases_are_stored_as_written_and_unknown_paths_are_404(api: ApiServer) -> None:
    path = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
    lease = {"metadata": {"name": "epp"}, "spec": {"holderIdentity": "me"}}
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        assert (await http.get(url(api, f"{path}/epp"))).status_code == 404
        assert (await http.post(url(api, path), json=lease)).status_code == 201
        assert (await http.post(url(api, path), json=lease)).status_code == 409
        assert (await http.get(url(api, f"{path}/epp"))).json()["spec"] == {"holderIdentity": "me"}
        assert (await http.put(url(api, f"{path}/epp"), json=lease | {"spec": {}})).json()["kind"] == LEASES.kind
        assert (await http.get(url(api, "/apis/apps/v1/deployments"))).status_code == 404
