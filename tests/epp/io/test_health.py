"""The gRPC health service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from treeline_epp.health import READY_NAMES, Health

NOT_SERVING, SERVING = HealthCheckResponse.NOT_SERVING, HealthCheckResponse.SERVING
CODING = {
    "request_serializer": HealthCheckRequest.SerializeToString,
    "response_deserializer": HealthCheckResponse.FromString,
}


@pytest.fixture
async def health() -> AsyncIterator[tuple[Health, grpc.aio.Channel]]:
    served = await Health.starting()
    server = grpc.aio.server()
    served.add_to(server)
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
        await served.set_ready(ready)
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
    await served.set_ready(False)
    await served.set_ready(True)
    assert (await call.read()).status == SERVING
    unknown = watch(HealthCheckRequest(service="nobody"))
    assert (await unknown.read()).status == HealthCheckResponse.SERVICE_UNKNOWN
    call.cancel()
    unknown.cancel()


async def test_a_watcher_that_does_not_read_delays_no_other(
    health: tuple[Health, grpc.aio.Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    served, channel = health
    monkeypatch.setattr("treeline_epp.health._TELL_S", 0.1)
    condition = served._servicer._server_watchers["readiness"]
    async with condition:  # as a watcher has it while its answer cannot be sent
        await asyncio.wait_for(served.set_ready(True), 60)
        check = channel.unary_unary("/grpc.health.v1.Health/Check", **CODING)
        assert (await check(HealthCheckRequest(service=""))).status == SERVING
