"""kopf as the source of our own kinds' events, on a real API server."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from support.control_plane import ControlPlane
from support.kube_proxy import KubeProxy, collection, is_watch, status
from support.operator_run import MODELS, Room
from treeline_kube.client import Client
from treeline_kube.resources import Resource
from treeline_operator.controller.handlers import follow
from treeline_operator.controller.kinds import OWN as FOLLOWED

pytestmark = [pytest.mark.integration, pytest.mark.deep]

OWN = [kind.resource for kind in FOLLOWED]
KIND = OWN[1]


class Heard:
    def __init__(self) -> None:
        self.events: list[tuple[str | None, str]] = []
        self.threads: set[int] = set()

    def __call__(self, kind: Resource, type_: str | None, obj: dict[str, Any]) -> None:
        assert kind == KIND
        self.threads.add(threading.get_ident())
        self.events.append((type_, obj["metadata"]["name"]))


@pytest.fixture
def room(control_plane: ControlPlane, namespace: str) -> Room:
    return Room(control_plane, namespace)


@asynccontextmanager
async def listening(room: Room, heard: Heard) -> AsyncIterator[asyncio.Task[None]]:
    async with await Client.from_config(room.plane.kubeconfig("kopf", ("system:masters",))) as client:
        task = asyncio.create_task(follow([KIND], [room.namespace], client.configuration, heard))
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.wait([task])


def kopf_threads() -> set[threading.Thread]:
    """Return kopf's live threads."""
    return {thread for thread in threading.enumerate() if thread.name == "kopf"}


async def make(room: Room, name: str) -> None:
    body = {
        "apiVersion": "treeline.dev/v1alpha1",
        "kind": "InferenceModel",
        "metadata": {"name": name},
        "spec": {"modelName": name, "poolRef": {"name": "p"}},
    }
    await room.request("POST", MODELS.format(room.namespace), body)


async def test_lists_and_changes_are_reported_in_our_loop(room: Room) -> None:
    await make(room, "old")
    heard = Heard()
    others = kopf_threads()  # of operators of earlier tests, which may still be ending
    async with listening(room, heard):
        await room.until(lambda: (None, "old") in heard.events, "the list")
        await make(room, "new")
        await room.until(lambda: ("ADDED", "new") in heard.events, "what was made")
        await room.patch(f"{MODELS}/old", {"spec": {"modelName": "other"}})
        await room.until(lambda: ("MODIFIED", "old") in heard.events, "the change")
        await room.request("DELETE", f"{MODELS}/new".format(room.namespace))
        await room.until(lambda: ("DELETED", "new") in heard.events, "the deletion")
    assert heard.threads == {threading.get_ident()}
    heard.events.clear()
    await make(room, "after")
    await room.until(lambda: not kopf_threads() - others, "its thread to end")
    assert heard.events == []


async def test_kopf_ends_at_once_while_it_handles_an_event(room: Room) -> None:
    async with await Client.from_config(room.plane.kubeconfig("kopf", ("system:masters",))) as client:
        others, heard = kopf_threads(), asyncio.Event()
        for number in range(5):
            await make(room, f"new-{number}")
            heard.clear()
            task = asyncio.create_task(follow(OWN, [room.namespace], client.configuration, lambda *_: heard.set()))
            await asyncio.wait_for(heard.wait(), 30.0)
            task.cancel()
            done, _ = await asyncio.wait([task], timeout=60)
            assert done, "it was not waited for any longer"
            await room.until(lambda: not kopf_threads() - others, "its thread to end")


async def test_kopf_can_be_cancelled_before_it_has_begun(room: Room) -> None:
    async with await Client.from_config(room.plane.kubeconfig("kopf", ("system:masters",))) as client:
        others = kopf_threads()
        task = asyncio.create_task(follow(OWN, [room.namespace], client.configuration, lambda *_: None))
        await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=60)
        assert done
        await room.until(lambda: not kopf_threads() - others, "its thread to end")


async def test_kopf_writes_nothing_and_handles_no_signal(room: Room) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    await make(room, "old")
    heard = Heard()
    async with listening(room, heard):
        await room.until(lambda: heard.events, "the list")
        assert {number: signal.getsignal(number) for number in before} == before
    verbs = {event["verb"] for event in room.plane.audit_events("kopf") if "objectRef" in event}
    assert verbs == {"list", "watch"}


async def test_refused_credentials_end_kopf_with_the_reason(room: Room) -> None:
    async with await Client.from_config(room.plane.kubeconfig("kopf")) as client:
        configuration = client.configuration
        configuration.cert_file = configuration.key_file = None
        configuration.api_key["BearerToken"] = "Bearer nonsense"
        with pytest.raises(Exception, match="Ran out of valid credentials"):
            await follow([KIND], [room.namespace], configuration, Heard())


async def test_refused_credentials_are_requested_again(room: Room) -> None:
    await make(room, "old")
    await room.request(
        "POST",
        "/apis/rbac.authorization.k8s.io/v1/clusterroles",
        {
            "metadata": {"name": f"models-{room.namespace}"},
            "rules": [{"apiGroups": ["treeline.dev"], "resources": ["inferencemodels"], "verbs": ["list", "watch"]}],
        },
    )
    accounts = f"/api/v1/namespaces/{room.namespace}/serviceaccounts"
    await room.request("POST", accounts, {"metadata": {"name": "reader"}})
    role = f"--clusterrole=models-{room.namespace}"
    grant = (role, f"--serviceaccount={room.namespace}:reader", "-n", room.namespace)
    room.plane.kubectl("create", "rolebinding", "reader", *grant)
    token = (await room.request("POST", f"{accounts}/reader/token", {}))["status"]["token"]
    heard = Heard()
    tokens = ["expired", token]
    async with await Client.from_config(room.plane.kubeconfig("kopf")) as client:
        configuration = client.configuration
        configuration.cert_file = configuration.key_file = None

        async def settings() -> dict[str, Any]:
            return {"BearerToken": {"value": f"Bearer {tokens.pop(0)}"}}

        configuration.auth_settings = settings
        task = asyncio.create_task(follow([KIND], [room.namespace], configuration, heard))
        try:
            await room.until(lambda: (None, "old") in heard.events, "the list")
        finally:
            task.cancel()
            await asyncio.wait([task])
    assert tokens == []


@pytest.mark.parametrize("refused", [{"inferencemodels"}, {kind.plural for kind in OWN}], ids=["one", "both"])
async def test_a_permanently_refused_watch_ends_kopf_with_the_reason_and_the_other_watch(
    room: Room, tmp_path: Path, refused: set[str]
) -> None:
    def gone(request: web.Request) -> web.Response | None:
        refuse = is_watch(request) and collection(request.path) in refused
        return status(410, "Expired") if refuse else None

    others = kopf_threads()
    async with (
        KubeProxy(room.plane.admin, tmp_path) as proxy,
        await Client.from_config(proxy.kubeconfig) as client,
    ):
        task = asyncio.create_task(follow(OWN, [room.namespace], client.configuration, lambda *_: None))
        await room.until(lambda: len(proxy.watches) == len(OWN), "both watches")
        proxy.fault = gone
        assert proxy.cut() >= len(OWN)
        done, _ = await asyncio.wait([task], timeout=60.0)
        assert done
        assert "Expired" in str(task.exception())
        await room.until(lambda: not kopf_threads() - others, "its thread to end")
