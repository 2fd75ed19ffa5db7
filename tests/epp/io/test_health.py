"""The gRPC health service."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest
from treeline_epp.health import (
    NOT_SERVING,
    READY_NAMES,
    SERVICE_UNKNOWN,
    SERVING,
    Health,
    HealthCheckRequest,
    HealthCheckResponse,
)

CODING = {
    "request_serializer": HealthCheckRequest.SerializeToString,
    "response_deserializer": HealthCheckResponse.FromString,
}


@pytest.fixture
async def health() -> AsyncIterator[tuple[Health, grpc.aio.Channel]]:
    served = Health()
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((served.handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield served, channel
    await server.stop(None)


async def test_alive_is_always_served_and_the_rest_when_ready(
    health: tuple[Health, grpc.aio.Channel],
) -> None:
    served, channel = health
    check = channel.unary_unary("/grpc.health.v1.Health/Check", **CODING)
    for ready, expected in ((False, NOT_SERVING), (True, SERVING), (False, NOT_SERVING)):
        served.set_ready(ready)
        assert (await check(HealthCheckRequest(service="liveness"))).status == SERVING
        for name in READY_NAMES:
            assert (await check(HealthCheckRequest(service=name))).status == expected


async def test_an_unknown_name_is_not_found(health: tuple[Health, grpc.aio.Channel]) -> None:
    check = health[1].unary_unary("/grpc.health.v1.Health/Check", **CODING)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await check(HealthCheckRequest(service="nobody"))
    assert error.value.code() is grpc.StatusCode.NOT_FOUND


async def test_watch_tells_changes_only(health: tuple[Health, grpc.aio.Channel]) -> None:
    served, channel = health
    watch = channel.unary_stream("/grpc.health.v1.Health/Watch", **CODING)
    call = watch(HealthCheckRequest(service="readiness"))
    assert (await call.read()).status == NOT_SERVING
    served.set_ready(False)
    served.set_ready(True)
    assert (await call.read()).status == SERVING
    unknown = watch(HealthCheckRequest(service="nobody"))
    assert (await unknown.read()).status == SERVICE_UNKNOWN
    call.cancel()
    unknown.cancel()
