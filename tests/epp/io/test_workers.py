"""Several worker processes of one picker: one port, one page, one picker to whoever asks."""

from __future__ import annotations

import asyncio
import contextlib
import random
import resource
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from envoy.config.endpoint.v3 import endpoint_pb2
from envoy.service.discovery.v3 import discovery_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.epp_io import FakeEngine, until
from support.flow_world import FlowWorld
from support.http import client
from support.picker_cost import chat_body
from support.ports import free_ports
from support.workers import HOST, PickerOfWorkers, ask, picker_of_workers
from treeline_epp import debug_pages, main, signals
from treeline_epp.compat.families import Families
from treeline_epp.compat.metric_names import GIE, LLMD
from treeline_epp.flow.report import samples
from treeline_epp.flow.settings import FlowSettings
from treeline_epp.main import StartError
from treeline_epp.options import options_of
from treeline_epp.peers.driver import bound
from treeline_epp.requests.exchange import Exchange
from treeline_epp.workers import link, places
from treeline_epp.workers import team as team_module
from treeline_epp.workers.link import ParentsEds, Selectable, Start, Status, Worker
from treeline_epp.workers.team import Team, WorkerFailed
from treeline_epp.workers.totals import SUMMED_GAUGES, families, merged, rendered
from treeline_epp.xds.eds import CLUSTER, Eds
from treeline_wire.signals import PATH, decode

pytestmark = pytest.mark.deep


async def check_pages(made: PickerOfWorkers, body: bytes) -> None:
    """Each page is that of the whole picker."""
    count = int((await made.metrics())['treeline_epp_decisions_total{endpoint="e"}'])
    shown = (await made.page("/debug/decisions?last=500")).json()["decisions"]
    assert len(shown) == count
    assert {one["worker"] for one in shown} == {0, 1}
    assert [one["at"] for one in shown] == sorted((one["at"] for one in shown), reverse=True)
    data = (await made.page("/debug/console.json")).json()
    assert data["decisions"]["count"] == len(data["decisions"]["shown"]) == count
    assert [one["name"] for one in data["endpoints"]["shown"]] == ["e"]
    again = (await made.page(f"/debug/console.json?after={data['decisions']['next']}")).json()
    assert again["decisions"]["shown"] == [], "it goes on where it was"
    assert [one["name"] for one in (await made.page("/debug/endpoints")).json()["endpoints"]] == ["e"]
    assert set((await made.page("/debug/tree")).json()["workers"]) == {"0", "1"}
    asked = debug_pages.encode(debug_pages.Asked("/v1/chat/completions", body))
    async with client(timeout=60) as http:
        answer = await http.post(f"http://{HOST}:{made.admin_port}{debug_pages.EXPLAIN}", content=asked)
        assert answer.json()["workers"] == {"0": "e", "1": "e"}
        async with http.stream("GET", f"http://{HOST}:{made.admin_port}{PATH}") as lines:
            said = decode((await anext(lines.aiter_lines())).encode())
    assert said.synced
    assert not said.partial
    assert {pool.asked.picks for pool in said.pools.values()} <= {*range(1, count + 1)}, "those of the last seconds"


async def test_a_worker_that_hangs_is_seen_and_none_outlives_the_parent(tmp_path: Path) -> None:
    """Its new connections go to others, pages name it, and it may come back; SIGKILL of the parent ends all."""
    engine = FakeEngine("e")
    await engine.start()
    body = chat_body(random.Random(1))
    async with picker_of_workers(tmp_path, [engine]) as made:
        hung, other = sorted(made.workers, key=lambda one: one.pid)
        hung.send_signal(signal.SIGSTOP)
        await until(lambda: "says nothing for 3." in made.log.read_text(), "it is noticed", 30)
        calls = [await asyncio.wait_for(ask(made.grpc_port, body, f"r{number}"), 60) for number in range(4)]
        assert {destination for _, _, destination in calls} == {engine.address}, "all by the other one"
        page = await made.metrics()
        assert (page["treeline_epp_workers"], page["treeline_epp_workers_unanswered"]) == (1, 1)
        (unanswered,) = (await made.page("/endpoints")).json()["unanswered"]
        assert "it says nothing for" in unanswered["why"]
        assert (await made.page("/ready")).status_code == 200
        hung.send_signal(signal.SIGCONT)
        await until(lambda: "is back after" in made.log.read_text(), "it comes back", 30)
        assert made.workers == [hung, other] or made.workers == [other, hung], "it was not replaced"
        for channel, _, _ in calls:
            await channel.close()
        made.process.kill()
        await made.process.wait()
        await until(lambda: not hung.is_running() and not other.is_running(), "none is left")
    await engine.stop()


