"""A server ends by a signal and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

import pytest
import zmq
from support.runtime_server import Stream, eventually, gone
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
