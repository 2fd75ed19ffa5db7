"""A server ends by a signal and leaves nothing behind."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import time
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
import zmq
from support.runtime_server import Stream, eventually, gone
from support.virtual_loop import run
from treeline_runtime.serve import QUIET_S, REFUSALS_S, Server
from treeline_wire.load import TREELINE_LOAD_TOPIC, TreelineLoad, decode_load

pytestmark = pytest.mark.integration


def test_sigterm_keeps_accepting_then_refuses_finishes_streams_and_exits_0(start: Any) -> None:
    """
    1. a stream is under way; SIGTERM
    2. at once: /ready says 503, the load report says draining; new requests still succeed (--pre-stop)
    3. then: new requests get 503 with Retry-After and x-treeline-overloaded; /live stays 200
    4. the stream runs to its end; exit status 0
    """
    server = start("--pre-stop=0.8", "--drain-timeout=20").ready()
    with server.client() as client:
        events = client.get("/server_info").json()["kv_events"]
        context = zmq.Context()
        load = context.socket(zmq.SUB)
        load.connect(f"tcp://127.0.0.1:{events['load_endpoint_port_base']}")
        load.subscribe(TREELINE_LOAD_TOPIC)
        assert load.poll(60_000), "no heartbeat"
        stream = Stream(server, tokens=120).underway()

        server.process.send_signal(signal.SIGTERM)
        signalled_at = time.monotonic()
        eventually(lambda: client.get("/ready").status_code == 503, 60, "/ready turns 503")
        draining = None
        while not draining:
            assert load.poll(30_000), "draining was not published"
            topic, _, payload = load.recv_multipart()
            report = decode_load(topic, payload)
            assert isinstance(report, TreelineLoad)
            draining = report.draining
        assert client.get("/server_info").json()["draining"] is True
        accepted = client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2})
        assert accepted.status_code == 200

        refused = eventually(
            lambda: (
                (r := client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2})).status_code == 503 and r
            ),
            60,
            "requests are refused after --pre-stop",
        )
        assert time.monotonic() - signalled_at > 0.75
        assert refused.headers["retry-after"]
        assert refused.headers["x-treeline-overloaded"]
        assert refused.json()["error"]["code"] == "overloaded"
        assert client.get("/live").status_code == 200
        assert stream.ended()[-1] == "[DONE]"
        context.destroy(linger=0)
    assert server.wait() == 0


def test_a_draining_server_answers_on_every_connection_and_closes_it(start: Any) -> None:
    """One connection holds half a request, which the drain waits for; the other was idle when the signal came."""
    server = start().ready()
    body = json.dumps({"prompt": "hi", "max_tokens": 2})
    held, idle = (http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60) for _ in range(2))
    with server.metrics() as metrics:
        idle.request("GET", "/live")
        assert idle.getresponse().read()
        held.putrequest("POST", "/v1/completions")
        held.putheader("content-length", str(len(body)))
        held.endheaders(body[:5].encode())
        eventually(lambda: 'http_requests_active{model_name="random"} 1.0' in metrics.get("/metrics").text)
    server.process.send_signal(signal.SIGTERM)
    server.wait_for_log("SIGTERM: draining, 1 requests in flight")
    idle.request("POST", "/v1/completions", body)
    held.send(body[5:].encode())
    for connection in (idle, held):
        refused = connection.getresponse()
        assert (refused.status, refused.headers["connection"]) == (503, "close")
        assert refused.headers["x-treeline-overloaded"]
    assert server.wait() == 0


def test_a_drained_server_waits_until_no_request_has_come_for_a_while() -> None:
    """Requests come faster than its patience ends, and it stays; then none comes, or they never end."""
    service = SimpleNamespace(active=0, came=0)
    server: Any = SimpleNamespace(_service=service)

    async def asked(times: int) -> float:
        loop = asyncio.get_running_loop()
        began = loop.time()
        quiet = asyncio.create_task(Server._quiet(server))
        for _ in range(times):
            await asyncio.sleep(0.8 * QUIET_S)
            assert quiet.done() == (loop.time() - began > REFUSALS_S)
            service.came += 1
        await quiet
        return loop.time() - began

    assert run(asked(0)) == QUIET_S
    assert run(asked(3)) == QUIET_S * 4
    run(asked(20))


def test_a_drain_that_takes_too_long_ends_streams_with_an_error_object(start: Any) -> None:
    server = start("--drain-timeout=0.3").ready()
    stream = Stream(server, tokens=2000).underway()
    server.process.send_signal(signal.SIGTERM)
    assert server.wait(60) == 0
    assert json.loads(stream.ended()[-1])["error"]["message"] == "The server is shutting down"


def test_a_second_signal_ends_at_once(start: Any) -> None:
    server = start("--drain-timeout=60").ready()
    stream = Stream(server, tokens=2000).underway()
    server.process.send_signal(signal.SIGTERM)
    server.wait_for_log("draining")
    server.process.send_signal(signal.SIGTERM)
    assert server.wait(30) == 128 + signal.SIGTERM
    assert json.loads(stream.ended()[-1])["error"]["message"] == "The server is shutting down"
    assert "Traceback" not in "\n".join(server.log)


def test_ctrl_c_reaches_the_whole_group_and_still_ends_cleanly(start: Any) -> None:
    server = start().ready()
    children = server.children()
    assert set(children) == {"scheduler", "detokenizer", "publisher"}
    for pid in children.values():  # as a terminal does
        os.kill(pid, signal.SIGINT)
    server.process.send_signal(signal.SIGINT)
    assert server.wait() == 0
    assert all(gone(pid) for pid in children.values())
    assert "Traceback" not in "\n".join(server.log)


def test_a_signal_while_loading_ends_at_once(start: Any) -> None:
    server = start()
    server.wait_for_log("listening")
    server.process.send_signal(signal.SIGTERM)
    assert server.wait(60) in (0, 128 + signal.SIGTERM)
