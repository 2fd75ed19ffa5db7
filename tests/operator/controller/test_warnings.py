"""Warning Events: asked for seldom, only while somebody waits, and kept by whom they are about."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.operator_status import deployment, gateway_children, pod, pool, world
from treeline_kube.errors import Forbidden, KubeError
from treeline_operator.controller.warnings import Warnings, again_s, is_stuck
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


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def test_one_list_serves_all_pools_of_a_namespace_for_a_while(clock: Clock) -> None:
    lists = Lists(told("tiny-1"), told("other-1"), told("tiny", kind="InferencePool"))
    warnings = Warnings(lists, clock)
    seen = world(POOL, pods=(pod(POOL, "tiny-1"),))
    assert warnings.about(seen) == ()
    assert await warnings.look(KEY)
    assert lists.asked == [("shop", "type=Warning")]
    (event,) = warnings.about(seen)
    assert event == Event("FailedMount", "so it is", "2026-11-20T11:59:00Z", "tiny-1", "uid-tiny-1")
    for key in (KEY, OTHER):
        assert not await warnings.look(key)
    clock.now += 10.0
    assert not await warnings.look(OTHER), "it was asked, and nothing is new"
    assert len(lists.asked) == 2


async def test_what_replica_sets_met_is_known_by_their_deployment(clock: Clock) -> None:
    seen = world(POOL, children=(deployment("tiny-ab12", 2, 0),))
    lists = Lists(told("tiny-ab12-6d5f", "ReplicaSet", "FailedCreate"), told("tiny-cd34-6d5f", "ReplicaSet"))
    warnings = Warnings(lists, clock)
    await warnings.look(KEY)
    (event,) = warnings.about(seen)
    assert event.reason == "FailedCreate"


def test_a_pool_that_stays_as_it_is_is_looked_at_less_and_less_often() -> None:
    assert [again_s(waited_s) for waited_s in (0.0, 9.0, 20.0, 100.0, 90_000.0)] == [10.0, 10.0, 20.0, 100.0, 120.0]


async def test_nothing_is_kept_of_a_namespace_where_nobody_waits(clock: Clock) -> None:
    warnings = Warnings(Lists(told("tiny-1")), clock)
    seen = world(POOL, pods=(pod(POOL, "tiny-1"),))
    await warnings.look(KEY)
    clock.now += 1000.0
    assert warnings.about(seen)
    await warnings.look(Key("pool", "elsewhere", "x"))
    assert warnings.about(seen) == ()


@pytest.mark.parametrize(
    ("error", "pause"),
    [(Forbidden("no", code=403), 300.0), (KubeError("away", code=503), 10.0), (TimeoutError(), 10.0)],
)
async def test_without_the_list_work_goes_on(
    clock: Clock, error: Exception, pause: float, caplog: pytest.LogCaptureFixture
) -> None:
    lists = Lists(told("tiny-1"))
    lists.error = error
    warnings = Warnings(lists, clock)
    assert not await warnings.look(KEY)
    clock.now += pause - 0.1
    assert not await warnings.look(KEY)
    assert len(lists.asked) == 1
    lists.error = None
    clock.now += 0.2
    assert await warnings.look(KEY)


def test_only_what_does_not_come_up_is_worth_a_look() -> None:
    assert not is_stuck(world(POOL))
    assert is_stuck(world(POOL, pods=(pod(POOL, "tiny-1"),)))
    assert not is_stuck(world(POOL, pods=(pod(POOL, "tiny-1", deleting=True),)))
    lacking = deployment("treeline-epp", 1, 0).object
    lacking["status"]["replicas"] = 0
    assert is_stuck(world(POOL, gateway_parts=(*gateway_children()[1:], Observed.of(lacking))))
