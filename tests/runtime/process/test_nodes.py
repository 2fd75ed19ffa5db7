"""`--nnodes`: several machines compute one model. Here they are addresses of one machine; everything else is real."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.runtime_server import ServerProcess, Stream, eventually, gone, running
from treeline_runtime import nodes
from treeline_runtime.args import ServerArgs, parse_args
from treeline_runtime.config import ConfigError, EngineConfig, meeting_place
from treeline_runtime.nodes import Hello, listen, meet

BODY = {"prompt": "hello world, how are you?", "max_tokens": 16, "temperature": 0, "logprobs": 2}
deep = pytest.mark.deep


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


class Group:
    """Node 0, which serves, and node 1."""

    def __init__(self, model: Path, *ranks: str) -> None:
        place = f"127.0.0.1:{free_port()}"
        flags = ["--no-events", "--device=cpu", *ranks, "--nnodes=2", f"--dist-init-addr={place}"]
        self.worker = ServerProcess(model, *flags, environment={"LWS_WORKER_INDEX": "1"})
        self.server = ServerProcess(model, *flags)

    def __enter__(self) -> Group:
        self.worker.wait_for_log("node 1 computes for rank 0")
        self.server.ready()
        return self

    def __exit__(self, *_: object) -> None:
        for one in (self.server, self.worker):
            if one.process.poll() is None:
                one.process.kill()
            one.wait()
        eventually(lambda: not [pid for pid in self.ranks() if not gone(pid)], what="the ranks end")

    def ranks(self) -> list[int]:
        """Return the processes of node 1's ranks."""
        try:
            return [child.pid for child in psutil.Process(self.worker.process.pid).children()]
        except psutil.NoSuchProcess:
            return []


def answer(server: ServerProcess) -> dict[str, Any]:
    with server.client() as http:
        choice: dict[str, Any] = http.post("/v1/completions", json=BODY).raise_for_status().json()["choices"][0]
        return choice


@deep
@pytest.mark.integration
def test_two_nodes_answer_like_one_and_end_when_both_are_asked_to(model: Path) -> None:
    with running(model, "--no-events") as alone:
        expected = answer(alone)
    with Group(model, "--tp-size=2", "--pp-size=2") as group:
        found = answer(group.server)
        assert found["text"] == expected["text"]
        assert found["logprobs"]["token_logprobs"] == pytest.approx(expected["logprobs"]["token_logprobs"], abs=1e-3)
        stream = Stream(group.server, 200, ignore_eos=True).underway()
        for one in (group.worker, group.server):
            one.process.send_signal(signal.SIGTERM)
        group.worker.wait_for_log("going on until rank 0 has ended")
        assert stream.ended()[-1] == "[DONE]"
        assert "error" not in stream.events[-2]
        assert (group.server.wait(), group.worker.wait()) == (0, 0)


def end_rank(group: Group) -> None:
    os.kill(group.ranks()[0], signal.SIGKILL)


def end_worker(group: Group) -> None:
    group.worker.process.kill()


LOSSES: dict[str, tuple[Callable[[Group], None], str]] = {
    "rank": (end_rank, "rank 1: its process was killed by SIGKILL"),
    "node": (end_worker, r"rank 1 \(node 1\) (has closed its connection|is lost)"),
}


@deep
@pytest.mark.integration
@pytest.mark.parametrize("loss", LOSSES)
def test_a_lost_rank_of_another_node_ends_the_server_by_name(loss: str, model: Path) -> None:
    deed, said = LOSSES[loss]
    with Group(model, "--tp-size=2") as group:
        deed(group)
        assert group.server.wait() == 1
        group.server.wait_for_log(said)
        assert group.worker.wait() != 0


@deep
@pytest.mark.integration
def test_a_node_ends_with_an_error_when_rank_0_is_lost(model: Path) -> None:
    with Group(model, "--tp-size=2") as group:
        group.server.process.kill()
        assert group.worker.wait() == 1
        group.worker.wait_for_log("rank 0 has ended")


@deep
@pytest.mark.integration
def test_a_node_that_waits_for_rank_0_says_so_and_ends_when_asked(model: Path) -> None:
    flags = ("--tp-size=2", "--nnodes=2", "--node-rank=1", f"--dist-init-addr=127.0.0.1:{free_port()}")
    for number in (signal.SIGTERM, signal.SIGINT):
        worker = ServerProcess(model, *flags)
        worker.wait_for_log("waiting for rank 0 at 127.0.0.1:.* refused")
        worker.process.send_signal(number)
        assert worker.wait() == 128 + number


# ---- who may join -------------------------------------------------------------------------------------------------

CONFIG = EngineConfig(model="m", tp_size=4, nnodes=2, dist_init_addr="127.0.0.1:0")
VERSION = nodes._version()


