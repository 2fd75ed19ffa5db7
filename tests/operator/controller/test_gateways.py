"""Gateways of other owners: read if allowed, often while a pool waits for them, and rarely otherwise."""

from __future__ import annotations

from typing import Any

import pytest
from treeline_kube.errors import Forbidden, NotFound, Unavailable
from treeline_operator.controller.gateways import AWAITED_S, SETTLED_S, Gateways
from treeline_operator.world import Ref

EDGE = Ref("gateway.networking.k8s.io/v1", "Gateway", "infra", "edge")
OTHER = EDGE._replace(name="other")


class Api:
    """Answers by name; an exception is raised."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.asked: list[str] = []
        self.now = 1000.0

    async def get(self, ref: Ref) -> dict[str, Any]:
        self.asked.append(ref.name)
        answer = self.answers[ref.name]
        if isinstance(answer, Exception):
            raise answer
        meta = {"name": ref.name, "namespace": ref.namespace, "uid": ref.name, "resourceVersion": answer}
        return {"apiVersion": ref.api_version, "kind": ref.kind, "metadata": meta}


@pytest.fixture
def api() -> Api:
    return Api()


async def versions(gateways: Gateways, *refs: Ref, awaited: bool) -> list[str]:
    return [one.resource_version for one in await gateways.read(refs, awaited=awaited)]


async def test_a_waiting_pool_reads_often_and_others_rarely(api: Api) -> None:
    gateways = Gateways(api, clock=lambda: api.now)
    api.answers["edge"] = "1"
    assert await versions(gateways, EDGE, awaited=True) == ["1"]
    api.answers["edge"] = "2"
    api.now += AWAITED_S - 1
    assert await versions(gateways, EDGE, awaited=True) == ["1"], "many pools may share it"
    api.now += 1
    assert await versions(gateways, EDGE, awaited=False) == ["1"]
    assert await versions(gateways, EDGE, awaited=True) == ["2"]
    api.answers["edge"] = "3"
    api.now += SETTLED_S
    assert await versions(gateways, EDGE, awaited=False) == ["3"]
    assert len(api.asked) == 3


async def test_a_forbidden_gateway_is_unknown_and_not_read_again_soon(api: Api) -> None:
    gateways = Gateways(api, clock=lambda: api.now)
    api.answers |= {"edge": Forbidden("no", code=403), "other": "1"}
    assert await versions(gateways, EDGE, OTHER, awaited=True) == ["1"]
    api.now += 200
    assert await versions(gateways, EDGE, OTHER, awaited=True) == ["1"]
    assert api.asked.count("edge") == 1
    api.now += 200
    await versions(gateways, EDGE, awaited=True)
    assert api.asked.count("edge") == 2


async def test_a_missing_gateway_is_unknown_and_a_silent_server_changes_nothing(api: Api) -> None:
    gateways = Gateways(api, clock=lambda: api.now)
    api.answers["edge"] = NotFound("none", code=404)
    assert await versions(gateways, EDGE, awaited=True) == []
    api.answers["edge"] = "1"
    api.now += AWAITED_S
    assert await versions(gateways, EDGE, awaited=True) == ["1"]
    api.answers["edge"] = Unavailable("away", code=503)
    api.now += AWAITED_S
    assert await versions(gateways, EDGE, awaited=True) == ["1"]
    api.answers["edge"] = NotFound("none", code=404)
    api.now += AWAITED_S
    assert await versions(gateways, EDGE, awaited=True) == []
