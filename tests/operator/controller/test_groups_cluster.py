"""Replicas of several pods on a real API server, with LeaderWorkerSet's own controller."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.leader_worker_set import GroupPlane
from support.operator_run import PODS, POOLS, Room, condition, operator, ready
from treeline_operator.api.conditions import Reason
from treeline_wire.labels import GROUP_INDEX, POOL, SERVING, WORKER_INDEX

pytestmark = [pytest.mark.integration, pytest.mark.deep]

GROUPS = "/apis/leaderworkerset.x-k8s.io/v1/namespaces/{}/leaderworkersets"


@pytest.fixture
def plane() -> Iterator[GroupPlane]:
    """A control plane of this test's own: LeaderWorkerSet is installed in the middle of it."""
    plane = GroupPlane()
    plane.start(crds=True)
    yield plane
    plane.stop()


async def pods(room: Room) -> dict[tuple[str, str], Any]:
    """Return the pool's pods that are not being deleted, by group and place in it."""
    found = [pod for pod in await room.items(PODS) if POOL in pod["metadata"]["labels"]]
    marks = (pod["metadata"]["labels"] for pod in found)
    keys = [(labels[GROUP_INDEX], labels[WORKER_INDEX]) for labels in marks]
    return {key: pod for key, pod in zip(keys, found, strict=True) if "deletionTimestamp" not in pod["metadata"]}


async def workloads(room: Room) -> dict[str, Any]:
    return condition(await room.pool("a"), "WorkloadsReady")


async def test_groups_are_made_recreated_drained_and_deleted_as_one(plane: GroupPlane) -> None:
    room = Room(plane, "default")
    async with operator(plane.admin, "default"):
        await room.create_pool("a", replicas=2, accelerator={"nodes": 2}, engine={"tensorParallel": 2})

        async def missing() -> bool:
            return (await workloads(room)).get("reason") == Reason.LEADER_WORKER_SET_MISSING

        await room.until(missing, "the pool to miss LeaderWorkerSet")
        plane.start_groups()

        async def all_there() -> dict[tuple[str, str], Any] | None:
            found = await pods(room)
            return found if len(found) == 4 else None

        made = await room.until(all_there, "two groups of two pods")
        assert set(made) == {("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")}
        for (group, place), pod in made.items():
            env = {one["name"]: one.get("value") for one in pod["spec"]["containers"][0]["env"]}
            assert (env["LWS_GROUP_SIZE"], env["LWS_WORKER_INDEX"]) == ("2", place)
            assert env["LWS_LEADER_ADDRESS"].startswith(f"{made[group, '0']['metadata']['name']}.")
            assert pod["metadata"]["labels"].get(SERVING) == ("true" if place == "0" else None)
        for pod in made.values():
            await ready(room, pod)

        async def serving() -> bool:
            return (await workloads(room)).get("reason") == Reason.PODS_READY

        await room.until(serving, "the groups to count as ready")
        assert (await room.pool("a"))["status"]["replicaSummary"] == "2/2"

        lost = made["0", "1"]["metadata"]
        await room.request("DELETE", f"{PODS.format('default')}/{lost['name']}")

        async def recreated() -> dict[tuple[str, str], Any] | None:
            found = await pods(room)
            uids = {key: pod["metadata"]["uid"] for key, pod in found.items()}
            before = {key: pod["metadata"]["uid"] for key, pod in made.items()}
            fresh = len(uids) == 4 and all(uids["0", place] != before["0", place] for place in "01")
            return found if fresh and all(uids["1", place] == before["1", place] for place in "01") else None

        again = await room.until(recreated, "the whole group, and no other, to be made again")
        for place in "01":
            await ready(room, again["0", place])
        await room.until(serving, "the new group to be ready")

        await room.patch(f"{POOLS}/a", {"spec": {"replicas": 1}})

        async def one_left() -> bool:
            return set(await pods(room)) == {("0", "0"), ("0", "1")}

        await room.until(one_left, "group 1 to have drained and left")
        (group_set,) = await room.items(GROUPS)
        assert group_set["spec"]["replicas"] == 1
        await room.request("DELETE", f"{POOLS.format('default')}/a")

        async def nothing_left() -> bool:
            return not await room.items(GROUPS) and not await pods(room)

        await room.until(nothing_left, "the groups to go with their pool")