def hello(node: int = 1, slot: int = 0, version: str = VERSION) -> bytes:
    return json.dumps({"node": node, "slot": slot, "version": version, "model": "/m"}).encode() + b"\n"


def test_strangers_are_refused_and_the_ranks_still_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "GREETING_S", 0.2)
    with ExitStack() as open_ones:
        listener = open_ones.enter_context(listen(CONFIG))
        joined: list[Hello] = []

        def serve() -> None:
            for said, connection in meet(CONFIG, listener, lambda: None):
                joined.append(said)
                open_ones.enter_context(connection)

        meeting = threading.Thread(target=serve)
        meeting.start()

        def say(data: bytes) -> str:
            """Return the answer to a rank's first line."""
            connection = open_ones.enter_context(socket.create_connection(listener.getsockname(), 60))
            connection.sendall(data)
            with connection.makefile("rb") as answers, suppress(ConnectionResetError):
                return answers.readline().decode()
            return ""

        assert say(b"") == say(b"GET / HTTP/1.1\r\n") == say(b"x" * 5000) == say(b"[]\n") == say(b"\xff\n") == ""
        assert "it has Treeline 0.0, node 0 has" in say(hello(version="0.0"))
        assert "there is no rank 2 of node 1: node 0 has 2 machines (--nnodes) and 4 ranks" in say(hello(slot=2))
        assert "there is no rank 0 of node 2" in say(hello(node=2))
        assert "there is no rank -1 of node 1" in say(hello(slot=-1))
        assert "there is no rank 0 of node 0" in say(hello(node=0))
        assert say(hello(slot=1)) == "\n"
        assert "rank 1 of node 1 is there already: give each machine a --node-rank of its own" in say(hello(slot=1))
        assert say(hello()) == "\n"
        meeting.join(60)
        assert [(one.node, one.slot, one.model) for one in joined] == [(1, 1, "/m"), (1, 0, "/m")]


def test_a_meeting_ends_with_the_group() -> None:
    def check() -> None:
        raise RuntimeError("rank 1 was killed")

    with listen(CONFIG) as listener, pytest.raises(RuntimeError, match="rank 1 was killed"):
        next(meet(CONFIG, listener, check))


def test_an_address_of_another_machine_or_a_busy_port_is_refused() -> None:
    with listen(CONFIG) as listener:
        place = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"--dist-init-addr: cannot listen on {place}, .* a free port"):
            listen(EngineConfig(model="m", tp_size=2, nnodes=2, dist_init_addr=place))
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:9000, which must be an address of this"):
        listen(EngineConfig(model="m", tp_size=2, nnodes=2, dist_init_addr="192.0.2.1:9000"))


# ---- settings -----------------------------------------------------------------------------------------------------


def test_a_leader_worker_sets_variables_are_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LWS_GROUP_SIZE", "2")
    monkeypatch.setenv("LWS_WORKER_INDEX", "1")
    monkeypatch.setenv("LWS_LEADER_ADDRESS", "pool-0.pool.default")
    args = parse_args(["m", "--tp-size", "4"])
    assert (args.nnodes, args.node_rank, args.dist_init_addr) == (2, 1, "pool-0.pool.default")
    assert args.ranks_here == 2
    assert parse_args(["m", "--tp-size=4", "--node-rank=0", "--dist-init-addr=[::1]:99"]).dist_init_addr == "[::1]:99"


@pytest.mark.parametrize(
    ("text", "place"),
    [("a", ("a", 29500)), ("a.b:1", ("a.b", 1)), ("10.0.0.1", ("10.0.0.1", 29500)), ("[fd00::1]:7", ("fd00::1", 7))],
)
def test_the_port_of_a_meeting_place_may_be_left_out(text: str, place: tuple[str, int]) -> None:
    assert meeting_place(text) == place


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--nnodes 2", "--nnodes 2 does not divide the 1 ranks of all machines (--tp-size times --pp-size)"),
        ("--nnodes 2 --tp-size 2", "--nnodes needs --dist-init-addr, the address of the first machine"),
        ("--nnodes 2 --tp-size 2 --dist-init-addr http://a", "expected HOST or HOST:PORT, got 'http://a'"),
        ("--nnodes 2 --tp-size 2 --dist-init-addr a:b", "expected HOST or HOST:PORT, got 'a:b'"),
        ("--nnodes 2 --tp-size 2 --dist-init-addr :9", "expected HOST or HOST:PORT, got ':9'"),
        ("--node-rank 1", "--node-rank 1 is none of the 1 machines (--nnodes), from 0"),
        (
            "--nnodes 2 --tp-size 2 --dist-init-addr a --dp-size 2",
            "--dp-size is for one machine: with --nnodes start more servers instead",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    flags: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_args(["m", *flags.split()])
    assert said in capsys.readouterr().err
    assert ServerArgs(model="m").ranks_here == 1
