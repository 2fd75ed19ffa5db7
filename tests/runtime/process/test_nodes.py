"""`--nnodes`: several machines compute one model. Here they are addresses of one machine; everything else is real."""

from __future__ import annotations

import dataclasses
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
from support.runtime_server import ServerProcess, Stream, eventually, gone
from treeline_runtime import Engine, SamplingParams, nodes
from treeline_runtime.args import ServerArgs, parse_args
from treeline_runtime.config import ConfigError, EngineConfig, meeting_place
from treeline_runtime.nodes import Hello, digest_of, listen, meet

PROMPT, TOKENS = "hello world, how are you?", 16
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


@deep
@pytest.mark.integration
def test_two_nodes_answer_like_one_and_end_when_both_are_asked_to(model: Path) -> None:
    with Engine(model, device="cpu", threads=1) as alone:
        expected = alone.generate(PROMPT, SamplingParams(temperature=0.0, max_new_tokens=TOKENS), return_logprob=True)
    with Group(model, "--tp-size=2", "--pp-size=2") as group:
        body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "logprobs": 2}
        with group.server.client() as http:
            found = http.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]
        assert found["text"] == expected.text
        logprobs = [value for value, _ in expected.output_token_logprobs]
        assert found["logprobs"]["token_logprobs"] == pytest.approx(logprobs, abs=1e-3)
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


@deep
@pytest.mark.integration
def test_a_node_of_which_only_a_part_has_joined_ends_with_rank_0(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = f"127.0.0.1:{listener.getsockname()[1]}"
        flags = ("--tp-size=4", "--nnodes=2", "--node-rank=1", f"--dist-init-addr={place}")
        worker = ServerProcess(model, *flags)
        first = listener.accept()[0]
        first.sendall(b"\n")
        second = listener.accept()[0]
        first.close()
        second.close()
        assert worker.wait() == 1
        worker.wait_for_log("has ended before all ranks had met")


# ---- who may join -------------------------------------------------------------------------------------------------

VERSION = nodes._version()


@pytest.fixture
def config(model: Path) -> EngineConfig:
    return EngineConfig(model=str(model), tp_size=4, nnodes=2, dist_init_addr=f"127.0.0.1:{free_port()}")


def hello(model: Path, **other: Any) -> bytes:
    said = {"node": 1, "slot": 0, "ranks": 2, "version": VERSION, "model": "/m", "checkpoint": digest_of(model)}
    return json.dumps(said | other).encode() + b"\n"


def test_strangers_are_refused_and_the_ranks_still_meet(
    model: Path, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "GREETING_S", 0.2)
    with ExitStack() as open_ones:
        listener = open_ones.enter_context(listen(config))
        joined: list[tuple[Hello, str]] = []

        def serve() -> None:
            for said, connection, address in meet(config, listener, lambda: None):
                joined.append((said, address))
                open_ones.enter_context(connection)

        meeting = threading.Thread(target=serve)
        meeting.start()

        def connected(data: bytes) -> socket.socket:
            connection = open_ones.enter_context(socket.create_connection(listener.getsockname(), 60))
            connection.sendall(data)
            return connection

        def say(data: bytes) -> str:
            """Return the answer to a rank's first line."""
            with connected(data).makefile("rb") as answers, suppress(ConnectionResetError):
                return answers.readline().decode()
            return ""

        silent = [connected(b"{") for _ in range(nodes.MOST_STRANGERS + 8)]
        gone = connected(hello(model)[:-1])
        for data in (b"GET / HTTP/1.1\r\n", b"x" * 5000, b"[]\n", b"\xff\n", b'{"x":' + b"[" * 4000 + b"\n"):
            assert say(data) == ""
        gone.close()
        assert "it has Treeline 0.0, node 0 has" in say(hello(model, version="0.0"))
        for other in ({"slot": 2}, {"node": 2}, {"slot": -1}, {"node": 0}, {"ranks": 1}, {"ranks": 4, "slot": 3}):
            assert "does not belong to the 2 machines with 2 ranks each that node 0 knows" in say(hello(model, **other))
        assert "its checkpoint in /m is not that of node 0" in say(hello(model, checkpoint=digest_of(model / "other")))
        assert say(hello(model, slot=1)) == "\n"
        assert "rank 1 of node 1 is there already: give each" in say(hello(model, slot=1))
        assert say(hello(model)) == "\n"
        meeting.join(60)
        assert [(one.node, one.slot, address) for one, address in joined] == [(1, 1, "127.0.0.1"), (1, 0, "127.0.0.1")]
        for one in silent:
            with suppress(ConnectionResetError):
                assert one.recv(1) == b"", "it was told to go"


def test_a_meeting_ends_with_the_group(config: EngineConfig) -> None:
    def check() -> None:
        raise RuntimeError("rank 1 was killed")

    with listen(config) as listener, pytest.raises(RuntimeError, match="rank 1 was killed"):
        next(meet(config, listener, check))


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (None, r"--dist-init-addr: cannot listen on 127\.0\.0\.1:\d+, .* a free port"),
        ("192.0.2.1:9000", r"cannot listen on 192\.0\.2\.1:9000, which must be an address of this machine"),
        ("0.0.0.0:9000", r"0\.0\.0\.0 is no address at which other machines reach this one"),
    ],
)
def test_an_address_at_which_nobody_can_meet_is_refused(place: str | None, said: str, config: EngineConfig) -> None:
    with listen(config), pytest.raises(ConfigError, match=said):
        listen(dataclasses.replace(config, dist_init_addr=place or config.dist_init_addr))


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
        ("--nnodes 2 --tp-size 2 --dist-init-addr a:0", "expected HOST or HOST:PORT, got 'a:0'"),
        ("--nnodes 2 --tp-size 2 --dist-init-addr a..b", "expected HOST or HOST:PORT, got 'a..b'"),
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
