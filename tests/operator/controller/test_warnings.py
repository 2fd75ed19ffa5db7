"""Warning Events: listed rarely, only while a pool waits, and kept by the object that they are about."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from support.operator_status import deployment, gateway_children, pod, pool, world
from support.virtual_loop import run
from treeline_kube.errors import Forbidden, KubeError
from treeline_operator.controller.warnings import Warnings, is_stuck
from treeline_operator.world import Event, Key, Observed

KEY, OTHER = Key("pool", "shop", "tiny"), Key("pool", "shop", "large")
POOL = pool()


def told(name: str, kind: str = "Pod", reason: str = "FailedMount") -> dict[str, Any]:
    return {
        "metadata": {"name": f"{name}.1", "namespace": "shop", "uid": f"e-{name}", "labels": {"a": "b"}},
        "type": "Warning",
        "reason": reason,
        "message": "so it is",
        "involvedObject": {"kind": kind, "name": name, "uid": f"uid-{name}", "resourceVersion": "5"},
        "lastTimestamp": "2026-11-20T11:59:00Z",
        "source": {"component": "kubelet"},
    }


class Lists:
    """Answers lists of Events, or fails."""

    def __init__(self, *events: dict[str, Any]) -> None:
        self.events = list(events)
        self.asked: list[tuple[str | None, str | None]] = []
        self.error: Exception | None = None

    async def list(
        self, api_version: str, kind: str, namespace: str | None = None, *, field_selector: str | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        assert (api_version, kind) == ("v1", "Event")
        self.asked.append((namespace, field_selector))
        if self.error is not None:
            raise self.error
        for event in self.events:
            yield event


class Followed:
    """Warnings on a virtual loop, and the pools that they reported."""

    def __init__(self, lists: Lists) -> None:
        self.changed: list[Key] = []
        self.warnings = Warnings(cast("Any", lists), self.changed.append)

    def __enter__(self) -> Warnings:
        self.task = asyncio.create_task(self.warnings.run())
        return self.warnings

    def __exit__(self, *_: object) -> None:
        self.task.cancel()


STUCK = world(POOL, pods=(pod(POOL, "tiny-1"),))


def test_one_list_serves_all_pools_of_a_namespace_for_a_while() -> None:
    async def main() -> None:
        lists = Lists(told("tiny-1"), told("other-1"), told("tiny", kind="InferencePool"))
        with (followed := Followed(lists)) as warnings:
            warnings.see(KEY, STUCK)
            warnings.see(OTHER, world(POOL, pods=(pod(POOL, "large-1"),)))
            await asyncio.sleep(1)
            assert lists.asked == [("shop", "type=Warning")]
            assert followed.changed == [KEY], "of the other pool there is no Event"
            (event,) = warnings.about(STUCK)
            assert event == Event("FailedMount", "so it is", "2026-11-20T11:59:00Z", "tiny-1", "uid-tiny-1")
            await asyncio.sleep(10)
            assert (len(lists.asked), followed.changed) == (2, [KEY]), "it was asked, and nothing is new"

    run(main())


def test_another_reason_is_known_within_seconds_however_long_a_pool_has_waited() -> None:
    async def main() -> None:
        lists = Lists(told("tiny-1"))
        with (followed := Followed(lists)) as warnings:
            warnings.see(KEY, STUCK)
            await asyncio.sleep(3600)
            lists.events = [told("tiny-1", reason="FailedAttachVolume")]
            await asyncio.sleep(11)
            assert followed.changed == [KEY, KEY]
            assert [event.reason for event in warnings.about(STUCK)] == ["FailedAttachVolume"]

    run(main())


def test_events_of_replica_sets_belong_to_their_deployment() -> None:
    async def main() -> None:
        seen = world(POOL, children=(deployment("tiny-ab12", 2, 0),))
        lists = Lists(told("tiny-ab12-6d5f", "ReplicaSet", "FailedCreate"), told("tiny-cd34-6d5f", "ReplicaSet"))
        with Followed(lists) as warnings:
            warnings.see(KEY, seen)
            await asyncio.sleep(1)
            (event,) = warnings.about(seen)
            assert event.reason == "FailedCreate"

    run(main())


def test_a_namespace_without_waiting_pools_is_neither_listed_nor_kept() -> None:
    async def main() -> None:
        lists = Lists(told("tiny-1"))
        with Followed(lists) as warnings:
            warnings.see(KEY, STUCK)
            await asyncio.sleep(1)
            for _ in range(50):  # a pod that is ready now and again makes no more lists
                warnings.see(KEY, None)
                warnings.see(KEY, STUCK)
            await asyncio.sleep(5)
            assert len(lists.asked) == 1
            warnings.see(KEY, None)
            await asyncio.sleep(100)
            assert len(lists.asked) == 1
            assert warnings.about(STUCK) == ()

    run(main())


@pytest.mark.parametrize(
    ("error", "pause"),
    [(Forbidden("no", code=403), 300.0), (KubeError("away", code=503), 10.0), (TimeoutError(), 10.0)],
)
def test_a_failed_list_of_events_does_not_stop_work(error: Exception, pause: float) -> None:
    async def main() -> None:
        lists = Lists(told("tiny-1"))
        lists.error = error
        with (followed := Followed(lists)) as warnings:
            warnings.see(KEY, STUCK)
            await asyncio.sleep(pause - 1)
            assert (len(lists.asked), warnings.about(STUCK)) == (1, ())
            lists.error = None
            await asyncio.sleep(2)
            assert followed.changed == [KEY]

    run(main())


def test_events_are_listed_only_for_pending_objects() -> None:
    assert not is_stuck(world(POOL))
    assert is_stuck(world(POOL, pods=(pod(POOL, "tiny-1"),)))
    assert not is_stuck(world(POOL, pods=(pod(POOL, "tiny-1", deleting=True),)))
    lacking = deployment("treeline-epp", 1, 0).object
    lacking["status"]["replicas"] = 0
    assert is_stuck(world(POOL, gateway_parts=(*gateway_children()[1:], Observed.of(lacking))))
