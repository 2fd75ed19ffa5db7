"""An upgrade of the operator on a real API server: nothing rolls until the pool changes."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.control_plane import ControlPlane
from support.operator_run import DEPLOYMENTS, POOLS, Room, condition, operator
from treeline_operator import plan_command
from treeline_operator.controller.kinds import CHILDREN
from treeline_operator.plan import edge, epp, pool
from treeline_operator.world import Images, Platform

pytestmark = [pytest.mark.integration, pytest.mark.deep]

HOME = Platform()
"""Where an operator lives is in the NetworkPolicies."""
LATER = Platform(Images("runtime:next", "runtime-cuda:next", "epp:next", "edge:next"))


@pytest.fixture
def room(control_plane: ControlPlane, namespace: str) -> Room:
    return Room(control_plane, namespace)


def become_newer(patch: pytest.MonkeyPatch) -> None:
    """From now on operators are of a version that makes other pods."""

    def other(made: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        def deployment(*args: Any, **options: Any) -> dict[str, Any]:
            obj = copy.deepcopy(made(*args, **options))
            (container, *_) = obj["spec"]["template"]["spec"]["containers"]
            container["env"] = [*container.get("env", ()), {"name": "NEWER", "value": "yes"}]
            return obj

        return deployment

    for module in (pool, epp, edge):
        patch.setattr(module, "deployment", other(module.deployment))


async def made(room: Room) -> dict[str, Any]:
    """Every Deployment by name."""
    return {obj["metadata"]["name"]: obj for obj in await room.items(DEPLOYMENTS)}


async def until_replicas(room: Room, count: int) -> dict[str, Any]:
    """Wait until the runtime and the picker have this many, and the status says that the pool was looked at."""

    async def look() -> dict[str, Any] | None:
        found, there = await room.pool("a"), await made(room)
        told = condition(found, "Ready").get("observedGeneration") == found["metadata"]["generation"]
        scaled = {name: obj["spec"]["replicas"] for name, obj in there.items() if not name.endswith("-edge")}
        return there if told and len(there) == 3 and set(scaled.values()) == {count} else None

    there: dict[str, Any] = await room.until(look, f"{count} replicas")
    return there


def templates(deployments: dict[str, Any]) -> dict[str, Any]:
    return {name: obj["spec"]["template"] for name, obj in deployments.items()}


async def test_a_newer_operator_rolls_nothing_until_the_pool_changes(
    room: Room, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with operator(room.plane.admin, room.namespace, platform=HOME):
        await room.create_pool("a")
        before = await until_replicas(room, 1)
    become_newer(monkeypatch)
    async with operator(room.plane.admin, room.namespace, platform=LATER, resync_s=0.3):
        await room.patch(f"{POOLS}/a", {"spec": {"replicas": 2, "endpointPicker": {"replicas": 2}}})
        after = await until_replicas(room, 2)
        assert templates(after) == templates(before)
        assert planned(room, tmp_path, await room.pool("a")).startswith("# nothing to do")

        again = {"metadata": {"annotations": {"example.com/restarted": "1"}}}
        asked = {
            "template": again,
            "endpointPicker": {"template": again},
            "gateway": {"standalone": {"template": again}},
        }
        await room.patch(f"{POOLS}/a", {"spec": asked})

        async def rolls() -> dict[str, Any] | None:
            there = await made(room)
            return there if len([obj for obj in there.values() if "NEWER" in str(obj)]) == 3 else None

        there = await room.until(rolls, "all three to be made anew")
        (old,) = before.keys() - {"treeline-epp", "treeline-edge"}
        assert there[old]["spec"]["template"] == before[old]["spec"]["template"], "its pods serve until the new ones do"
        assert there["treeline-epp"]["spec"]["template"]["spec"]["containers"][0]["image"] == "epp:next"
    # Back to the older one: it leaves alone what the newer one made.
    monkeypatch.undo()
    async with operator(room.plane.admin, room.namespace, platform=HOME, resync_s=0.3):
        await room.patch(f"{POOLS}/a", {"spec": {"endpointPicker": {"replicas": 3}}})

        async def scaled() -> dict[str, Any] | None:
            now = await made(room)
            return now if now["treeline-epp"]["spec"]["replicas"] == 3 else None

        assert templates(await room.until(scaled, "the picker to be scaled")) == templates(there)


def planned(room: Room, folder: Path, pool_: Any) -> str:
    """What `treeline operate plan` says of the namespace as kubectl writes it."""
    kinds = ",".join(("tlpool", *(watched.resource.label for watched in CHILDREN)))
    observed = folder / "observed"
    observed.mkdir()
    (observed / "all.yaml").write_text(room.plane.kubectl("-n", room.namespace, "get", kinds, "-o", "yaml"))
    meta = {"name": "a", "namespace": room.namespace}
    file = folder / "pool.yaml"
    file.write_text(yaml.safe_dump({**{k: pool_[k] for k in ("apiVersion", "kind", "spec")}, "metadata": meta}))
    out = io.StringIO()
    assert plan_command.main(("-f", str(file), "--observed", str(observed)), out, datetime.now(UTC)) == 0
    return out.getvalue()
