"""Headers that policies look at and tell, through ext_proc: messages as both readers read them."""

from __future__ import annotations

from pathlib import Path

import pytest
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from support.epp_io import Plane, data_plane, engines, until
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.extproc import wire_reader
from treeline_epp.extproc.session import ExtProcSession, SessionLimits
from treeline_epp.metrics import Metrics
from treeline_epp.picking.picker import Picker, PickerConfig
from treeline_epp.requests.model_registry import ModelRegistry
from treeline_epp.requests.router import Router
from treeline_wire import headers as names

A, B = "10.0.0.1:8000", "10.0.0.2:8000"


@pytest.fixture(autouse=True)
def only_here(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_USED", "_NOT_REMEMBERED"):
        monkeypatch.setattr(wire_reader, name, getattr(wire_reader, name).copy())
    monkeypatch.setattr(wire_reader, "_known_entries", {})


class World:
    def __init__(self, policy: str) -> None:
        self.picker = Picker(PickerConfig(policy, fallbacks=1))
        for name, address in (("a", A), ("b", B)):
            self.picker.add_endpoint(EndpointSpec(name, address))
        wire_reader.use_headers(self.picker.policies.headers)
        self.router = Router(self.picker, ModelRegistry(), Metrics())

    def ask(self, **headers: str) -> tuple[ExtProcSession, str]:
        """A stream and its destination."""
        session = ExtProcSession(self.router, SessionLimits(1000, strip_response_headers=True))
        request = pb.ProcessingRequest()
        request.protocol_config.response_body_mode = processing_mode_pb2.ProcessingMode.NONE
        all_headers = {":path": "/", ":method": "GET", **{k.replace("_", "-"): v for k, v in headers.items()}}
        for key, value in all_headers.items():
            request.request_headers.headers.headers.add(key=key, raw_value=value.encode())
        request.request_headers.end_of_stream = True
        (data,) = session.steps(request.SerializeToString())
        reply = pb.ProcessingResponse.FromString(data or b"")
        return session, str(reply.dynamic_metadata[names.LB][names.DESTINATION])


def respond(session: ExtProcSession, status: str = "200", served: str | None = None) -> dict[str, tuple[str, bool]]:
    request = pb.ProcessingRequest(response_headers=pb.HttpHeaders())
    request.response_headers.headers.headers.add(key=":status", raw_value=status.encode())
    if served is not None:
        request.metadata_context.filter_metadata[names.LB].fields[names.SERVED].string_value = served
    (data,) = session.steps(request.SerializeToString())
    mutation = pb.ProcessingResponse.FromString(data or b"").response_headers.response.header_mutation
    assert set(mutation.remove_headers) == {names.CACHED_TOKENS, names.PROMPT_TOKENS}
    return {o.header.key: (o.header.raw_value.decode(), o.append.value) for o in mutation.set_headers}


def test_a_cookie_is_set_beside_the_endpoints_own_and_brings_the_client_back() -> None:
    world = World("session_affinity")
    session, destination = world.ask()
    ((name, (cookie, appended)),) = respond(session).items()
    assert (name, appended) == ("set-cookie", True)
    for _ in range(8):
        session, again = world.ask(cookie=f"theme=dark; {cookie.partition(';')[0]}")
        assert again.split(",")[0] == destination.split(",")[0]
        assert respond(session) == {}


def test_a_token_in_a_header_is_written_over_and_only_where_its_endpoint_has_answered() -> None:
    world = World("session_affinity:carrier=header")
    session, destination = world.ask()
    first, second = destination.split(",")
    ((name, (token, appended)),) = respond(session, served=first).items()
    assert (name, len(token), appended) == ("x-session-token", 13, False)
    assert respond(world.ask()[0], served="10.0.0.9:1") == {}
    assert respond(world.ask()[0], status="503") == {}
    world.picker.set_ready("a" if first == A else "b", False)
    session, moved = world.ask(x_session_token=token)
    assert moved == second
    assert respond(session)["x-session-token"][0] != token


@pytest.mark.parametrize("policy", ["consistent_hashing:header=x-user", "manual:header=x-user"])
def test_headers_of_any_name_reach_policies(policy: str) -> None:
    world = World(policy)
    found = set()
    for _ in range(20):
        session, destination = world.ask(x_user="a")
        found.add(destination.split(",")[0])
        session.close()
    assert len(found) == 1
    assert policy.startswith("consistent") or found == {A}


@pytest.mark.integration
async def test_through_envoy_a_session_comes_back_and_outlives_its_engine(tmp_path: Path) -> None:
    async with (
        engines(3, reply_headers={"set-cookie": "theme=dark"}) as fakes,
        data_plane(tmp_path, fakes, "--policy", "session_affinity") as plane,
    ):
        first = await plane.complete("hello")
        assert {cookie.name for cookie in plane.http.cookies.jar} == {"theme", "llm-d-session"}
        again = [await plane.complete(f"prompt {number}") for number in range(6)]
        assert {one.json()["engine"] for one in again} == {first.json()["engine"]}
        assert all(one.headers.get_list("set-cookie") == ["theme=dark"] for one in again), "it has its token"
        token = plane.http.cookies["llm-d-session"]
        next(fake for fake in fakes if fake.name == first.json()["engine"]).ready = False
        await until(lambda: has_moved(plane, token), "another engine has the session")
        engine = (await plane.complete("later")).json()["engine"]
        assert engine != first.json()["engine"]
        assert {(await plane.complete(f"later {number}")).json()["engine"] for number in range(4)} == {engine}


async def has_moved(plane: Plane, token: str) -> bool:
    await plane.complete("where to?")
    return plane.http.cookies["llm-d-session"] != token
