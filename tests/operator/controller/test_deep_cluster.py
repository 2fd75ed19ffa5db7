"""A deeply nested object that the API server accepts harms only its owner."""

from __future__ import annotations

import pytest
from support.operator_run import Room, condition, operator

pytestmark = [pytest.mark.integration, pytest.mark.deep]


@pytest.mark.parametrize("depth", [150, 9900])
async def test_a_pool_that_is_nested_deep_leaves_others_alone(room: Room, depth: int) -> None:
    async def told(name: str) -> str:
        found = condition(await room.pool(name), "Ready")
        return f"{found['reason']}: {found['message']}" if found.get("reason") not in (None, "Pending") else ""

    text = '{"a":' * depth + '"x"' + "}" * depth
    body = (
        '{"apiVersion": "treeline.dev/v1alpha1", "kind": "InferencePool", "metadata": {"name": "deep"}, '
        f'"spec": {{"model": {{"uri": "builtin://tiny"}}, "template": {{"spec": {text}}}}}}}'
    )
    made = await room.raw("POST", body)
    assert made == 201, made
    async with operator(room.plane.admin, room.namespace, resync_s=0.3):
        await room.create_pool("before")
        await room.until(lambda: told("before"), "the pool beside it")
        await room.create_pool("after")
        await room.until(lambda: told("after"), "the next one")
        said = await room.until(lambda: told("deep"), "the pool itself")
        assert said.startswith("SpecNotUnderstood: spec: it is nested more than 100 deep")
