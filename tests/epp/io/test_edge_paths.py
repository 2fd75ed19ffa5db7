"""Clients reach inference paths through the edge and nothing else, however a path is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.epp_io import Plane, data_plane, engines, until
from support.raw_http import Answer, http1, http2
from treeline_wire.paths import INFERENCE

pytestmark = [pytest.mark.integration, pytest.mark.deep]

BODY = b'{"model": "tiny", "prompt": "x"}'
ADMINISTRATION = (
    "/flush_cache",
    "/abort_request",
    "/metrics",
    "/server_info",
    "/get_server_info",
    "/v1/loads",
    "/load",
    "/version",
    "/ping",
    "/get_load",
    "/update_weights_from_disk",
    "/update_weights_from_tensor",
    "/init_weights_update_group",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/sleep",
    "/wake_up",
    "/pause",
    "/resume",
    "/start_profile",
    "/stop_profile",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/load_lora_adapter",
    "/reset_prefix_cache",
    "/collective_rpc",
    "/invocations",
    "/set_internal_state",
    "/configure_logging",
    "/health_generate",
    "/treeline/tokenizer",
    "/debug/radix",
    "/docs",
    "/openapi.json",
    "/ready",
    "/live",
    "/",
)
TRICKS = (
    "//flush_cache",
    "///flush_cache",
    "/./flush_cache",
    "/v1/../flush_cache",
    "/v1/models/../../flush_cache",
    "/v1/models/..%2f..%2fflush_cache",
    "/v1/models/..%2F..%2Fflush_cache",
    "/v1/models/%2e%2e/%2e%2e/flush_cache",
    "/v1/models/%2E%2E%2F%2E%2E%2Fflush_cache",
    "/v1/models/..%5c..%5cflush_cache",
    "/v1/models/..\\..\\flush_cache",
    "/v1/models/%252e%252e%252f%252e%252e%252fflush_cache",
    "/v1/models/..;/..;/flush_cache",
    "/v1/models/x;/../../flush_cache",
    "/v1/models/x%00",
    "/v1/models/x%0d%0ay",
    "/v1/models/",
    "/flush_cache/",
    "/flush_cache?x=/v1/models",
    "/flush_cache;/v1/models",
    "/FLUSH_CACHE",
    "/flush%5fcache",
    "/%66lush_cache",
    "/v1/chat/completions/",
    "/v1/chat/completions;x=1",
    "/V1/Chat/Completions",
    "/v1/chat%2fcompletions/../../flush_cache",
    "/v1/chat/completions/../../../flush_cache",
    "/v1/chat/completions%20",
    "/v1/chat/completions%00",
    "/v1/chat/completions/x",
)
TARGETS = (
    "http://edge/flush_cache",
    "http://edge//flush_cache",
    "HTTP://edge/v1/../flush_cache",
    "http:/flush_cache",
    "/v1/models#/../flush_cache",
    "flush_cache",
    "*",
    "http://edge",
    "edge:80",
)
REFUSED = (400, 404)


def request(target: str, *, method: str = "POST", version: str = "1.1", extra: str = "") -> bytes:
    body = BODY if method == "POST" else b""
    head = f"{method} {target} HTTP/{version}\r\nhost: edge\r\n{extra}content-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def in_openai_shape(answer: Answer) -> bool:
    error = json.loads(answer.body)["error"]
    return {"message", "type", "param", "code"} == error.keys() and "json" in answer.headers["content-type"]


async def untouched(plane: Plane, asked: float) -> None:
    """Check that neither the picker nor an engine got a request since the count `asked`."""
    assert (await plane.picker.metrics())["treeline_epp_pick_seconds_count"] == asked
    assert [seen.path for fake in plane.engines for seen in fake.served] == []


async def picks(plane: Plane) -> float:
    return (await plane.picker.metrics())["treeline_epp_pick_seconds_count"]


async def test_administration_is_404_in_openai_shape_at_the_edge(
    tmp_path: Path,
) -> None:
    every = tuple(INFERENCE)
    async with engines(1) as fakes, data_plane(tmp_path, fakes, engines=every) as plane:
        port, asked = plane.envoy.config.listen_port, await picks(plane)
        for path in ADMINISTRATION:
            for method in ("GET", "POST", "PUT", "DELETE"):
                answer = await http1(port, request(path, method=method), method=method.encode())
                assert (answer.status, in_openai_shape(answer)) == (404, True), (method, path)
                assert json.loads(answer.body)["error"]["code"] == "not_found"
        await untouched(plane, asked)


@pytest.mark.parametrize("version", ["1.1", "2"])
async def test_no_spelling_of_a_path_escapes_the_list(tmp_path: Path, version: str) -> None:
    every = tuple(INFERENCE)
    async with engines(1) as fakes, data_plane(tmp_path, fakes, engines=every) as plane:
        port, asked = plane.envoy.config.listen_port, await picks(plane)
        for path in (*TRICKS, *ADMINISTRATION):
            for method in ("GET", "POST"):
                if version == "2":
                    pseudo = [
                        (":method", method),
                        (":scheme", "http"),
                        (":authority", "edge"),
                        (":path", path),
                    ]
                    answer = await http2(port, pseudo, BODY if method == "POST" else None)
                    assert answer.status in (0, *REFUSED), (method, path, answer)
                else:
                    answer = await http1(port, request(path, method=method), method=method.encode())
                    assert answer.status in REFUSED, (method, path, answer)
                    assert in_openai_shape(answer), (method, path, answer)
        await untouched(plane, asked)


async def test_no_form_of_a_request_target_escapes_the_list(tmp_path: Path) -> None:
    async with engines(1) as fakes, data_plane(tmp_path, fakes) as plane:
        port, asked = plane.envoy.config.listen_port, await picks(plane)
        for target in TARGETS:
            for version in ("1.1", "1.0", "0.9"):
                answer = await http1(port, request(target, version=version))
                assert 400 <= answer.status < 500, (target, version, answer)
                assert in_openai_shape(answer), (target, version, answer)
        await untouched(plane, asked)


async def test_connect_and_upgrades_are_refused(tmp_path: Path) -> None:
    websocket = "connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
    other = "connection: upgrade\r\nupgrade: tcp\r\n"
    requests = [("CONNECT", "engine:8000", ""), ("CONNECT", "/v1/models", "")]
    requests += [("GET", "/v1/models", websocket), ("POST", "/v1/completions", other)]
    async with engines(1) as fakes, data_plane(tmp_path, fakes) as plane:
        port, asked = plane.envoy.config.listen_port, await picks(plane)
        for method, target, extra in requests:
            answer = await http1(port, request(target, method=method, extra=extra))
            assert answer.status in (400, 403, 404), answer
            assert in_openai_shape(answer), answer
        await untouched(plane, asked)
        # Some clients offer HTTP/2 with every request; that offer is not taken, and the request is served.
        offer = "connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
        answer = await http1(port, request("/v1/completions", extra=offer))
        assert answer.status == 200
        assert not {"upgrade", "http2-settings"} & json.loads(answer.body)["headers"].keys()


async def test_extended_connect_over_http2_is_refused(tmp_path: Path) -> None:
    async with engines(1) as fakes, data_plane(tmp_path, fakes) as plane:
        port, asked = plane.envoy.config.listen_port, await picks(plane)
        pseudo = [(":method", "CONNECT"), (":protocol", "websocket"), (":scheme", "http")]
        answer = await http2(port, [*pseudo, (":authority", "edge"), (":path", "/v1/models")])
        assert answer.status in (0, 400, 403, 404)
        answer = await http2(port, [(":method", "CONNECT"), (":authority", "engine:8000")])
        assert answer.status in (0, 400, 403, 404)
        await untouched(plane, asked)


@pytest.mark.parametrize("engine", sorted(INFERENCE))
async def test_every_inference_path_reaches_its_engine_with_its_own_methods_only(tmp_path: Path, engine: str) -> None:
    async with engines(1) as fakes, data_plane(tmp_path, fakes, engines=(engine,)) as plane:
        for rule in INFERENCE[engine]:
            path = f"{rule.path}/tiny" if rule.below else rule.path
            for method in ("GET", "POST", "PUT", "DELETE", "PATCH"):
                answer = await plane.http.request(method, path, content=BODY if method == "POST" else None)
                assert (answer.status_code == 200) == (method in rule.methods), (method, path, answer.text)


async def test_a_query_is_passed_on_and_ignored_by_the_list(tmp_path: Path) -> None:
    async with engines(1) as fakes, data_plane(tmp_path, fakes) as plane:
        answer = await plane.http.post("/v1/completions?x=/flush_cache", content=BODY)
        assert (answer.status_code, answer.json()["path"]) == (200, "/v1/completions?x=/flush_cache")


async def test_an_engine_sees_the_path_that_was_allowed(tmp_path: Path) -> None:
    async with engines(1) as fakes, data_plane(tmp_path, fakes) as plane:
        for written in (
            "//v1//completions",
            "/v1/./completions",
            "/x/../v1/completions",
            "/v1%2Fcompletions",
        ):
            answer = await http1(plane.envoy.config.listen_port, request(written))
            assert answer.status == 200, (written, answer)
            assert json.loads(answer.body)["path"] == "/v1/completions"


async def test_a_refused_path_is_answered_before_its_body_has_come(tmp_path: Path) -> None:
    async with engines(1) as fakes, data_plane(tmp_path, fakes) as plane:
        head = b"POST /flush_cache HTTP/1.1\r\nhost: edge\r\ncontent-length: 30000000\r\n\r\n{"
        answer = await http1(plane.envoy.config.listen_port, head, timeout_s=60)
        assert answer.status == 404


async def test_without_a_picker_the_list_holds(tmp_path: Path) -> None:
    async with engines(1) as fakes, data_plane(tmp_path, fakes) as plane:
        await plane.picker.stop()
        assert (await plane.complete()).status_code == 200
        for path in ("/flush_cache", "/v1/models/..%2f..%2fflush_cache", "/metrics"):
            answer = await http1(plane.envoy.config.listen_port, request(path))
            assert (answer.status, in_openai_shape(answer)) == (404, True)
        assert [seen.path for seen in fakes[0].served] == ["/v1/completions"]


async def test_a_refused_path_appears_in_the_access_log(tmp_path: Path) -> None:
    async with engines(1) as fakes, data_plane(tmp_path, fakes) as plane:
        await http1(plane.envoy.config.listen_port, request("/flush_cache"))
        await plane.complete()
        lines: list[dict[str, Any]] = []

        async def logged() -> bool:
            lines[:] = plane.envoy.access()
            return len(lines) == 2

        await until(logged, "both requests are in the access log")
        assert [(line["path"], line["status"]) for line in lines] == [
            ("/flush_cache", 404),
            ("/v1/completions", 200),
        ]
