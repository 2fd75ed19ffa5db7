"""The picker behind a real Envoy, in front of fake engines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.envoy import self_signed
from support.epp_io import FakeEngine, Plane, data_plane, engines, equal, running_picker, so, until
from support.http import client
from treeline_epp.extproc.convert import Reader
from treeline_epp.extproc.state import Message
from treeline_epp.xds.eds import CLUSTER, TYPE_URL, EdsState
from treeline_wire import envoy_pb2 as pb
from treeline_wire import headers as names

pytestmark = [pytest.mark.integration, pytest.mark.deep]


async def enough(plane: Plane, count: int, **request: Any) -> list[httpx.Response]:
    """Send `count` completions, one after another."""
    return [await plane.complete(f"prompt {i}", **request) for i in range(count)]


def log_metadata(bootstrap: dict[str, Any]) -> None:
    """Add the dynamic metadata that the picker set to the access log."""
    listener = bootstrap["static_resources"]["listeners"][0]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    line = manager["access_log"][0]["typed_config"]["log_format"]["json_format"]
    line["metadata"] = f"%DYNAMIC_METADATA({names.LB}:{names.DESTINATION})%"
    line["served"] = f"%DYNAMIC_METADATA({names.LB}:{names.SERVED})%"


async def test_a_request_goes_to_the_endpoint_of_header_and_metadata(tmp_path: Path) -> None:
    async with (
        engines() as fakes,
        data_plane(tmp_path, fakes, add_endpoint_header=True, patch=log_metadata) as plane,
    ):
        answers = await enough(plane, 4)
        assert [a.status_code for a in answers] == [200] * 4
        address = {fake.name: fake.address for fake in fakes}
        for answer in answers:
            echo = answer.json()
            chosen = echo["headers"][names.DESTINATION].split(",")
            assert chosen[0] == address[echo["engine"]] == answer.headers[names.ENDPOINT]
            assert sorted(chosen) == sorted(address.values())
        lines = await until(lambda: len(plane.envoy.access()) == 4 and plane.envoy.access(), "four log lines")
        for line in lines:
            assert line["metadata"] == line["picked"]
            assert line["served"] == line["endpoint"]
        metrics = await plane.picker.metrics()
        assert metrics['treeline_epp_outcomes_total{outcome="headers"}'] == 4
        assert not [name for name in metrics if name.startswith("treeline_epp_served_by_other_total")]


@pytest.mark.parametrize("mode", ["BUFFERED", "FULL_DUPLEX_STREAMED"])
async def test_our_messages_have_every_field_that_envoy_sends(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[bytes] = []
    read, on_request = Reader.read, EdsState.on_request
    nodes: set[tuple[str, ...]] = set()

    def hear(self: Reader, data: bytes) -> Message:
        heard.append(data)
        return read(self, data)

    def subscribe(self: EdsState, stream: int, request: pb.DiscoveryRequest) -> None:
        nodes.add((request.node.id, request.type_url, *request.resource_names))
        on_request(self, stream, request)

    monkeypatch.setattr(Reader, "read", hear)
    monkeypatch.setattr(EdsState, "on_request", subscribe)
    settings = {"request_body_mode": mode, "response_body_mode": mode, "fail_open": False}
    async with engines() as fakes, data_plane(tmp_path, fakes, **settings) as plane:
        assert await plane.status() == 200
        wanted = plane.envoy.bootstrap["node"]["id"]
    kinds = set()
    for data in heard:
        message = pb.ProcessingRequest.FromString(data)
        kinds.add(message.WhichOneof("request"))
        message.DiscardUnknownFields()
        assert message.ByteSize() == len(data)
    assert kinds == {"request_headers", "request_body", "response_headers", "response_body"}
    assert (wanted, TYPE_URL, CLUSTER) in nodes


async def test_the_access_log_has_tokens_that_clients_do_not_see(tmp_path: Path) -> None:
    async with engines(1) as fakes, data_plane(tmp_path, fakes) as plane:
        fakes[0].reply_headers |= {names.PROMPT_TOKENS: "300", names.CACHED_TOKENS: "16"}
        answer = await plane.complete("hello")
        fakes[0].reply_headers = {}
        silent = await plane.complete("hello")
        assert not {names.PROMPT_TOKENS, names.CACHED_TOKENS} & set(answer.headers)
        lines = await until(lambda: len(plane.envoy.access()) == 2 and plane.envoy.access(), "two log lines")
        assert [(line["prompt_tokens"], line["cached_tokens"]) for line in lines] == [(300, 16), (None, None)]
        assert silent.status_code == 200


@pytest.mark.parametrize("mode", ["NONE", "STREAMED", "BUFFERED", "FULL_DUPLEX_STREAMED"])
async def test_every_body_mode_delivers_the_body_and_the_answer_unchanged(tmp_path: Path, mode: str) -> None:
    settings = {"request_body_mode": mode, "response_body_mode": mode, "fail_open": False}
    async with engines() as fakes, data_plane(tmp_path, fakes, **settings) as plane:
        for fake in fakes:
            fake.reply_body = bytes(range(256)) * 800
        for size in (1, 200_000, 1_500_000):
            prompt = "x" * size
            answer = await plane.complete(prompt)
            assert answer.status_code == 200, answer.text
            assert answer.content == fakes[0].reply_body
            (seen,) = [s for fake in fakes for s in fake.served]
            assert json.loads(seen.body) == {"model": "tiny", "prompt": prompt}
            assert seen.headers[names.DESTINATION]
            for fake in fakes:
                fake.seen.clear()
        answer = await plane.http.get("/health")
        assert answer.status_code == 200


async def test_forbidden_headers_of_clients_never_arrive(tmp_path: Path) -> None:
    async with engines() as fakes, data_plane(tmp_path, fakes) as plane:
        spoofed = {
            names.DESTINATION: "127.0.0.1:1",
            names.SUBSET: "127.0.0.1:1",
            names.DESTINATION.title(): "127.0.0.1:2",
            "x-gateway-destination-endpoint-fallback": "127.0.0.1:1",
            "test-epp-endpoint-selection": "127.0.0.1",
            "x-envoy-max-retries": "0",
            "x-treeline-client": "admin",
        }
        answer = await plane.complete(headers=spoofed)
        assert answer.status_code == 200
        seen = answer.json()["headers"]
        assert "127.0.0.1:1" not in seen[names.DESTINATION].split(",")
        assert [n for n in seen if n in spoofed and n != names.DESTINATION] == []
        await plane.picker.stop()
        answer = await plane.complete(headers=spoofed)
        assert answer.status_code == 200
        assert names.DESTINATION not in answer.json()["headers"]


async def test_without_a_picker_requests_are_spread_over_the_known_endpoints(tmp_path: Path) -> None:
    async with engines() as fakes, data_plane(tmp_path, fakes) as plane:
        await enough(plane, 2)
        await plane.picker.stop()
        answers = await enough(plane, 10)
        assert [a.status_code for a in answers] == [200] * 10
        assert {a.json()["engine"] for a in answers} == {"e0", "e1"}


async def test_without_a_picker_a_name_unknown_to_one_endpoint_is_tried_at_another(
    tmp_path: Path,
) -> None:
    async with engines() as fakes, data_plane(tmp_path, fakes) as plane:
        picked = await plane.complete(headers={names.EDGE: "mine", names.ELSEWHERE: "true"})
        echo = picked.json()["headers"]
        assert (echo[names.EDGE], names.ELSEWHERE in echo) == ("true", False), "the edge's word, not the client's"
        await plane.picker.stop()
        first, second = fakes
        refuse_name(first)
        answers = await enough(plane, 4)
        assert [(a.status_code, a.json()["engine"]) for a in answers] == [(200, "e1")] * 4
        assert first.served, "it was asked first at least once"
        assert all(names.DESTINATION not in seen.headers for seen in second.served[-4:])
        assert all(seen.headers[names.EDGE] == "true" for seen in second.served[-4:])
        refuse_name(second)
        answer = await plane.complete()
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["code"] == "picker_unavailable"


def refuse_name(engine: FakeEngine) -> None:
    """Let an engine answer as our runtime does to an unknown model name that no picker has checked."""
    engine.reply_status = 503
    engine.reply_headers = {names.ELSEWHERE: "true", "Retry-After": "1"}
    engine.reply_body = b'{"error": {"code": "picker_unavailable"}}'


async def test_a_stopped_picker_interrupts_no_running_answer(tmp_path: Path) -> None:
    async with engines(1) as fakes, data_plane(tmp_path, fakes, fail_open=False) as plane:
        fakes[0].hold_body = asyncio.Event()
        async with client(base_url=plane.envoy.url, timeout=60) as user:
            question = {"model": "tiny", "messages": [{"role": "user", "content": "long"}]}
            async with user.stream("POST", "/v1/chat/completions", json=question) as answer:
                assert answer.status_code == 200
                await until(
                    lambda: equal(plane.picker.metric("treeline_epp_extproc_streams"), 0),
                    "the picker to have said all it had to say",
                )
                await plane.picker.stop()
                fakes[0].hold_body.set()
                assert b"/v1/chat/completions" in await answer.aread()


async def test_a_returning_picker_is_asked_again(tmp_path: Path) -> None:
    async with engines() as fakes, data_plane(tmp_path, fakes) as plane:
        old = plane.picker.options
        await plane.picker.stop()
        assert (await plane.complete()).status_code == 200
        flags = [f"--grpc-port={old.grpc_port}", f"--grpc-health-port={old.grpc_health_port}"]
        words = [word for flag in flags for word in flag.split("=")]
        endpoints = [word for fake in fakes for word in ("--endpoint", f"{fake.name}={fake.address}")]
        async with running_picker(*words, *endpoints):
            loop = asyncio.get_running_loop()
            ready_at = loop.time()
            while names.DESTINATION not in (await plane.complete()).json()["headers"]:
                assert loop.time() < ready_at + 30
            assert set(await plane.envoy.hosts()) == {fake.address for fake in fakes}


async def test_a_dead_first_entry_is_retried_on_the_second(tmp_path: Path) -> None:
    async with engines() as fakes, data_plane(tmp_path, fakes, "--policy", "round_robin") as plane:
        await enough(plane, 2)
        dead, alive = fakes
        await dead.stop()
        answers = await asyncio.gather(*(plane.complete() for _ in range(6)))
        assert [a.status_code for a in answers] == [200] * 6
        assert {a.json()["engine"] for a in answers} == {alive.name}
        metrics = await plane.picker.metrics()
        assert metrics['treeline_epp_served_by_other_total{by="fallback"}'] >= 1
        # That was a hint; the picker has asked, and does not name the dead one any more.
        await until(
            lambda: equal(plane.picker.metric('treeline_epp_endpoints{state="down"}'), 1),
            "the picker knows that one is down",
        )
        answer = await plane.complete()
        assert answer.json()["headers"][names.DESTINATION] == alive.address


async def test_overload_is_retried_on_the_next_entry_and_returned_if_all_are_full(tmp_path: Path) -> None:
    async with engines() as fakes, data_plane(tmp_path, fakes, "--policy", "round_robin") as plane:
        full = fakes[0]
        full.reply_status, full.reply_headers = 503, {names.OVERLOADED: "1", "Retry-After": "2"}
        answers = await enough(plane, 4)
        assert [a.status_code for a in answers] == [200] * 4
        assert {a.json()["engine"] for a in answers} == {"e1"}
        fakes[1].reply_status, fakes[1].reply_headers = full.reply_status, full.reply_headers
        answer = await plane.complete()
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "2"


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\ncontent-le", b"\x00 something else\r\n\r\n"])
async def test_an_engine_that_ends_before_it_answers_is_503_in_openai_shape(tmp_path: Path, said: bytes) -> None:
    async with engines(1) as fakes, data_plane(tmp_path, fakes) as plane:
        assert (await plane.complete()).status_code == 200
        fakes[0].last_words = said
        answer = await plane.complete()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "endpoint_failed")
        assert len(fakes[0].served) == 2, "what may have been begun is not asked again"


@pytest.mark.parametrize("mode", ["BUFFERED", "FULL_DUPLEX_STREAMED"])
async def test_a_body_over_the_limit_is_413_in_openai_shape(tmp_path: Path, mode: str) -> None:
    flags = ("--max-body-bytes", "100000")
    settings = {"request_body_mode": mode, "fail_open": False, "body_limit": 100_000}
    async with engines() as fakes, data_plane(tmp_path, fakes, *flags, **settings) as plane:
        assert (await plane.complete("x" * 90_000)).status_code == 200

        async def chunks() -> Any:
            yield b'{"model": "tiny", "prompt": "'
            for _ in range(20):
                yield b"x" * 10_000
            yield b'"}'

        for answer in (
            await plane.complete("x" * 100_000),
            await plane.http.post("/v1/completions", content=chunks()),
        ):
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "request_too_large"
        assert len([s for fake in fakes for s in fake.served]) == 1


async def test_api_keys_are_required_if_configured(tmp_path: Path) -> None:
    keys = {"ada": "sk-ada", "bob": "sk-bob"}
    async with engines() as fakes, data_plane(tmp_path, fakes, api_keys=keys) as plane:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}):
            answer = await plane.complete(headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        for headers in ({"authorization": "Bearer sk-ada"}, {"x-api-key": "sk-bob"}):
            answer = await plane.complete(headers=headers)
            assert answer.status_code == 200, answer.text
            seen = answer.json()["headers"]
            assert "sk-" not in json.dumps(seen)
            assert seen["x-treeline-client"] in keys


async def test_models_are_the_union_and_an_unknown_one_is_404(tmp_path: Path) -> None:
    async with engines(2, models=("tiny", "tiny:lora")) as fakes:
        fakes[1].models = ("tiny", "other")
        async with data_plane(tmp_path, fakes) as plane:
            listed = (await plane.http.get("/v1/models")).json()
            assert listed["object"] == "list"
            assert sorted(m["id"] for m in listed["data"]) == ["other", "tiny", "tiny:lora"]
            one = await plane.http.get("/v1/models/other")
            assert (one.status_code, one.json()["id"]) == (200, "other")
            for answer in (await plane.complete(model="gpt-9"), await plane.http.get("/v1/models/gpt-9")):
                assert answer.status_code == 404
                error = answer.json()["error"]
                assert (error["code"], error["param"]) == ("model_not_found", "model")
            for _ in range(4):
                assert (await plane.complete(model="other")).json()["engine"] == "e1"
            bad = await plane.http.post("/v1/chat/completions", content=b"{")
            assert (bad.status_code, bad.json()["error"]["code"]) == (400, "invalid_json")
            assert (await plane.complete(model=7)).json()["error"]["param"] == "model"
            assert (await plane.http.get("/health")).status_code == 200


async def test_no_endpoint_is_503_with_a_reason(tmp_path: Path) -> None:
    async with (
        engines(1, ready=False) as fakes,
        data_plane(tmp_path, fakes, add_endpoint_header=True) as plane,
    ):
        answer = await plane.complete()
        assert answer.status_code == 503
        assert names.ENDPOINT not in answer.headers
        assert answer.json()["error"]["code"] == "no_endpoints"
        assert answer.headers["x-llm-d-request-dropped-reason"] == "rejected-no-endpoints"
        assert answer.headers["retry-after"] == "1"
        await plane.picker.stop()
        answer = await plane.complete()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_endpoints")
        fakes[0].ready = True


async def test_a_draining_engine_gets_no_new_requests_and_finishes_its_own(tmp_path: Path) -> None:
    async with engines() as fakes, data_plane(tmp_path, fakes, "--policy", "round_robin") as plane:
        hold = asyncio.Event()
        for fake in fakes:
            fake.hold = hold
        held = [asyncio.create_task(plane.complete(f"held {i}")) for i in range(2)]
        await until(lambda: all(fake.served for fake in fakes), "both engines have a request")
        leaving, staying = fakes
        leaving.ready = False
        staying.hold = None
        await until(
            lambda: so(plane.envoy.hosts(), lambda hosts: hosts.get(leaving.address) == "DRAINING"),
            "Envoy knows that one drains",
        )
        answers = await enough(plane, 4)
        assert {a.json()["engine"] for a in answers} == {staying.name}
        hold.set()
        assert [answer.status_code for answer in await asyncio.gather(*held)] == [200, 200]


async def test_endpoints_come_and_go_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "endpoints.yaml"

    def write(*listed: Any) -> None:
        new = tmp_path / "new.yaml"
        new.write_text(json.dumps({"endpoints": [{"name": f.name, "address": f.address} for f in listed]}))
        new.rename(file)

    async with engines() as fakes:
        write(fakes[0])
        async with data_plane(tmp_path, [], "--endpoints-file", str(file)) as plane:
            assert {a.json()["engine"] for a in await enough(plane, 3)} == {"e0"}

            async def known() -> set[str]:
                page = (await plane.picker.get("/debug/endpoints")).json()
                return {endpoint["name"] for endpoint in page["endpoints"]}

            async def serving() -> set[str]:
                return {answer.json()["engine"] for answer in await enough(plane, 8)}

            for listed, expected in (([*fakes], {"e0", "e1"}), ([fakes[1]], {"e1"})):
                write(*listed)

                async def follows(expected: set[str] = expected) -> bool:
                    return await known() == expected and await serving() == expected

                await until(follows, f"the picker follows the file to {expected}")
            file.write_text("endpoints: nonsense")
            assert {a.json()["engine"] for a in await enough(plane, 3)} == {"e1"}
            metrics = await plane.picker.metrics()
            assert "treeline_epp_served_by_other_total" not in str(metrics)


@pytest.mark.parametrize("expose", [False, True])
async def test_our_response_headers_reach_clients_only_if_configured(tmp_path: Path, expose: bool) -> None:
    report = {names.CACHED_TOKENS: "32", names.PROMPT_TOKENS: "48"}
    fleet = engines(1, reply_headers=report)
    async with fleet as fakes, data_plane(tmp_path, fakes, expose_cached_tokens=expose) as plane:
        answer = await plane.complete()
        assert (answer.headers.get(names.CACHED_TOKENS) == "32") == expose
        assert (names.PROMPT_TOKENS in answer.headers) == expose
        assert names.ENDPOINT not in answer.headers
        metrics = await plane.picker.metrics()
        assert metrics["treeline_epp_reported_hit_tokens_total"] == 32
        assert metrics["treeline_epp_reported_prompt_tokens_total"] == 48


async def test_a_client_that_leaves_closes_its_reservation(tmp_path: Path) -> None:
    async with engines(1) as fakes, data_plane(tmp_path, fakes) as plane:
        fakes[0].hold = asyncio.Event()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await plane.complete("x" * 4000)

        async def no_reservation() -> bool:
            page = (await plane.picker.get("/debug/endpoints")).json()
            return page["endpoints"][0]["reservations"] == 0

        await until(no_reservation, "no reservation is left")
        metrics = await plane.picker.metrics()
        assert metrics['treeline_epp_outcomes_total{outcome="cancelled"}'] == 1
        fakes[0].hold.set()


async def test_the_listener_speaks_tls(tmp_path: Path) -> None:
    tls = self_signed(tmp_path)
    async with engines(1) as fakes, data_plane(tmp_path, fakes, tls=tls) as plane:
        trust = ssl.create_default_context(cafile=tls.certificate_file)
        url = plane.envoy.url.replace("http://127.0.0.1", "https://localhost")
        async with httpx.AsyncClient(base_url=url, verify=trust, timeout=60) as http:
            answer = await http.post("/v1/completions", json={"model": "tiny", "prompt": "x"})
        assert answer.status_code == 200
        with pytest.raises(httpx.HTTPError):
            await plane.complete()


async def test_a_draining_envoy_finishes_its_requests_and_takes_no_new_ones(tmp_path: Path) -> None:
    async with engines(1) as fakes, data_plane(tmp_path, fakes) as plane:
        fakes[0].hold = asyncio.Event()
        held = asyncio.create_task(plane.complete())
        await until(lambda: fakes[0].served, "the request is at its engine")
        async with client() as admin:
            assert (await admin.post(f"{plane.envoy.admin}/drain_listeners?graceful")).status_code == 200

        async def closed() -> bool:
            try:
                async with client(base_url=plane.envoy.url, timeout=0.3) as fresh:
                    await fresh.get("/v1/models")
            except httpx.ConnectError:
                return True
            except httpx.HTTPError:
                return False
            return False

        await until(closed, "the listener is closed")
        fakes[0].hold.set()
        assert (await held).status_code == 200
