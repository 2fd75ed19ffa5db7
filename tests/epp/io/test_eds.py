"""EDS: the updates that Envoys get, their times, and the meaning of acknowledgements."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.epp_io import until
from treeline_epp.xds.eds import CLUSTER, TYPE_URL, Eds, EdsState
from treeline_wire import envoy_pb2 as pb

A, B = "10.0.0.1:8000", "[::1]:8001"


def subscribe(**fields: Any) -> pb.DiscoveryRequest:
    return pb.DiscoveryRequest(resource_names=[CLUSTER], type_url=TYPE_URL, **fields)


def ack(response: pb.DiscoveryResponse) -> pb.DiscoveryRequest:
    return subscribe(version_info=response.version_info, response_nonce=response.nonce)


def nack(response: pb.DiscoveryResponse) -> pb.DiscoveryRequest:
    request = subscribe(response_nonce=response.nonce)
    request.error_detail.message = "no"
    return request


def listed(response: pb.DiscoveryResponse) -> dict[str, str]:
    """Return the health status of each address in an answer."""
    (resource,) = response.resources
    assert resource.type_url == TYPE_URL
    assignment = pb.ClusterLoadAssignment.FromString(resource.value)
    assert assignment.cluster_name == CLUSTER
    out = {}
    for entry in assignment.endpoints[0].lb_endpoints:
        address = entry.endpoint.address.socket_address
        out[f"{address.address}:{address.port_value}"] = (
            entry.DESCRIPTOR.fields_by_name["health_status"].enum_type.values_by_number[entry.health_status].name
        )
    return out


def connected(state: EdsState) -> int:
    stream = state.connect()
    state.on_request(stream, subscribe(version_info="7"))  # what it still has from another picker's life
    return stream


def due(state: EdsState, stream: int) -> pb.DiscoveryResponse:
    response = state.due(stream)
    assert response is not None
    return response


def test_no_envoy_is_answered_before_discovery_has_synced() -> None:
    state = EdsState()
    stream = connected(state)
    state.announce({A: False}, 0.0)
    assert state.due(stream) is None
    state.synced = True
    assert listed(due(state, stream)) == {A: "HEALTHY"}
    assert state.due(stream) is None


def test_an_empty_list_is_an_answer_too() -> None:
    state = EdsState()
    state.synced = True
    stream = connected(state)
    assert listed(due(state, stream)) == {}
    assert state.due(stream) is None


def test_an_endpoint_is_selectable_when_every_envoy_has_acknowledged_it() -> None:
    state = EdsState()
    state.synced = True
    one, two = connected(state), connected(state)
    state.connect()  # has not subscribed, so it is not waited for
    state.announce({A: False, B: True}, 10.0)
    first, second = due(state, one), due(state, two)
    assert listed(first) == {A: "HEALTHY", "::1:8001": "DRAINING"}
    state.on_request(one, ack(first))
    assert not state.selectable(A, 10.5)
    assert (state.pending(), state.connected()) == (1, 2)
    state.on_request(two, ack(second))
    assert state.selectable(A, 10.5)
    assert not state.selectable(B, 99.0)
    assert not state.selectable("10.0.0.9:8000", 99.0)
    assert state.pending() == 0


def test_a_silent_or_refusing_envoy_is_awaited_for_only_a_second() -> None:
    state = EdsState()
    state.synced = True
    stream = connected(state)
    state.announce({A: False}, 10.0)
    state.on_request(stream, nack(due(state, stream)))
    assert state.rejections == 1
    assert not state.selectable(A, 10.9)
    assert state.selectable(A, 11.0)


def test_without_an_envoy_endpoints_are_selectable_at_once_and_a_lost_envoy_is_forgotten() -> None:
    state = EdsState()
    stream = connected(state)
    state.announce({A: False}, 10.0)
    assert not state.selectable(A, 10.0)
    state.disconnect(stream)
    assert state.selectable(A, 10.0)


def test_a_later_envoy_does_not_make_endpoints_unselectable() -> None:
    state = EdsState()
    state.announce({A: False}, 10.0)
    assert state.selectable(A, 10.0)
    connected(state)
    assert state.selectable(A, 10.0)
    state.announce({A: False, B: False}, 10.0)
    assert state.selectable(A, 10.0)
    assert not state.selectable(B, 10.0)


def test_a_returning_endpoint_must_be_acknowledged_again() -> None:
    state = EdsState()
    state.synced = True
    stream = connected(state)
    state.announce({A: False}, 10.0)
    response = due(state, stream)
    state.on_request(stream, ack(response))
    assert state.announce({A: True}, 20.0)
    assert not state.announce({A: True}, 21.0)
    assert state.announce({A: False}, 30.0)
    assert not state.selectable(A, 30.0)
    state.on_request(stream, ack(response))  # late, of an old list
    assert not state.selectable(A, 30.0)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=30))
def test_no_order_of_messages_makes_an_unannounced_endpoint_selectable(steps: list[tuple[int, int]]) -> None:
    state = EdsState()
    streams: dict[int, int] = {}
    last: dict[int, pb.DiscoveryResponse] = {}
    for now, (step, which) in enumerate(steps):
        match step:
            case 0:
                state.announce({A: False} if which % 2 else {}, float(now))
            case 1:
                state.synced = True
            case 2:
                streams.setdefault(which, state.connect())
            case 3 if which in streams:
                state.disconnect(streams.pop(which))
                last.pop(which, None)
            case 4 if which in streams:
                state.on_request(streams[which], ack(last[which]) if which in last else subscribe())
            case 5 if which in streams and (response := state.due(streams[which])) is not None:
                last[which] = response
        assert not state.selectable(B, float(now) + 100)
        assert 0 <= state.pending() <= state.connected() <= len(streams)


@pytest.fixture
async def eds() -> AsyncIterator[tuple[Eds, grpc.aio.Channel]]:
    served = Eds()
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((served.handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield served, channel
    await server.stop(None)


async def test_over_grpc_a_change_is_pushed_and_its_acknowledgement_counts(
    eds: tuple[Eds, grpc.aio.Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treeline_epp.xds.eds.ACK_PATIENCE_S", 3600)  # it is the acknowledgement that counts
    served, channel = eds
    acked = 0

    def count() -> None:
        nonlocal acked
        acked += 1

    served.on_ack = count
    call = channel.stream_stream(
        "/envoy.service.endpoint.v3.EndpointDiscoveryService/StreamEndpoints",
        request_serializer=pb.DiscoveryRequest.SerializeToString,
        response_deserializer=pb.DiscoveryResponse.FromString,
    )()
    await call.write(subscribe())
    await until(lambda: served.state.connected() == 1, "the stream is subscribed")
    served.announce({A: False})
    served.set_synced()
    response = await call.read()
    assert listed(response) == {A: "HEALTHY"}
    assert not served.selectable(A)
    await call.write(ack(response))
    await until(lambda: served.selectable(A), "it is acknowledged")
    served.announce({A: False, "10.0.0.2:8000": False})
    assert len(listed(await call.read())) == 2
    assert acked >= 2
    call.cancel()
    await until(lambda: served.state.connected() == 0, "the stream is gone")
