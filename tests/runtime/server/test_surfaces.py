"""Three listeners, each with its own routes: which clients reach them, and until when (fake scheduler)."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.runtime_server import ServerProcess, eventually, running
from treeline_runtime.server.surfaces import ADMIN_PATHS

pytestmark = pytest.mark.deep

ASKED = ("/debug/radix", "/is_sleeping")
ADMINISTRATION = [("GET" if path in ASKED else "POST", path) for path in ADMIN_PATHS]
KEY = "correct-horse"
BEARER = {"authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def keyed(model: Path) -> Iterator[ServerProcess]:
    """A server whose administration is open to the network, with a key."""
    with running(
        model,
        "--no-events",
        "--admin-host=0.0.0.0",
        fake=True,
        environment={"TREELINE_ADMIN_KEY": KEY, "TREELINE_API_KEY": "api-key"},
    ) as server:
        yield server


def ask(url: str, method: str, path: str, headers: dict[str, str] | None = None) -> httpx.Response:
    body = {"json": {"rid": "nobody"}} if path == "/abort_request" else {}
    return httpx.request(method, url + path, headers=headers, timeout=30, **body)  # type: ignore[arg-type]


def message(answer: httpx.Response) -> str:
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}, "OpenAI's shape"
    return str(answer.json()["error"]["message"])


# ---- which path is where ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE"])
@pytest.mark.parametrize("path", ADMIN_PATHS)
def test_administration_is_404_on_the_main_port_and_the_answer_says_where_it_is(
    fake: ServerProcess, method: str, path: str
) -> None:
    answer = ask(fake.url, method, path)
    assert answer.status_code == 404
    assert fake.admin_url in message(answer)
    assert "--admin-port" in message(answer)


def test_abort_all_on_the_main_port_ends_no_stream(fake: ServerProcess, http: httpx.Client) -> None:
    body: dict[str, Any] = {"prompt": "hello", "max_tokens": 40, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        assert next(lines)
        assert httpx.post(f"{fake.url}/abort_request", json={"abort_all": True}, timeout=60).status_code == 404
        assert "data: [DONE]" in list(lines)


def test_metrics_are_404_on_the_main_port_and_on_the_admin_port(fake: ServerProcess) -> None:
    answer = ask(fake.url, "GET", "/metrics")
    assert answer.status_code == 404
    assert fake.metrics_url in message(answer)
    assert ask(fake.admin_url, "GET", "/metrics").status_code == 404


def test_the_metrics_page_is_not_reachable_through_the_loads(http: httpx.Client) -> None:
    answer = http.get("/v1/loads?format=prometheus")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "format")
    assert "--metrics-port" in message(answer)
    assert http.get("/v1/loads?format=json").status_code == 200


def test_paths_of_other_engines_get_a_helpful_answer(http: httpx.Client) -> None:
    assert http.get("/version").json() == {"version": importlib.metadata.version("treeline-runtime")}
    assert http.get("/load").json() == {"server_load": 0}
    assert http.get("/ping").status_code == 200


EVERYTHING = [
    *ADMINISTRATION,
    *(("POST", path) for path in ("/v1/chat/completions", "/v1/completions", "/generate", "/tokenize")),
    *(("GET", path) for path in ("/v1/models", "/v1/models/random", "/v1/loads", "/load", "/server_info")),
    *(
        ("GET", path)
        for path in ("/version", "/ping", "/live", "/ready", "/health", "/health_generate", "/treeline/tokenizer", "/")
    ),
    *((method, "/metrics") for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS")),
]


@pytest.mark.parametrize(("method", "path"), EVERYTHING)
def test_the_metrics_port_serves_the_metrics_and_nothing_else(fake: ServerProcess, method: str, path: str) -> None:
    expected = 404 if path != "/metrics" else 405
    assert ask(fake.metrics_url, method, path).status_code == expected


@pytest.mark.parametrize(
    ("method", "path"),
    [(method, path) for method, path in EVERYTHING if path not in dict(map(reversed, ADMINISTRATION))],
)
def test_the_admin_port_serves_no_inference(fake: ServerProcess, method: str, path: str) -> None:
    assert ask(fake.admin_url, method, path).status_code == 404


def test_the_metrics_port_takes_no_body(fake: ServerProcess, metrics: httpx.Client) -> None:
    refused = metrics.request("GET", "/metrics", content=b"x" * 1000)
    assert refused.status_code == 413
    host, port = fake.metrics_url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 413 "), "before any of the body has come"
    assert metrics.request("GET", "/metrics", headers={"content-length": "0"}).status_code == 200


@pytest.mark.parametrize("path", ["/flush_cache", "/abort_request"])
def test_a_get_changes_nothing(fake: ServerProcess, path: str) -> None:
    assert ask(fake.admin_url, "GET", path).status_code == 405


def test_disabled_listeners_are_reported_as_such(model: Path) -> None:
    with running(model, "--no-events", "--metrics-port=off", "--admin-port=off", fake=True) as server:
        for path, flag in (("/metrics", "--metrics-port"), ("/flush_cache", "--admin-port")):
            answer = ask(server.url, "POST", path)
            assert answer.status_code == 404
            assert f"which is off ({flag})" in message(answer)
        info = httpx.get(f"{server.url}/server_info", timeout=60).json()
        assert (info["metrics_port"], info["admin_port"]) == (None, None)
        listening = [line for line in server.log if " on http://" in line and "ready" not in line]
        assert len(listening) == 1, listening


# ---- access ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "path"), ADMINISTRATION)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Bearer"},
        {"authorization": KEY},
        {"authorization": f"Basic {KEY}"},
        {"authorization": f"Bearer {KEY}x"},
        {"authorization": "Bearer api-key"},
        {"x-api-key": KEY},
    ],
    ids=str,
)
def test_with_a_key_administration_is_401_without_it(
    keyed: ServerProcess, method: str, path: str, headers: dict[str, str]
) -> None:
    answer = ask(keyed.admin_url, method, path, headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["code"] == "invalid_admin_key"
    assert KEY not in answer.text


def test_with_the_key_administration_is_served(keyed: ServerProcess) -> None:
    assert ask(keyed.admin_url, "POST", "/flush_cache", BEARER).status_code == 200
    other_spelling = {"authorization": f"bearer  {KEY}"}  # a scheme has no case, and may be followed by blanks
    assert ask(keyed.admin_url, "POST", "/flush_cache", other_spelling).status_code == 200
    assert ask(keyed.admin_url, "POST", "/abort_request", BEARER).status_code == 200
    assert "--enable-debug-endpoints" in message(ask(keyed.admin_url, "GET", "/debug/radix", BEARER))


def test_two_authorization_headers_count_as_none(keyed: ServerProcess) -> None:
    headers = [("authorization", f"Bearer {KEY}"), ("authorization", "Bearer other")]
    assert httpx.post(f"{keyed.admin_url}/flush_cache", headers=headers, timeout=60).status_code == 401


def test_the_key_is_in_no_page_no_log_and_no_command_line(keyed: ServerProcess) -> None:
    api = {"authorization": "Bearer api-key"}
    for path in ("/server_info", "/model_info", "/v1/models"):
        assert KEY not in httpx.get(keyed.url + path, headers=api, timeout=60).text
    assert KEY not in "\n".join(keyed.log)
    for pid in (keyed.process.pid, *keyed.children().values()):
        assert KEY.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_the_admin_key_opens_no_inference_and_metrics_need_none(keyed: ServerProcess) -> None:
    refused = httpx.post(f"{keyed.url}/v1/completions", json={"prompt": "hi"}, headers=BEARER, timeout=60)
    assert refused.status_code == 401
    assert httpx.get(f"{keyed.metrics_url}/metrics", timeout=60).status_code == 200


REBOUND = ["evil.example", "evil.example:9700", "127.0.0.1.evil.example", "10.0.0.1:9700"]


@pytest.mark.parametrize(("method", "path"), ADMINISTRATION)
@pytest.mark.parametrize("host", REBOUND)
def test_a_name_rebound_to_loopback_is_403(fake: ServerProcess, method: str, path: str, host: str) -> None:
    answer = ask(fake.admin_url, method, path, {"host": host})
    assert answer.status_code == 403
    assert host in message(answer)


@pytest.mark.parametrize(("method", "path"), ADMINISTRATION)
@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-origin"},
    ],
    ids=str,
)
def test_a_web_page_is_403_with_and_without_the_key(
    fake: ServerProcess, keyed: ServerProcess, method: str, path: str, headers: dict[str, str]
) -> None:
    assert ask(fake.admin_url, method, path, headers).status_code == 403
    assert ask(keyed.admin_url, method, path, headers | BEARER).status_code == 403


def test_localhost_is_a_name_of_loopback(fake: ServerProcess) -> None:
    port = fake.admin_url.rpartition(":")[2]
    assert ask(fake.admin_url, "POST", "/flush_cache", {"host": f"localhost:{port}"}).status_code == 200


def test_without_a_key_administration_listens_on_loopback_alone(fake: ServerProcess) -> None:
    assert fake.admin_url.startswith("http://127.0.0.1:")
    assert fake.metrics_url.startswith("http://127.0.0.1:")


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("/flush_cache?timeot=3", "timeot"),
        ("/reset_prefix_cache?reset_running_requests=true", "reset_running_requests"),
        ("/abort_request?rid=x", "rid"),
        ("/is_sleeping?level=1", "level"),
    ],
)
def test_an_ignored_parameter_is_named(fake: ServerProcess, path: str, named: str) -> None:
    answer = ask(fake.admin_url, "GET" if path.startswith("/is_") else "POST", path)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, named)


@pytest.mark.parametrize(
    ("path", "instead"), [("/release_memory_occupation", "/sleep"), ("/resume_memory_occupation", "/wake_up")]
)
def test_paths_of_other_engines_name_ours(fake: ServerProcess, path: str, instead: str) -> None:
    for url in (fake.url, fake.admin_url):
        answer = ask(url, "POST", path)
        assert answer.status_code == 404
        assert f"POST {instead}" in message(answer)


# ---- until when -----------------------------------------------------------------------------------------------------


def test_metrics_and_administration_answer_until_the_drain_has_ended(model: Path) -> None:
    """
    1. a stream is under way; SIGTERM
    2. new requests are refused; the metrics say draining, administration still answers
    3. it aborts the stream, which was all that the drain waited for: exit status 0
    """
    with running(model, "--no-events", "--drain-timeout=60", fake=True) as server:
        with server.client() as client, server.metrics() as metrics, server.admin() as admin:
            body = {
                "text": "hello",
                "rid": "last",
                "stream": True,
                "sampling_params": {"max_new_tokens": 4000},
            }
            with client.stream("POST", "/generate", json=body) as stream:
                lines = stream.iter_lines()
                assert next(lines)
                server.process.send_signal(signal.SIGTERM)
                with server.client() as other:
                    hello = {"prompt": "hi", "max_tokens": 1}
                    eventually(lambda: other.post("/v1/completions", json=hello).status_code == 503, 60, "refused")
                page = metrics.get("/metrics").text
                assert 'treeline:draining{model_name="random"} 1.0' in page
                assert 'treeline:http_requests_active{model_name="random"} 1.0' in page
                assert admin.post("/abort_request", json={"rid": "last"}).status_code == 200
                assert any('"abort"' in line for line in lines)
        assert server.wait() == 0


def test_no_port_is_left_behind(model: Path) -> None:
    with running(model, "--no-events", fake=True) as server:
        urls = (server.url, server.metrics_url, server.admin_url)
        os.kill(server.process.pid, signal.SIGTERM)
        assert server.wait() == 0
    for url in urls:
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/live", timeout=60)