@pytest.mark.parametrize("flag", ["--grpc-port", "--admin-port", "--metrics-port", "--grpc-health-port"])
async def test_a_port_that_somebody_has_is_said_before_workers_start(flag: str) -> None:
    flags = ("--grpc-port", "--grpc-health-port", "--metrics-port", "--admin-port")
    ports = dict(zip(flags, free_ports(4), strict=True))
    with socket.socket() as taken:
        taken.bind((HOST, ports[flag]))
        taken.listen()
        words = ["--endpoint", "a=127.0.0.1:1", "--workers", "2"]
        words += [word for name, port in ports.items() for word in (name, str(port))]
        with pytest.raises(StartError, match=f"{ports[flag]}: Address already in use; choose another port with {flag}"):
            await main._until_signal(options_of(words), words)
    living = [one for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE]
    assert [one for one in living if "treeline_epp.worker_process" in one.cmdline()] == []


async def test_workers_are_one_picker(tmp_path: Path) -> None:
    """The port is shared, what is in flight is known to all, pages are one; a worker that dies is replaced."""
    engine = FakeEngine("e")
    await engine.start()
    body = chat_body(random.Random(1))
    async with picker_of_workers(tmp_path, [engine], "--enable-debug-endpoints") as made:

        async def routable() -> bool:
            pools = (await made.page("/endpoints")).json()["pools"]
            return any(one["ready"] for pool in pools.values() for one in pool["endpoints"])

        await until(routable, "the engine is known")
        calls = [await ask(made.grpc_port, body, f"r{number}") for number in range(24)]
        assert {destination for _, _, destination in calls} == {engine.address}
        first, other = made.workers
        held = [len([c for c in one.net_connections() if c.status == "ESTABLISHED" and c.laddr.port == made.grpc_port])
                for one in (first, other)]  # fmt: skip
        assert held == [12, 12], "each has as many of the connections"
        page = await made.metrics()
        assert page['treeline_epp_decisions_total{endpoint="e"}'] == 24, "the sum of both"
        assert page["treeline_epp_extproc_streams"] == 24
        assert page["treeline_epp_workers"] == 2
        assert page['treeline_epp_endpoints{state="ready"}'] == 1, "one endpoint, however many look at it"

        async def told() -> bool:  # by a request of now: those before may have lived their time
            calls.append(await ask(made.grpc_port, body, f"r{len(calls)}"))
            return (await made.metrics())["treeline_epp_peer_requests"] >= 1

        await until(told, "each knows what the other has in flight")
        async with grpc.aio.insecure_channel(f"{HOST}:{made.control_port}") as channel:
            health = health_pb2_grpc.HealthStub(channel)
            assert (await health.Check(health_pb2.HealthCheckRequest())).status == 1
            call = channel.stream_stream("/envoy.service.endpoint.v3.EndpointDiscoveryService/StreamEndpoints")()
            await call.write(discovery_pb2.DiscoveryRequest(resource_names=[CLUSTER]).SerializeToString())
            answer = discovery_pb2.DiscoveryResponse.FromString(await asyncio.wait_for(call.read(), 60))
            found = endpoint_pb2.ClusterLoadAssignment.FromString(answer.resources[0].value)
            (listed,) = found.endpoints[0].lb_endpoints
            assert listed.endpoint.address.socket_address.port_value == engine.port, "what workers know, once"
            call.cancel()
        await check_pages(made, body)
        before = await made.metrics()
        first.kill()

        async def replaced() -> bool:
            page = await made.metrics()
            return page["treeline_epp_worker_restarts_total"] == 1 and page["treeline_epp_workers"] == 2

        assert (await made.page("/ready")).status_code == 200, "the other one serves"
        await until(replaced, "another has its place", 60, made.log.read_text)
        assert "worker 0 was ended by SIGKILL; another starts in 0.5 s" in made.log.read_text()
        after = await made.metrics()
        counted = [name for name in before if "_total" in name or "_count" in name or "_bucket" in name]
        assert [name for name in counted if after[name] < before[name]] == [], "what it counted is not lost"
        await until(lambda: "worker 1 gives up" in made.log.read_text(), "the new one gets its share")
        assert (await ask(made.grpc_port, body, "again"))[2] == engine.address
        for channel, _, _ in calls:
            await channel.close()
    assert '"level": "error"' in made.log.read_text()
    assert all(line.startswith("{") for line in made.log.read_text().splitlines()), "nothing of gRPC's own"
    await engine.stop()


