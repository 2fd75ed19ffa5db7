"""Pickers report their requests in flight to each other over UDP."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

import pytest
from support.epp_io import running_picker, until
from support.peers import KEY, picker_of
from support.ports import free_ports
from treeline_epp.main import StartError
from treeline_epp.options import options_of
from treeline_epp.peers import driver
from treeline_epp.peers.driver import bound, talking
from treeline_epp.peers.gossip import Gossip
from treeline_epp.picking.decision import Outcome
from treeline_epp.picking.picker import Picker
from treeline_epp.picking.request import Request
from treeline_wire.security import CurveKeys

HOST = "127.0.0.1"


def gossip() -> tuple[Picker, Gossip]:
    picker = picker_of(4)
    made = Gossip(picker, KEY)
    picker.elsewhere = made.own
    return picker, made


async def test_three_pickers_find_each_other_by_names_including_their_own() -> None:
    loop = asyncio.get_running_loop()
    ports = free_ports(3)
    names = [(HOST, port) for port in ports]
    made = [gossip() for _ in ports]
    async with contextlib.AsyncExitStack() as stack:
        for (_, one), port in zip(made, ports, strict=True):
            await stack.enter_async_context(talking(one, bound(HOST, port), names))
        await until(lambda: all(one.in_step == 2 for _, one in made), "each knows both others")
        first = made[0][0]
        request = Request("r", "m", key=bytes(5000), prompt_tokens_estimate=60_000)
        lease = first.reserve(first.pick(request, loop.time()), loop.time())
        await until(lambda: [one.elsewhere for _, one in made] == [0, 1, 1], "both others count it")
        seen = made[1][0].pick(request, loop.time())
        assert seen.endpoint == lease.decision.endpoint
        assert seen.best.candidate.cached_tokens > 53_000, "rounded down to the grid"
        first.close(lease, loop.time(), Outcome.HEADERS)
        await until(lambda: all(one.elsewhere == 0 for _, one in made), "and its end")


async def test_an_unknown_picker_is_answered_when_it_speaks() -> None:
    old, new = free_ports(2)
    (_, one), (_, other) = gossip(), gossip()
    async with talking(one, bound(HOST, old), []), talking(other, bound(HOST, new), [(HOST, old)]):
        await until(lambda: one.in_step == other.in_step == 1, "both know each other")
    assert one.in_step == 0, "it has said goodbye"


async def test_an_unresolved_name_is_reported_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "RESOLVE_S", 0.005)
    asked = 0

    async def nobody(*_words: object, **_more: object) -> list[object]:
        nonlocal asked
        asked += 1
        if asked < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(0, 0, 0, "", (HOST, port))]

    (port, own), (_, one), (_, other) = free_ports(2), gossip(), gossip()
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", nobody)
    async with talking(one, bound(HOST, own), [("pickers.example", 9005)]), talking(other, bound(HOST, port), []):
        await until(lambda: one.in_step == 1, "it is found once its name is there")
    assert caplog.text.count("peers pickers.example:9005") == 1


async def test_a_long_snapshot_arrives_whole() -> None:
    loop = asyncio.get_running_loop()
    (picker, one), (_, other), (old, new) = gossip(), gossip(), free_ports(2)
    for number in range(600):
        request = Request("r", "m", key=number.to_bytes(2) * 1500, prompt_tokens_estimate=60_000)
        picker.reserve(picker.pick(request, loop.time()), loop.time())
    async with talking(one, bound(HOST, old), []), talking(other, bound(HOST, new), [(HOST, old)]):
        await until(lambda: other.elsewhere == 600, "all is known", state=lambda: other.elsewhere)


async def test_pickers_show_their_peers_on_their_pages(tmp_path: Path) -> None:
    CurveKeys.generate(tmp_path / "keys")
    ports = free_ports(2)
    peers = ",".join(f"{HOST}:{port}" for port in ports)
    words = ["--endpoint", "a=127.0.0.1:1", "--curve-dir", str(tmp_path / "keys"), "--peers", peers]
    async with (
        running_picker(*words, "--peer-port", str(ports[0])) as one,
        running_picker(*words, "--peer-port", str(ports[1])) as other,
    ):

        async def known() -> bool:
            return all([(await picker.metrics())["treeline_epp_peers"] == 1 for picker in (one, other)])

        await until(known, "both pages say it")
        told = rf"cannot listen on 127.0.0.1:{ports[0]} \(UDP\): .*; choose another with --peer-port"
        with pytest.raises(StartError, match=told):
            async with running_picker(*words, "--peer-port", str(ports[0])):
                pass


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("", "is not a list"),
        ("pickers", "is not HOST:PORT"),
        (":9005", "is not HOST:PORT"),
        ("::1:9005", "is not HOST:PORT"),
        ("a:0", "from 1 to 65535"),
        ("a:99999", "from 1 to 65535"),
        ("a:9,b", "is not HOST:PORT"),
        (",".join(["a:1"] * 65), "is not a list"),
        ("a:9005", "--peers needs --curve-dir"),
    ],
)
def test_a_wrong_list_of_peers_is_reported(given: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options_of(["--endpoint", "a=127.0.0.1:1", "--peers", given])
    assert said in capsys.readouterr().err


def test_peers_are_names_or_addresses() -> None:
    words = ["--endpoint", "a=127.0.0.1:1", "--curve-dir", "/keys", "--peers", "pickers.ns.svc:9005, [fd00::1]:9006"]
    assert options_of(words).peers == (("pickers.ns.svc", 9005), ("fd00::1", 9006))
