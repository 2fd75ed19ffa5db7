"""The demand that a picker counts, its snapshot, and the stream that an operator follows."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Callable
from typing import NamedTuple

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import virtual_loop
from support.epp_io import FakeEngine, RunningPicker, running_picker
from support.epp_kube import asked as ask
from support.http import client
from treeline_epp.admin import PageServer, Stream
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.endpoints.transfer import Role
from treeline_epp.picking.picker import Picker
from treeline_epp.signals import Demand, picture, samples, stream
from treeline_wire.load import LoadStat
from treeline_wire.signals import RECENT_S, Asked, PoolSignals, Signals, Waiting, decode, encode, merged

events = st.lists(
    st.tuples(
        st.floats(0, 4 * RECENT_S), st.sampled_from("pq"), st.sampled_from(["a", "b"]), st.booleans(), st.floats(0, 100)
    ),
    max_size=40,
)


@given(events, st.floats(0, 2 * RECENT_S))
def test_the_count_covers_the_last_seconds(told: list[tuple[float, str, str, bool, float]], after: float) -> None:
    demand = Demand()
    for at, pool, model, missed, number in sorted(told):
        if missed:
            demand.missed("", pool, model, int(number), at)
        else:
            demand.picked(model, pool, number, at)
    now = max((at for at, *_ in told), default=0.0) + after
    recent = [one for one in told if one[0] >= now - RECENT_S]
    found = demand.asked(now)
    assert set(found) == {pool for _, pool, *_ in recent}
    for pool, (whole, models) in found.items():
        for model, said in [*models.items(), ("", whole)]:
            of = [(missed, n) for _, p, m, missed, n in recent if p == pool and model in (m, "")]
            times = sorted(seconds for missed, seconds in of if not missed)
            tokens = [int(n) for missed, n in of if missed]
            assert said.missed == Waiting(len(tokens), sum(tokens))
            assert said.picks == len(times)
            assert (said.ttft_p90_s is None) == (not times)
            if times:
                assert said.ttft_p50_s == times[math.ceil(len(times) / 2) - 1]
                assert sum(t <= (said.ttft_p90_s or 0.0) for t in times) >= 0.9 * len(times)


def test_endless_models_and_requests_take_bounded_memory() -> None:
    demand = Demand()
    for number in range(1000):
        demand.missed("", "p", f"m{number}", 0, 1.0)
        demand.missed("", "q", "m", 1, 1.0)
    found = demand.asked(1.0)
    whole, models = found["p"]
    assert len(models) == 101
    assert whole.missed.requests == sum(one.missed.requests for one in models.values())
    assert found["q"][0].missed == Waiting(512, 512)
    assert demand.asked(1.0 + 2 * RECENT_S) == {}


def test_names_of_clients_are_bounded_and_can_be_encoded() -> None:
    demand = Demand()
    for model in ("\ud800", "x" * 100_000, "x" * 100_001):
        demand.missed("i" * 100_000, "p", model, 1, 1.0)
        demand.picked(model, "p", 1.0, 1.0)
    seen = picture(demand, (), (), 1.0, synced=True)
    assert len(encode(seen)) < 2000
    assert decode(encode(seen)) == seen
    assert {name: one.picks for name, one in seen.pools["p"].models.items()} == {"?": 1, "x" * 256: 2}


def test_a_retried_request_counts_once() -> None:
    demand = Demand()
    for at, id, tokens in ((0.0, "a", 7), (1.0, "b", 5), (9.0, "a", 0)):
        demand.missed(id, "p", "m", tokens, at)
    assert demand.asked(9.0)["p"][0].missed == Waiting(2, 12)
    assert demand.asked(12.0)["p"][0].missed == Waiting(1, 7)


class Queue(NamedTuple):
    requests: int
    uncached_tokens: int


def test_held_requests_are_reported_by_their_holder() -> None:
    demand = Demand()
    demand.held = lambda: {"p": Queue(3, 507), "r": Queue(0, 0)}
    demand.missed("", "p", "m", 9, 1.0)
    found = picture(demand, (), ["q"], 1.0, synced=True).pools
    assert set(found) == {"p", "q"}
    assert found["p"].asked == Asked(Waiting(3, 507), Waiting(1, 9))
    assert found["p"].models == {"m": Asked(missed=Waiting(1, 9))}
    assert found["q"] == PoolSignals()
    told = {(name, labels["pool"]): value for _, name, _, labels, value in samples(Signals(True, found))}
    assert (told["pool_held_requests", "p"], told["pool_queued_tokens", "p"]) == (3, 507)


numbers = st.integers(-(1 << 63), (1 << 64) - 1)


@given(st.lists(st.builds(LoadStat, *[numbers] * 10), max_size=3))
def test_any_report_of_engines_gives_a_readable_line(loads: list[LoadStat]) -> None:
    picker = Picker()
    for number, load in enumerate(loads):
        picker.add_endpoint(EndpointSpec(f"e{number}", f"10.0.0.{number}:1", pool="p"))
        picker.on_load(f"e{number}", load, 1.0)
    seen = picture(Demand(), picker.endpoints.values(), ["p"], 1.0, synced=True)
    assert decode(encode(seen)) == seen


def test_draining_endpoints_count_neither_as_room_nor_as_demand() -> None:
    picker = Picker()
    for name in ("stays", "goes", "sick"):
        picker.add_endpoint(EndpointSpec(name, f"10.0.0.{len(name)}:1", pool="p"))
        picker.on_load(name, LoadStat(0, 1.0, 3, 2, 0, 100, 10, 1000, 0, 0), 1.0)
    before = picture(Demand(), picker.endpoints.values(), (), 1.0, synced=True).pools["p"]
    picker.set_draining("goes", True)
    picker.set_ready("sick", False)
    after = picture(Demand(), picker.endpoints.values(), (), 1.0, synced=True).pools["p"]
    assert (before.ready, after.ready) == (3, 1)
    assert 3 * after.in_flight_requests == 2 * before.in_flight_requests > 0
    assert 3 * after.queued_tokens == 2 * before.queued_tokens
    assert (before.silent, after.silent) == (0, 0)
    later = picture(Demand(), picker.endpoints.values(), (), 100.0, synced=True).pools["p"]
    assert (later.ready, later.silent) == (1, 1), "its report is old"


def test_prompts_that_wait_apart_are_no_demand_for_the_endpoints_that_answer() -> None:
    picker = Picker()
    for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
        picker.add_endpoint(EndpointSpec(name, f"10.0.0.{ord(name)}:1", pool="p", role=role))
    busy = LoadStat(0, 1.0, 3, 2, 0, 100, 10, 1000, 0, 0)
    picker.on_load("p", busy, 1.0)
    apart = picture(Demand(), picker.endpoints.values(), (), 1.0, synced=True).pools["p"]
    assert (apart.ready, apart.in_flight_requests, apart.queued_tokens) == (1, 0, 0)
    picker.on_load("d", busy, 1.0)
    whole = picture(Demand(), picker.endpoints.values(), (), 1.0, synced=True).pools["p"]
    assert (whole.ready, whole.in_flight_requests > 0, whole.queued_tokens > 0) == (1, True, True)


def test_the_load_of_prompts_is_the_endpoints_that_they_keep_busy_and_fades() -> None:
    demand = Demand()
    for at in range(600):
        demand.picked("m", "p", 0.1, float(at), 2.5)
        demand.picked("m", "q", 0.1, float(at))
    found = demand.asked(600.0)
    assert found["p"][0].prompt_load == pytest.approx(2.5, abs=0.05)
    assert found["q"][0].prompt_load == found["p"][1]["m"].prompt_load == 0
    assert demand.asked(660.0)["p"][0].prompt_load == pytest.approx(2.5 / math.e, abs=0.05)
    assert demand.asked(1200.0) == {}
    told = [PoolSignals(Asked(prompt_load=load)) for load in (0.5, 1.5)]
    assert merged(told).asked.prompt_load == 2.0, "each picker knows its own"
    demand.picked("m", "p", 0.1, 1200.0, 1e300)
    assert demand.asked(1200.0)["p"][0].prompt_load == 10, "an engine that claims to be endlessly slow"


def test_a_line_is_sent_on_change_and_periodically() -> None:
    seen = [Signals()]

    async def listen() -> list[tuple[float, Signals]]:
        loop, heard = asyncio.get_running_loop(), []
        loop.call_later(0.6, lambda: seen.__setitem__(0, Signals(True)))
        async for line in stream(lambda: seen[0]):
            heard.append((loop.time(), decode(line)))
            if len(heard) == 4:
                return heard
        return []

    first, changed, again, once_more = virtual_loop.run(listen())
    assert first == (0.0, Signals())
    assert changed[1] == again[1] == Signals(True)
    assert changed[0] == 0.75
    assert again[0] - changed[0] == once_more[0] - again[0] == pytest.approx(2.0, abs=0.3)


async def lines(picker: RunningPicker) -> AsyncGenerator[Signals]:
    url = f"http://127.0.0.1:{picker.options.admin_port}/signals"
    async with client(timeout=60) as http, http.stream("GET", url) as answer:
        assert answer.headers["content-type"] == "application/x-ndjson"
        async for line in answer.aiter_lines():
            yield decode(line.encode())


async def told(heard: AsyncGenerator[Signals], so: Callable[[PoolSignals], bool]) -> PoolSignals:
    """Wait until the pool satisfies the condition, and return it."""
    async with asyncio.timeout(60):
        async for said in heard:
            if (pool := said.pools.get("default")) is not None and so(pool):
                return pool
    raise AssertionError("the stream has ended")


async def test_new_engines_and_picks_are_reported_and_the_stream_ends_with_the_picker() -> None:
    engine = FakeEngine(ready=False)
    await engine.start()
    try:
        async with running_picker("--endpoint", f"e={engine.address}") as picker:
            heard = lines(picker)
            assert (await anext(heard)).pools == {}, "nothing is known of the engine"
            engine.ready = True
            said = await told(heard, lambda pool: pool.ready == 1)
            assert said == PoolSignals(ready=1, silent=1), "the fake reports no load"
            assert await ask(picker, "tiny") == engine.address
            said = await told(heard, lambda pool: pool.asked.picks == 1)
            assert said.models == {"tiny": said.asked}
            assert said.asked.ttft_p90_s is not None
            name = "default"
            metrics = await picker.metrics()
            assert metrics[f'treeline_epp_pool_ready_endpoints{{pool="{name}"}}'] == 1
            assert metrics[f'treeline_epp_pool_predicted_ttft_seconds{{pool="{name}",quantile="0.9"}}'] >= 0
            await picker.stop()
            with contextlib.suppress(httpx.RemoteProtocolError):
                async for _ in heard:  # it ends with the picker
                    pass
    finally:
        await engine.stop()


async def test_a_stream_outlives_the_time_limit_of_pages_and_streams_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("treeline_epp.admin._TIMEOUT_S", 0.2)
    monkeypatch.setattr("treeline_epp.admin._MOST_STREAMS", 2)
    more, ended = asyncio.Event(), asyncio.Event()

    async def pieces() -> AsyncGenerator[bytes]:
        try:
            yield b"one\n"
            await more.wait()
            yield b"two\n"
            await asyncio.Event().wait()
        finally:
            ended.set()

    admin = PageServer({}, streams={"/s": Stream(pieces, "text/plain")})
    port = await admin.start("127.0.0.1", 0)
    async with client(base_url=f"http://127.0.0.1:{port}") as http, http.stream("GET", "/s") as first:
        heard = first.aiter_lines()
        assert await anext(heard) == "one"
        async with http.stream("GET", "/s"):
            refused = await http.get("/s")
            assert (refused.status_code, refused.json()) == (503, {"error": "2 clients follow it already"})
        silent = await asyncio.open_connection("127.0.0.1", port)
        assert await asyncio.wait_for(silent[0].read(), 60) == b"", "the time of a page has passed"
        more.set()
        assert await anext(heard) == "two"
        ended.clear()
        await admin.stop()
        await asyncio.wait_for(ended.wait(), 60)
        silent[1].close()
