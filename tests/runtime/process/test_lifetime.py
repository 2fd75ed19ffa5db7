"""How a server ends: by signal, by the death of a process, by the death of its parent. Nothing is ever left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq
from support.fake_scheduler import Magic
from support.runtime_server import ServerProcess, eventually, gone
from treeline_wire.load import TREELINE_LOAD_TOPIC, TreelineLoad, decode_load


@pytest.fixture
def start(model: Path, temp: Path) -> Iterator[Any]:
    """Starts fake servers; in the end none of them may have left a process or a file."""
    started: list[ServerProcess] = []

    def start(*flags: str, **environment: str) -> ServerProcess:
        server = ServerProcess(model, *flags, fake=True, environment={"TMPDIR": str(temp), **environment})
        started.append(server)
        return server

    yield start
    for server in started:
        server.stop()
    eventually(lambda: not list(temp.iterdir()), 5, "the socket folder is removed")


class Stream(threading.Thread):
    """A streaming request in the background: its events, and how it ended."""

    def __init__(self, server: ServerProcess, tokens: int, **body: Any) -> None:
        super().__init__(daemon=True)
        self.events: list[str] = []
        self.status: int | None = None
        self.began = threading.Event()
        self._url = server.url
        self._body = {"prompt": "hello world", "max_tokens": tokens, "stream": True, **body}
        self.start()

    def run(self) -> None:
        with (
            httpx.Client(base_url=self._url, timeout=30) as client,
            client.stream("POST", "/v1/completions", json=self._body) as response,
        ):
            self.status = response.status_code
            with contextlib.suppress(httpx.HTTPError):
                for line in response.iter_lines():
                    if line:
                        self.events.append(line.removeprefix("data: "))
                        self.began.set()
        self.began.set()

    def underway(self) -> Stream:
        assert self.began.wait(10)
        return self

    def ended(self) -> list[str]:
        self.join(20)
        assert not self.is_alive(), "the stream hangs"
        return self.events


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
        assert load.poll(5000), "no heartbeat"
        stream = Stream(server, tokens=120).underway()

        server.process.send_signal(signal.SIGTERM)
        signalled_at = time.monotonic()
        eventually(lambda: client.get("/ready").status_code == 503, 1.0, "/ready turns 503")
        draining = None
        while not draining:
            assert load.poll(1000), "draining was not published"
            topic, _, payload = load.recv_multipart()
            report = decode_load(topic, payload)
            assert isinstance(report, TreelineLoad)
            draining = report.draining
        assert time.monotonic() - signalled_at < 0.5
        assert client.get("/server_info").json()["draining"] is True
        accepted = client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2})
        assert accepted.status_code == 200

        refused = eventually(
            lambda: (
                (r := client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2})).status_code == 503 and r
            ),
            5,
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
    assert server.wait(10) == 0
    assert json.loads(stream.ended()[-1])["error"]["message"] == "The server is shutting down"


def test_a_second_signal_ends_at_once(start: Any) -> None:
    server = start("--drain-timeout=60").ready()
    stream = Stream(server, tokens=2000).underway()
    server.process.send_signal(signal.SIGTERM)
    server.wait_for_log("draining")
    sent_at = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.wait(10) == 128 + signal.SIGTERM
    assert time.monotonic() - sent_at < 3
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
    assert server.wait(10) in (0, 128 + signal.SIGTERM)


@pytest.mark.parametrize("victim", ["scheduler", "detokenizer", "publisher"])
def test_the_death_of_a_child_is_told_to_everyone_and_ends_the_server(start: Any, victim: str) -> None:
    server = start().ready()
    stream = Stream(server, tokens=2000).underway()
    children = server.children()
    answers: list[httpx.Response] = []

    def ask() -> None:
        with server.client() as client:
            answers.append(client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2000}))

    waiting = threading.Thread(target=ask)
    waiting.start()
    with server.client() as client:
        eventually(lambda: client.get("/v1/loads").json()["loads"][0]["running"] == 2, 10, "both run")
        killed_at = time.monotonic()
        os.kill(children[victim], signal.SIGKILL)
        waiting.join(5)
        assert time.monotonic() - killed_at < 2
    assert answers[0].status_code == 503
    assert f"the {victim} process was killed by SIGKILL" in answers[0].json()["error"]["message"]
    last = json.loads(stream.ended()[-1])["error"]
    assert victim in last["message"]
    assert last["type"] == answers[0].json()["error"]["type"] == "server_error"
    assert server.wait(10) == 1
    assert all(gone(pid) for pid in children.values())


def test_children_end_with_a_parent_that_was_killed(start: Any) -> None:
    server = start().ready()
    children = server.children()
    server.process.kill()
    server.wait()
    eventually(lambda: all(gone(pid) for pid in children.values()), 3, "the children are gone")


def test_what_a_wholly_killed_server_left_is_removed_by_the_next(start: Any, temp: Path) -> None:
    alive = start().ready()
    killed = start().ready()
    both = set(temp.iterdir())
    for pid in [*killed.children().values(), killed.process.pid]:
        os.kill(pid, signal.SIGSTOP)
    for pid in [*killed.children().values(), killed.process.pid]:
        os.kill(pid, signal.SIGKILL)
    killed.wait()
    assert set(temp.iterdir()) == both
    start().ready()
    assert len(both & set(temp.iterdir())) == 1
    with alive.client() as client:
        assert client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2}).status_code == 200


def test_a_scheduler_that_stands_still_is_noticed(start: Any) -> None:
    server = start("--watchdog-timeout=1").ready()
    children = server.children()
    stream = Stream(server, tokens=5, prompt=[Magic.HANG])
    assert server.wait(15) == 1
    server.wait_for_log("scheduler has not moved")
    stream.ended()
    assert stream.status == 503
    assert gone(children["scheduler"])


def test_a_detokenizer_or_a_publisher_that_stands_still_is_noticed(start: Any) -> None:
    servers = {victim: start("--watchdog-timeout=1").ready() for victim in ("detokenizer", "publisher")}
    pids = {victim: server.children()[victim] for victim, server in servers.items()}
    for pid in pids.values():
        os.kill(pid, signal.SIGSTOP)
    for victim, server in servers.items():
        assert server.wait(30) == 1
        server.wait_for_log(f"the {victim} has not moved for")
        assert gone(pids[victim])


def test_a_child_that_cannot_start_says_why(start: Any) -> None:
    server = start(FAKE_SCHEDULER_FAILS="1")
    assert server.wait(20) == 1
    assert any("the scheduler process failed: the weights are missing" in line for line in server.log)


def test_loading_that_takes_too_long_is_given_up(start: Any, tmp_path: Path) -> None:
    server = start("--start-timeout=0")
    assert server.wait(20) == 1
    server.wait_for_log("not ready after 0 s: waiting for")
