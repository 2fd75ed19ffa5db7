"""Draining pods on a real API server: its ReplicaSets remove exactly the intended ones."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import pytest
from aiohttp import web
from support.operator_run import PODS, POOLS, Room, condition, operator, ready
from treeline_kube.client import Client
from treeline_operator import names
from treeline_operator.actions import Mark, Plan
from treeline_operator.controller.execute import Executor
from treeline_operator.controller.store import Store
from treeline_operator.world import Ref
from treeline_wire.labels import POOL, SERVING

pytestmark = [pytest.mark.integration, pytest.mark.deep]


class Picker:
    """The page of a picker that sees the real pods, with the streams that the test sets."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self.streams: Counter[str] = Counter()

    async def page(self, _: web.Request) -> web.Response:
        endpoints = []
        for pod in await runtimes(self.room):
            name, drains = pod["metadata"]["name"], pod["metadata"]["labels"][SERVING] == "false"
            told = {"name": name, "address": "127.0.0.1:8000", "ready": not drains, "draining": drains}
            endpoints.append({**told, "in_flight": self.streams[name], "cached_tokens": 0})
        return web.json_response({"synced": True, "pools": {"a": {"models": ["tiny"], "endpoints": endpoints}}})


@asynccontextmanager
async def picker_of(room: Room) -> AsyncIterator[tuple[Picker, int]]:
    picker, app = Picker(room), web.Application()
    app.router.add_get("/endpoints", picker.page)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield picker, runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def runtimes(room: Room) -> list[Any]:
    """Return the pool's pods that are not being deleted."""
    pods = await room.items(PODS)
    return [p for p in pods if POOL in p["metadata"]["labels"] and "deletionTimestamp" not in p["metadata"]]


async def names_where(room: Room, serving: str) -> set[str]:
    pods = await runtimes(room)
    return {p["metadata"]["name"] for p in pods if p["metadata"]["labels"][SERVING] == serving}


async def four_ready(room: Room, picker: Picker, *streams: int, **spec: Any) -> list[str]:
    """Return a pool of four ready pods with these streams, in the order of the pods' names."""
    await room.create_pool("a", replicas=4, **spec)

    async def there() -> list[Any]:
        found = await room.items(PODS)
        return found if len(found) == 6 else []

    pods = await room.until(there, "six pods")
    serving = sorted(await names_where(room, "true"))
    picker.streams.update(dict(zip(serving, streams, strict=True)))
    for pod in pods:
        await ready(room, pod)

    async def serves() -> bool:
        return condition(await room.pool("a"), "Ready").get("status") == "True"

    await room.until(serves, "the pool to serve")
    return serving


async def scale(room: Room, replicas: int) -> None:
    await room.patch(f"{POOLS}/a/scale", {"spec": {"replicas": replicas}}, manager="autoscaler")


async def left(room: Room, *wanted: str) -> bool:
    return {p["metadata"]["name"] for p in await runtimes(room)} == set(wanted)


async def messages(room: Room, reason: str) -> list[str]:
    found = await room.items("/api/v1/namespaces/{}/events")
    return [f"{e['type']}: {e['message']}" for e in found if e["reason"] == reason]


async def said(room: Room, reason: str, words: str) -> str:
    """Wait for the Event of this reason with these words, and return its message."""

    async def look() -> str:
        return next((one for one in await messages(room, reason) if words in one), "")

    return str(await room.until(look, f"an Event {reason} with {words!r}"))


async def test_an_autoscaler_removes_three_of_four_pods_and_restores_one_midway(room: Room) -> None:
    async with (
        picker_of(room) as (picker, port),
        operator(room.plane.admin, room.namespace, picker_port=port),
    ):
        one, two, three, four = await four_ready(room, picker, 3, 1, 1, 0)
        await scale(room, 1)
        await room.until(lambda: left(room, one, two, three), "the idle pod to go")

        async def two_drain() -> bool:
            return await names_where(room, "false") == {two, three}

        await room.until(two_drain, "two others to drain")

        async def told() -> str:
            progressing = condition(await room.pool("a"), "Progressing")
            return progressing["message"] if progressing.get("reason") == "Draining" else ""

        async def only_two_left() -> bool:
            return "2 pods, 2 requests left, until" in await told()

        await room.until(only_two_left, "the status to say who drains")
        await scale(room, 2)

        async def one_is_back() -> bool:
            return len(await names_where(room, "true")) == 2

        await room.until(one_is_back, "one to serve again")
        (back,) = await names_where(room, "true") - {one}
        (goes,) = await names_where(room, "false")
        assert {back, goes} == {two, three}
        pod = await room.get(f"{PODS}/{back}")
        assert not {names.DRAINING_SINCE, names.DELETION_COST} & set(pod["metadata"].get("annotations") or {})
        del picker.streams[goes]
        await room.until(lambda: left(room, one, back), "the last one to go")
        for reason, words in (
            ("Draining", f"Pod {two} (1 in flight)"),
            ("Draining", f"Pod {four} (0 in flight)"),
            ("DrainCancelled", f"Pod {back}"),
        ):
            await said(room, reason, words)


async def test_the_successor_of_a_killed_operator_continues_with_the_same_deadlines(
    room: Room,
) -> None:
    async with picker_of(room) as (picker, port):
        async with operator(room.plane.admin, room.namespace, picker_port=port) as first:
            one, two, three, four = await four_ready(room, picker, 2, 2, 1, 1, drain={"timeoutSeconds": 4})
            await scale(room, 2)

            async def two_drain() -> bool:
                return await names_where(room, "false") == {three, four}

            await room.until(two_drain, "two to drain")
            first.cancel()
            await asyncio.wait([first])
        del picker.streams[three]
        began = {
            pod["metadata"]["name"]: pod["metadata"]["annotations"][names.DRAINING_SINCE]
            for pod in await runtimes(room)
            if pod["metadata"]["labels"][SERVING] == "false"
        }
        async with operator(room.plane.admin, room.namespace, picker_port=port, identity="two"):
            begun = set[str]()

            async def both_gone() -> bool:
                for pod in await runtimes(room):
                    begun.update(filter(None, [(pod["metadata"].get("annotations") or {}).get(names.DRAINING_SINCE)]))
                return await left(room, one, two)

            await room.until(both_gone, "the one without requests to go, and the other one to be cut off")
            assert begun <= set(began.values()), "not begun again"
            told = await said(room, "DrainTimeout", four)
            assert told == f"Warning: DrainTimeout Pod {four} (1 in flight)"


async def test_marking_a_deleted_pod_does_not_create_it(room: Room) -> None:
    """A new pod of the same name is not marked either; the operator plans again."""
    body = {"containers": [{"name": "runtime", "image": "x"}]}
    meta = {"name": "p", "labels": {POOL: "a"}}
    there = await room.request("POST", PODS.format(room.namespace), {"kind": "Pod", "metadata": meta, "spec": body})
    async with await Client.from_config(room.plane.admin) as cluster:
        for name in ("p", "absent"):
            store, ref = Store(), Ref("v1", "Pod", room.namespace, name)
            store.put({**there, "apiVersion": "v1", "metadata": {**there["metadata"], "name": name, "uid": "x"}})
            mark = Mark(ref, "x", {SERVING: "false"}, {}, "", "drain")
            done = await Executor(cluster, store, lambda: datetime.now(UTC)).execute(Plan((mark,)))
            assert done.stale
            assert store.get(ref) is None
    assert await room.get(f"{PODS}/absent") is None
    assert SERVING not in (await room.get(f"{PODS}/p"))["metadata"]["labels"]
