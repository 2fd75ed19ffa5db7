"""A server ends when a process or its parent dies, hangs, or never starts."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.fake_scheduler import Magic
from support.runtime_server import Stream, eventually, gone

pytestmark = [pytest.mark.integration, pytest.mark.deep]


@pytest.mark.parametrize("victim", ["scheduler", "detokenizer", "publisher"])
def test_the_death_of_a_child_fails_requests_and_ends_the_server(start: Any, victim: str) -> None:
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
        eventually(lambda: client.get("/v1/loads").json()["loads"][0]["running"] == 2, 60, "both run")
        os.kill(children[victim], signal.SIGKILL)
        waiting.join(30)
    assert answers[0].status_code == 503
    assert f"the {victim} process was killed by SIGKILL" in answers[0].json()["error"]["message"]
    last = json.loads(stream.ended()[-1])["error"]
    assert victim in last["message"]
    assert last["type"] == answers[0].json()["error"]["type"] == "server_error"
    assert server.wait(60) == 1
    assert all(gone(pid) for pid in children.values())


def test_children_end_with_a_parent_that_was_killed(start: Any) -> None:
    server = start().ready()
    children = server.children()
    server.process.kill()
    server.wait()
    eventually(lambda: all(gone(pid) for pid in children.values()), 60, "the children are gone")


def test_the_next_server_removes_a_killed_servers_folder(start: Any, temp: Path) -> None:
    alive, killed = start(), start()
    alive.ready()
    killed.ready()
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


def test_a_stopped_scheduler_is_noticed(start: Any) -> None:
    server = start("--watchdog-timeout=1", STOP_S="1").ready()
    children = server.children()
    stream = Stream(server, tokens=5, prompt=[Magic.HANG])
    assert server.wait(60) == 1
    server.wait_for_log("scheduler has not moved")
    stream.ended()
    assert stream.status == 503
    assert gone(children["scheduler"])


def test_a_scheduler_that_stalls_says_where(start: Any) -> None:
    server = start("--watchdog-timeout=1", STOP_S="1").ready()
    Stream(server, tokens=5, prompt=[Magic.STALL])
    assert server.wait(60) == 1
    server.wait_for_log("in take")  # of the stack that SIGABRT leaves
    assert server.process.returncode == 1


def test_a_stopped_detokenizer_or_publisher_is_noticed(start: Any) -> None:
    servers = {victim: start("--watchdog-timeout=1", STOP_S="1") for victim in ("detokenizer", "publisher")}
    pids = {victim: server.ready().children()[victim] for victim, server in servers.items()}
    for pid in pids.values():
        os.kill(pid, signal.SIGSTOP)
    for victim, server in servers.items():
        assert server.wait(30) == 1
        server.wait_for_log(f"the {victim} has not moved for")
        assert gone(pids[victim])


def test_loading_that_takes_too_long_is_given_up(start: Any, tmp_path: Path) -> None:
    server = start("--start-timeout=0")
    assert server.wait(60) == 1
    server.wait_for_log("not ready after 0 s: waiting for")