@contextlib.asynccontextmanager
async def team_of_one(*words: str) -> AsyncIterator[tuple[Team, asyncio.Task[None], list[bool]]]:
    """A team with one worker, what runs it, and what it has said of being ready."""
    said: list[bool] = []

    async def on_ready(ready: bool) -> None:
        said.append(ready)

    with bound(HOST, 0) as sock:
        team = Team([*words, "--drain-timeout", "0"], Eds(), [sock], b"k" * 32, [], on_ready)
        running = asyncio.create_task(team.run(asyncio.Event()))
        try:
            yield team, running, said
        finally:
            running.cancel()
            await team.stop(0)
            assert all(member.process is None or member.process.poll() is not None for member in team.members)


async def test_a_worker_that_cannot_start_ends_the_picker(capfd: pytest.CaptureFixture[str]) -> None:
    """A mistake that only a worker sees is told, and is no loop of restarts."""
    async with team_of_one("--endpoint", "nonsense") as (_, running, said):
        with pytest.raises(WorkerFailed, match="ended with status 2 before it was ready; the log says why"):
            await asyncio.wait_for(running, 30)
    assert "NAME=HOST:PORT" in capfd.readouterr().err, "the worker's own words"
    assert not any(said)


async def test_a_worker_that_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team_module, "FIRST_PAUSE_S", 0.01)
    (port,) = free_ports(1)
    async with team_of_one("--endpoint", "a=127.0.0.1:1", "--grpc-port", str(port)) as (team, running, said):
        (member,) = team.members
        await until(lambda: member.status.ready, "it is ready", 30)
        first = member.process
        assert first is not None
        first.send_signal(signal.SIGSTOP)
        monkeypatch.setattr(team_module, "HUNG_S", 1.5)
        await until(lambda: first.poll() == -signal.SIGKILL, "it is killed", 30)
        monkeypatch.setattr(team_module, "HUNG_S", 60.0)  # the next one may take its time
        await until(lambda: team.restarts == 1 and member.status.ready, "another has its place", 30)
        assert not running.done()
    assert said == [True, False, True]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--transport", "grpc"], "--workers needs --transport http2"),
        (["--grpc-port", "0"], "--workers needs a --grpc-port"),
        (["--workers", "0"], "--workers: "),
        (["--workers", "-1"], "--workers: "),
        (["--workers", "1000"], "--workers: "),
        (["--peers", "a:1", "--curve-dir", "/keys", "--peer-port", "65535"], "--peer-port: each worker has one"),
        (["--peers", "a:65535", "--curve-dir", "/keys"], "--peers: each worker of a picker has a port"),
    ],
)
def test_what_does_not_go_with_workers_is_said_at_the_start(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        options_of(["--endpoint", "a=127.0.0.1:1", "--workers", "2", *words])
    assert said in capsys.readouterr().err


def test_the_requests_that_each_worker_has_itself_are_summed() -> None:
    world = FlowWorld(FlowSettings(hold_empty_pool_seconds=60.0), engines=0)
    world.router.demand.held = world.flow.held
    metrics, others = world.router.metrics, Families([GIE, LLMD], world.picker, streams=lambda: 3.0)
    metrics.observe(lambda: samples(world.flow))
    metrics.observe(lambda: signals.samples(signals.picture(world.router.demand, (), (), world.now, synced=True)))
    others._running[Exchange("r", "/", None, "f", 1, 0.0)] = ("tiny", "tiny", "f", "0")
    for flow in "fg":
        world.send(flow)
    world.now += 1.0
    page = rendered(merged([families((metrics.render() + others.render()).decode())])).decode()
    one = {name: float(value) for name, value in _values(page) if float(value)}
    for name, value in _values(rendered(merged([families(page), families(page)])).decode()):
        family = name.partition("{")[0]
        if family in SUMMED_GAUGES and name in one:
            assert float(value) == 2 * one.pop(name), name
    assert {name.partition("{")[0] for name in one if "held" in name or "running" in name or "missed" in name} == set()
    assert "treeline_epp_flow_oldest_seconds" in {name.partition("{")[0] for name in one}, "the greatest"


def test_the_parent_may_open_as_many_files_as_a_picker_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits: list[tuple[int, int]] = []

    async def supervise(*_: Any, **__: Any) -> None:
        limits.append(resource.getrlimit(resource.RLIMIT_NOFILE))

    monkeypatch.setattr(main, "supervise", supervise)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        assert main.main(["--endpoint", "a=127.0.0.1:1", "--workers", "2"]) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert limits == [(hard, hard)]


def _values(page: str) -> list[list[str]]:
    return [line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#")]


def test_where_workers_hear_each_other_and_those_of_other_pickers() -> None:
    words = ["--endpoint", "a=127.0.0.1:1", "--workers", "2", "--host", "0.0.0.0"]
    alone = options_of(words)
    assert places.own_places(alone) == [("127.0.0.1", 0)] * 2
    company = options_of([*words, "--peers", "pickers:9005", "--curve-dir", "/keys", "--peer-port", "9100"])
    assert places.own_places(company) == [("0.0.0.0", 9100), ("0.0.0.0", 9101)]

    class Bound:
        def __init__(self, port: int) -> None:
            self.port = port

        def getsockname(self) -> tuple[str, int]:
            return "0.0.0.0", self.port

    sockets: Any = [Bound(9100), Bound(9101)]
    told = places.names_of(company, sockets)
    assert told == [("127.0.0.1", 9100), ("127.0.0.1", 9101), ("pickers", 9005), ("pickers", 9006)]
    assert places.for_one(company).max_waiting_body_bytes == company.max_waiting_body_bytes // 2


async def test_a_worker_tells_its_parent_what_envoy_is_to_know_and_waits_for_its_word() -> None:
    ours, its = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=its)
    there, back = await asyncio.open_connection(sock=ours)
    worker = Worker(Start(0, b"k" * 32, 0, 0, ()), writer)
    following = asyncio.create_task(worker.follow(reader))
    asked: list[None] = []
    eds = worker.eds
    assert isinstance(eds, ParentsEds)
    eds.on_ack = lambda: asked.append(None)
    heard = link.lines(there)
    eds.announce({"10.0.0.1:80": False, "10.0.0.2:80": True})
    eds.announce({"10.0.0.1:80": False, "10.0.0.2:80": True})
    eds.set_synced()
    worker.set_ready(True)
    said = [await anext(heard) for _ in range(3)]
    assert [(s.synced, s.ready) for s in said if isinstance(s, Status)] == [(False, False), (True, False), (True, True)]
    assert not eds.selectable("10.0.0.1:80")
    back.write(link.encode(Selectable(frozenset({"10.0.0.1:80", "10.0.0.2:80"}))))
    await until(lambda: asked, "it is told")
    assert [eds.selectable(f"10.0.0.{number}:80") for number in (1, 2, 3)] == [True, False, False]
    back.write(b"nonsense\n")
    await asyncio.wait_for(following, 60)
    back.close()
    writer.close()
