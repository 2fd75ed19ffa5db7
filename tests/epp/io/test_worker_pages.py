"""Pages of a picker with workers: one made of several, and what is said of those that do not answer."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import msgspec
import pytest
from support.http import client
from support.ports import free_ports
from treeline_epp import debug_pages, signals
from treeline_epp.admin import Handler, Page, PageServer
from treeline_epp.console.pages import DATA
from treeline_epp.options import options_of
from treeline_epp.workers import asking, merging, pages
from treeline_epp.workers.link import Status
from treeline_epp.workers.pages import Pages
from treeline_epp.workers.team import Place
from treeline_epp.workers.totals import Totals
from treeline_wire.signals import Asked, PoolSignals, Signals, Waiting, decode

FIRST, SECOND = Place(0, 101, Status(), 0.0), Place(1, 102, Status(), 0.0)


# ---- metrics ------------------------------------------------------------------------------------------------------


def page(total: float, *, streams: float = 0.0, endpoint: str = "a", peers: float = 1.0) -> str:
    return f"""# HELP x_total Some.
# TYPE x_total counter
x_total{{endpoint="{endpoint}"}} {total}
# HELP y_total Others.
# TYPE y_total counter
y_total{{code="{endpoint}"}} {total}
# HELP t Time.
# TYPE t histogram
t_bucket{{le="0.1"}} {total}
t_bucket{{le="+Inf"}} {total + 1}
t_count {total + 1}
t_sum 0.5
# HELP treeline_epp_extproc_streams Open.
# TYPE treeline_epp_extproc_streams gauge
treeline_epp_extproc_streams {streams}
# HELP treeline_epp_endpoints Known.
# TYPE treeline_epp_endpoints gauge
treeline_epp_endpoints{{state="ready"}} {5 + streams}
# HELP treeline_epp_peers Heard.
# TYPE treeline_epp_peers gauge
treeline_epp_peers {peers}
"""


def values(shown: bytes) -> dict[str, float]:
    lines = (line.rsplit(" ", 1) for line in shown.decode().splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}


OWN = "# TYPE own gauge\nown 1.0\n"


def test_what_each_counts_is_summed_and_what_all_know_is_said_once() -> None:
    shown = Totals().page({101: page(2, streams=1, peers=0), 102: page(3, streams=2, endpoint="b")}, OWN, [101, 102])
    assert values(shown) == {
        'x_total{endpoint="a"}': 2,
        'x_total{endpoint="b"}': 3,
        'y_total{code="a"}': 2,
        'y_total{code="b"}': 3,
        't_bucket{le="0.1"}': 5,
        't_bucket{le="+Inf"}': 7,
        "t_count": 7,
        "t_sum": 1.0,
        "treeline_epp_extproc_streams": 3,
        'treeline_epp_endpoints{state="ready"}': 7,
        "treeline_epp_peers": 0,
        "own": 1,
    }
    assert "# TYPE x_total counter" in shown.decode().splitlines()
    assert Totals().page({}, "", []) == b""


def test_counters_never_fall_when_workers_die_or_do_not_answer() -> None:
    totals = Totals()

    def total(told: Mapping[int, str], living: list[int]) -> tuple[float, float, float, float]:
        found = values(totals.page(told, "", living))
        return (
            found['y_total{code="a"}'],
            found["t_count"],
            found['x_total{endpoint="a"}'],
            found.get("treeline_epp_extproc_streams", 0),
        )

    assert total({1: page(10, streams=4), 2: page(20, streams=5)}, [1, 2]) == (30, 32, 30, 9)
    assert total({1: page(11, streams=4)}, [1, 2]) == (31, 33, 31, 4), "the other does not answer: as it last said"
    assert total({1: page(12, streams=4)}, [1]) == (32, 34, 32, 4), "it has ended: it stays in the sum"
    assert total({1: page(13), 3: page(1, streams=1)}, [1, 3]) == (34, 37, 34, 1), "its successor begins with nothing"
    assert total({1: page(13), 3: page(2)}, [1, 3]) == (35, 38, 35, 0), "and it is counted once"
    assert total({}, []) == (35, 38, 35, 0), "nobody answers"


def test_an_endpoint_that_has_gone_leaves_no_series_of_workers_that_have_ended() -> None:
    totals = Totals()
    totals.page({1: page(10, endpoint="gone"), 2: page(20, endpoint="here")}, "", [1, 2])
    found = values(totals.page({2: page(21, endpoint="here")}, "", [2], {"here"}))
    assert 'x_total{endpoint="gone"}' not in found
    assert found['y_total{code="gone"}'] == 10, "what is not about an endpoint stays"
    assert found['x_total{endpoint="here"}'] == 21


def test_what_only_a_worker_that_has_ended_counted_of_an_endpoint_stays_as_long_as_the_endpoint() -> None:
    totals = Totals()
    told = {1: page(10, endpoint="a"), 2: page(20, endpoint="b")}
    assert values(totals.page(told, "", [1, 2], {"a", "b"}))['x_total{endpoint="a"}'] == 10
    for endpoints in ({"a", "b"}, None):
        found = values(totals.page({2: page(21, endpoint="b")}, "", [2], endpoints))
        assert found['x_total{endpoint="a"}'] == 10, "the other never chose it"
    assert values(totals.page({2: page(21)}, "", [2], {"a", "b"}))['x_total{endpoint="a"}'] == 31
    assert 'x_total{endpoint="a"}' not in values(totals.page({2: page(21, endpoint="b")}, "", [2], {"b"}))


async def test_they_are_summed_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    where: list[threading.Thread] = []
    monkeypatch.setattr(Totals, "page", lambda *_: where.append(threading.current_thread()) or b"sum")
    assert (await Pages(list, bytes).metrics({})).body == b"sum"
    assert where != [threading.current_thread()], "EDS and health go on"


# ---- merging ------------------------------------------------------------------------------------------------------


def test_endpoints_are_listed_once_with_the_most_that_is_known_of_each() -> None:
    def said(*endpoints: dict[str, Any], synced: bool = True) -> dict[str, Any]:
        pool = {"models": ["m"], "policy": "p", "endpoints": list(endpoints), "routing": None}
        return {"synced": synced, "pools": {"p": pool}, "detail": {}}

    a = {"name": "a", "address": "1:1", "ready": True, "draining": False, "in_flight": 3, "cached_tokens": 7}
    b = a | {"name": "b"}
    other = a | {"ready": False, "draining": True, "in_flight": None, "cached_tokens": 9}
    found = merging.listing([(FIRST, said(other, synced=False)), (SECOND, said(a, b))])
    assert found["synced"]
    first, second = found["pools"]["p"]["endpoints"]
    assert first == a | {"draining": True, "cached_tokens": 9}
    assert second == b, "also where one has not heard of it yet"
    empty = {"synced": True, "pools": {}, "detail": {}}
    assert merging.listing([(FIRST, empty), (SECOND, said(a))])["pools"]["p"]["endpoints"] == [a]


def test_each_workers_subscriptions_are_shown_and_one_that_is_behind_before_others() -> None:
    def said(state: str, reservations: int, *, failing: bool, silent: bool) -> dict[str, Any]:
        publisher = {"rank": 0, "state": state, "live": state == "live"}
        one = {"name": "a", "publishers": [publisher], "subscription": state, "unfollowed": False}
        return {"endpoints": [one | {"reservations": reservations, "failing": failing, "silent": silent}]}

    told = [
        (FIRST, said("live", 2, failing=False, silent=True)),
        (SECOND, said("suspect", 3, failing=True, silent=False)),
    ]
    (one,) = merging.described(told)["endpoints"]
    assert (one["subscription"], one["reservations"], one["failing"], one["silent"]) == ("suspect", 3, True, False)
    assert [(publisher["worker"], publisher["state"]) for publisher in one["publishers"]] == [
        (0, "live"),
        (1, "suspect"),
    ]


def test_trees_are_shown_with_what_each_has() -> None:
    first = {"totals": {"nodes": 3, "pods": 1}, "pods": ["a"]}
    second = {"totals": {"nodes": 4, "pods": 1}, "pods": ["a", "b"]}
    assert merging.tree([(FIRST, first), (SECOND, second)]) == {
        "totals": {"nodes": 4, "pods": 1},
        "pods": ["a", "b"],
        "workers": {"0": first["totals"], "1": second["totals"]},
    }
    told = [(FIRST, {"pod": "a", "blocks": ["9", "10"]}), (SECOND, {"pod": "a", "blocks": ["10", "-1"]})]
    assert merging.tree(told) == {"pod": "a", "blocks": ["-1", "9", "10"], "workers": {"0": 2, "1": 2}}


def test_decisions_are_interleaved_by_their_time() -> None:
    def said(*at: float) -> dict[str, Any]:
        return {"decisions": [{"at": one, "endpoint": "a"} for one in at]}

    found = merging.decisions([(FIRST, said(5.0, 2.0)), (SECOND, said(4.0, 3.0, 1.0))], 4)["decisions"]
    assert [(one["at"], one["worker"]) for one in found] == [(5.0, 0), (4.0, 1), (3.0, 1), (2.0, 0)]


def test_an_explanation_is_that_of_most_workers_and_says_what_each_would_choose() -> None:
    def said(chosen: str) -> dict[str, Any]:
        return {"policy": "p", "endpoints": [{"endpoint": "z"}, {"endpoint": chosen, "rank": 1}]}

    third = Place(2, 103, Status(), 0.0)
    found = merging.explained([(FIRST, said("a")), (SECOND, said("b")), (third, said("b"))])
    assert found["endpoints"][1]["endpoint"] == "b"
    assert found["workers"] == {"0": "a", "1": "b", "2": "b"}
    refused = {"policy": "p", "refusal": "none is ready"}
    assert merging.explained([(FIRST, refused)]) == refused | {"workers": {"0": "none is ready"}}


def console_page(count: int, *shown: float, prefixes: bool = False) -> dict[str, Any]:
    numbered = [{"number": count - place, "at": at} for place, at in enumerate(shown)]
    out: dict[str, Any] = {
        "ready": True,
        "texts_allowed": False,
        "decisions": {"count": count, "next": count, "shown": numbered},
        "endpoints": {"count": 1, "shown": [{"name": "a", "in_flight": count, "silent": False}]},
    }
    return out | ({"prefixes": [{"model": "m", "requests": count}]} if prefixes else {})


def test_the_console_goes_on_where_it_was_with_each_worker_and_shows_a_new_one_from_its_first() -> None:
    told = [(FIRST, console_page(7, 5.0, 2.0, prefixes=True)), (SECOND, console_page(3, 4.0))]
    found = merging.console(told)
    assert (found["decisions"]["count"], found["decisions"]["next"]) == (10, "101.7,102.3")
    assert [(one["at"], one["worker"]) for one in found["decisions"]["shown"]] == [(5.0, 0), (4.0, 1), (2.0, 0)]
    assert found["endpoints"] == {"count": 1, "shown": [{"name": "a", "in_flight": 7, "silent": False}]}
    assert found["prefixes"] == [{"worker": 0, "model": "m", "requests": 7}]
    query = {"after": found["decisions"]["next"], "texts": "1"}
    new = Place(1, 103, Status(), 0.0)
    assert [merging.console_query(query, place)["after"] for place in (FIRST, SECOND, new)] == ["7", "3", "0"]
    assert merging.console_query(query, FIRST)["texts"] == "1"
    assert merging.console_query({}, FIRST)["after"] == "0"
    assert merging.console_query({"after": "x"}, FIRST)["after"] == "x", "that is for the worker to refuse"


def test_demand_adds_up_where_each_has_its_own() -> None:
    def said(held: int, queued: int, ready: int) -> Signals:
        return Signals(True, {"p": PoolSignals(Asked(Waiting(held, 10), picks=held), {}, ready, queued, 5, 7, 0)})

    found = merging.demand([said(1, 100, 2), said(2, 90, 3), Signals()], partial=False)
    assert found == Signals(True, {"p": PoolSignals(Asked(Waiting(3, 20), picks=3), {}, 3, 100, 5, 7, 0)})
    assert merging.demand([said(1, 1, 1)], partial=True).partial
    assert merging.demand([], partial=True) == Signals(partial=True)


# ---- asking -------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def asked_of(
    *workers: Mapping[str, Handler], silent: Place | None = None
) -> AsyncIterator[tuple[Pages, Callable[[str], Any]]]:
    """The pages of a parent whose workers have these, and what gets one of them from its admin port."""
    servers = [
        PageServer(one, questions={debug_pages.EXPLAIN: lambda data: Page({"said": len(data)})}) for one in workers
    ]
    ports = [await server.start("127.0.0.1", 0) for server in servers]
    places = [Place(index, 100 + index, Status(True, 0, 0, port, port), 0.0) for index, port in enumerate(ports)]
    if silent is not None:
        places.append(silent)
    made = Pages(lambda: places, lambda: b"")
    (port,) = free_ports(1)
    argv = ["--endpoint", "a=127.0.0.1:1", "--workers", "2", "--enable-debug-endpoints", "--admin-port", str(port)]
    admin = made.admin(lambda: True, options_of(argv))
    await admin.start("127.0.0.1", port)

    async def get(path: str) -> Any:
        async with client(timeout=60) as http:
            return await http.get(f"http://127.0.0.1:{port}{path}")

    try:
        yield made, get
    finally:
        await admin.stop()
        while HANGING:
            HANGING.pop().set()
        for server in servers:
            await server.stop()


def answers(*decisions: float) -> dict[str, Handler]:
    found = Page({"decisions": [{"at": at} for at in decisions]})
    return {debug_pages.DECISIONS: lambda _query: found}


HANGING: list[asyncio.Event] = []


async def never(_query: Mapping[str, str]) -> Page:
    """It is answered when its test is over."""
    HANGING.append(asyncio.Event())
    await HANGING[-1].wait()
    return Page({})


async def test_a_worker_that_does_not_answer_is_named_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "PATIENCE_S", 0.2)
    hung = {debug_pages.DECISIONS: never}
    late = Place(2, 7, Status(True, 0, 0, 1, 1), 4.2)
    async with asked_of(answers(2.0, 1.0), hung, silent=late) as (_, get):
        found = (await get(debug_pages.DECISIONS)).json()
        assert [one["at"] for one in found["decisions"]] == [2.0, 1.0]
        assert found["unanswered"] == [
            {"worker": 1, "why": "it has not answered within 0.2 s"},
            {"worker": 2, "why": "it says nothing for 4.2 s"},
        ]
    async with asked_of(hung, silent=Place(1, 0, Status(), 0.0)) as (_, get):
        found = await get(debug_pages.DECISIONS)
        assert found.status_code == 503
        assert [one["why"] for one in found.json()["unanswered"]][1] == "it has ended, and another starts"


async def test_what_workers_refuse_is_refused_in_their_words() -> None:
    wrong: dict[str, Handler] = {debug_pages.DECISIONS: lambda _query: Page({"error": "no number"}, 400)}
    async with asked_of(wrong, wrong) as (_, get):
        found = await get(f"{debug_pages.DECISIONS}?last=x")
        assert (found.status_code, found.json()) == (400, {"error": "no number"})
        assert (await get(debug_pages.EXPLAIN)).status_code == 405, "it is asked by POST"
    async with asked_of(answers(1.0), {debug_pages.DECISIONS: lambda _query: Page({}, 404)}) as (_, get):
        assert [one["at"] for one in (await get(debug_pages.DECISIONS)).json()["decisions"]] == [1.0], "one has it"


async def test_the_consoles_data_is_for_its_own_page_and_what_is_debugged_for_clients_here() -> None:
    data: dict[str, Handler] = {DATA: lambda query: Page(console_page(int(query["after"]), 1.0))}
    async with asked_of(data, data) as (_, get):
        found = await get(f"{DATA}?after=100.4,101.5")
        assert found.json()["decisions"]["next"] == "100.4,101.5", "each is asked from where it was"
        assert found.headers["cache-control"] == "no-store"
        html = await get("/debug/console")
        assert "default-src 'none'" in html.headers["content-security-policy"]
    foreign = {"sec-fetch-site": "cross-site"}
    async with asked_of(data) as (made, _):
        server = made.admin(lambda: True, options_of(["--endpoint", "a=127.0.0.1:1", "--enable-debug-endpoints"]))
        port = await server.start("127.0.0.1", 0)
        async with client() as http:
            for path in (DATA, "/debug/console", "/debug/endpoints", "/debug/tree", debug_pages.DECISIONS):
                assert (await http.get(f"http://127.0.0.1:{port}{path}", headers=foreign)).status_code == 403, path
            assert (
                await http.post(f"http://127.0.0.1:{port}{debug_pages.EXPLAIN}", headers=foreign)
            ).status_code == 403
        await server.stop()


async def test_signals_are_streamed_of_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = PoolSignals(Asked(picks=2), {}, 1, 10, 3, 4, 0)
    now: dict[str, Handler] = {signals.NOW: lambda _query: Page(Signals(True, {"p": pool}))}
    async with asked_of(now, now) as (made, _):
        stream = signals.stream(made._demand)
        said = decode(await anext(stream))
        assert said == Signals(True, {"p": msgspec.structs.replace(pool, asked=Asked(picks=4))})
        await stream.aclose()
    monkeypatch.setattr(pages, "_QUICK_S", 0.05)
    async with asked_of(now, {signals.NOW: never}) as (made, _):
        said = await made._demand()
        assert (said.partial, said.pools["p"].asked.picks) == (True, 2)


async def test_a_probe_is_answered_while_a_worker_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_QUICK_S", 0.1)
    well: dict[str, Handler] = {"/ready": lambda _query: Page({"ready": True, "kubernetes": {"synced": True}})}
    async with asked_of({"/ready": never}, well) as (made, get):
        found = await get("/ready")
        assert (found.status_code, found.json()["kubernetes"]) == (200, {"synced": True})
        assert [one["worker"] for one in found.json()["unanswered"]] == [0]
        assert (await made._ready(lambda: False, {})).status == 503, "whatever workers say"


async def test_metrics_say_how_many_do_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "PATIENCE_S", 0.2)
    hangs = asyncio.Event()

    async def second(_query: Mapping[str, str]) -> Page:
        return await never({}) if hangs.is_set() else Page(page(5).encode(), content_type="text/plain")

    first: dict[str, Handler] = {"/metrics": lambda _query: Page(page(2).encode(), content_type="text/plain")}
    async with asked_of(first, {"/metrics": second}) as (made, _):
        for silent in (0, 1):
            shown = await made.metrics({})
            assert isinstance(shown.body, bytes)
            assert values(shown.body)['y_total{code="a"}'] == 7
            assert next(iter(made.samples()))[4] == silent
            hangs.set()
