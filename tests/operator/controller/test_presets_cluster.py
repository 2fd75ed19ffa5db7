"""Presets on a real API server, which writes defaults into every pool that it stores."""

from __future__ import annotations

import pytest
from support.operator_run import DEPLOYMENTS, Room, condition, operator
from treeline_operator.world import Platform

pytestmark = [pytest.mark.integration, pytest.mark.deep]

PRESETS = {"small": {"engine": {"contextLength": 77, "port": 9000}, "drain": {"timeoutSeconds": 20}}}


async def test_a_stored_pool_has_its_own_fields_over_those_of_the_preset(room: Room) -> None:
    async def args() -> list[str]:
        found = [d for d in await room.items(DEPLOYMENTS) if "treeline.dev/pool" in d["metadata"]["labels"]]
        return list(found[0]["spec"]["template"]["spec"]["containers"][0]["args"]) if found else []

    platform = Platform(operator_namespace=room.namespace, presets=PRESETS)
    async with operator(room.plane.admin, room.namespace, platform=platform):
        stored = await room.create_pool("a", preset="small", drain={"timeoutSeconds": 30})
        assert stored["spec"]["engine"]["port"] == 8000, "a default that no spec sets"
        said = await room.until(args, "the pods of the pool")
        words = " ".join(said).replace("=", " ")
        assert all(flag in words for flag in ("--context-length 77", "--port 9000", "--drain-timeout 30")), said

        async def told() -> object:
            return ((await room.pool("a")).get("status") or {}).get("preset")

        assert (await room.until(told, "what pickers go by"))["port"] == 9000
        await room.create_pool("b", preset="large")

        async def missing() -> bool:
            return condition(await room.pool("b"), "Ready").get("reason") == "PresetMissing"

        await room.until(missing, "the name to be refused")
        assert "the operator has: small" in condition(await room.pool("b"), "Ready")["message"]
