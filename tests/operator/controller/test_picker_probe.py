from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from support.virtual_loop import run
from treeline_operator.api.parts import API_VERSION
from treeline_operator.controller.observe import Observer
from treeline_operator.controller.picker_probe import PickerProbe, merge
from treeline_operator.controller.pickers import Address, PickerClient
from treeline_operator.controller.store import Store
from treeline_operator.world import Key, PickerEndpoint, PickerView, Platform, PoolRouting

NOW = datetime(2026, 11, 1, tzinfo=UTC)


def endpoint(name: str, ready: bool = True, draining: bool = False) -> PickerEndpoint:
    return PickerEndpoint(name, f"{name}:8000", ready, draining)


def test_pickers_must_agree() -> None:
    one = PickerView(True, {"p": (endpoint("a"), endpoint("b"), endpoint("c"))}, {"p": ("x", "y")})
    two = PickerView(False, {"p": (endpoint("a"), endpoint("b", ready=False, draining=True))}, {"p": ("y",)})
    assert merge([one]) == one
    assert merge([one, two]) == PickerView(
        False, {"p": (endpoint("a"), endpoint("b", ready=False, draining=True))}, {"p": ("y",)}
    )
    assert merge([]) is None


def test_a_pools_routing_is_that_of_its_least_informed_picker() -> None:
    good, bad = PoolRouting("events"), PoolRouting("history", "TokenizerUnavailable", "it is gated")
    views = [PickerView(True, routing={"p": good}), PickerView(True, routing={"p": bad, "q": good}), PickerView(True)]
    for some in (views, views[::-1]):
        merged = merge(some)
        assert merged is not None
        assert merged.routing == {"p": bad, "q": good}


def test_a_cache_that_one_picker_knows_to_be_off_is_off() -> None:
    views = [
        PickerView(True, {"p": (msgspec.structs.replace(endpoint("a"), cache_sources_off=off),)})
        for off in (("tree",), (), ("disk",))
    ]
    merged = merge(views)
    assert merged is not None
    assert merged.pools["p"][0].cache_sources_off == ("disk", "tree")


@pytest.mark.parametrize(
    ("told", "agreed"),
    [
        (((3, True), (1, True)), 3),
        (((0, True), (0, True)), 0),
        (((0, True), (None, True)), None),
        (((0, True), (0, False)), None),
        (((2, True), (None, False)), 2),
    ],
)
def test_one_picker_does_not_report_anothers_requests(told: Any, agreed: int | None) -> None:
    views = [PickerView(True, {"p": (PickerEndpoint("a", "a:1", False, d, n),)}, at=NOW) for n, d in told]
    merged = merge([*views[:-1], replace(views[-1], at=NOW - timedelta(seconds=1))])
    assert merged is not None
    assert merged.pools["p"][0].in_flight == agreed
    assert merged.at == NOW - timedelta(seconds=1)


class Picker:
    """A picker with a settable answer, which records the times of requests."""

    def __init__(self) -> None:
        self.answer: dict[str, Any] | None = {"synced": True, "pools": {}}
        self.asked: list[float] = []
        self.port = 9004

    async def ask(self, address: Address) -> bytes:
        assert address == ("10.0.0.9", self.port)
        self.asked.append(round(asyncio.get_running_loop().time(), 2))
        if self.answer is None:
            raise ConnectionError("refused")
        return msgspec.json.encode(self.answer)

    def lists(self, *names: str) -> None:
        endpoints = [{"name": name, "address": f"{name}:1", "ready": True} for name in names]
        self.answer = {
            "synced": True,
            "pools": {"p": {"models": ["m"], "endpoints": endpoints}},
            "detail": {},
        }


def picker_pod(version: int, ip: str = "10.0.0.9", ready: str = "True") -> dict[str, Any]:
    marks = {"treeline.dev/gateway": "treeline", "treeline.dev/component": "epp"}
    meta = {"name": "epp", "namespace": "n", "uid": "e", "resourceVersion": str(version), "labels": marks}
    status = {"podIP": ip, "conditions": [{"type": "Ready", "status": ready}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "status": status}


def set_up() -> tuple[Store, Observer, Picker, PickerProbe, list[Key]]:
    store, picker, changed = Store(), Picker(), []
    meta = {"name": "p", "namespace": "n", "uid": "p", "resourceVersion": "1"}
    store.put({"apiVersion": API_VERSION, "kind": "InferencePool", "metadata": meta, "spec": {}})
    observer = Observer(store, Platform())
    return store, observer, picker, PickerProbe(observer, picker, changed.append), changed


def test_the_picker_is_asked_seldom_unless_a_pool_waits() -> None:
    async def main() -> None:
        store, observer, picker, probe, changed = set_up()
        store.put(picker_pod(2))
        task = asyncio.create_task(probe.run())
        probe.look("n", "treeline")
        await asyncio.sleep(35)
        assert picker.asked == [0, 10, 20, 30]
        picker.asked.clear()
        probe.wait("n", "treeline", "p", True)
        await asyncio.sleep(1.7)
        assert picker.asked == [35, 35.5, 36, 36.5]
        assert changed == [Key("pool", "n", "p")], "reported once: the picker answers at all"
        picker.lists("a")
        await asyncio.sleep(1)
        assert changed == [Key("pool", "n", "p")] * 2
        assert observer.pickers["n", "treeline"].pools["p"] == (PickerEndpoint("a", "a:1", True),)
        probe.wait("n", "treeline", "p", False)
        picker.asked.clear()
        await asyncio.sleep(25)
        assert len(picker.asked) <= 3
        await probe.stop()
        await task

    run(main())


def test_load_of_pods_is_a_change_while_they_drain() -> None:
    async def main() -> None:
        store, observer, picker, probe, changed = set_up()
        store.put(picker_pod(2))
        task = asyncio.create_task(probe.run())
        probe.wait("n", "treeline", "p", True)
        for draining, news in ((False, 1), (True, 3)):
            changed.clear()
            for count in (2, 1, 0):
                told = {"name": "a", "address": "a:1", "draining": draining, "in_flight": count}
                picker.answer = {
                    "synced": True,
                    "pools": {"p": {"endpoints": [{**told, "cached_tokens": 7}]}},
                }
                await asyncio.sleep(1)
            assert len(changed) == news
        view = observer.pickers["n", "treeline"]
        assert view.pools["p"] == (PickerEndpoint("a", "a:1", False, True, 0, 7),)
        assert view.at is not None
        assert not observer.silent
        picker.answer = None
        await asyncio.sleep(5)
        assert list(observer.silent) == [("n", "treeline")]
        await probe.stop()
        await task

    run(main())


def test_a_cache_switched_off_is_a_change() -> None:
    async def main() -> None:
        store, _, picker, probe, changed = set_up()
        store.put(picker_pod(2))
        task = asyncio.create_task(probe.run())
        probe.wait("n", "treeline", "p", True)
        for off, news in (([], 1), (["disk"], 2), (["disk"], 2), ([], 3)):
            told = {"name": "a", "address": "a:1", "cache_sources_off": off}
            picker.answer = {"synced": True, "pools": {"p": {"endpoints": [told]}}}
            await asyncio.sleep(1)
            assert len(changed) == news
        await probe.stop()
        await task

    run(main())


def test_another_routing_mode_is_a_change() -> None:
    async def main() -> None:
        store, observer, picker, probe, changed = set_up()
        store.put(picker_pod(2))
        task = asyncio.create_task(probe.run())
        probe.wait("n", "treeline", "p", True)
        for routing, news in (
            (None, 1),
            ({"way": "history", "reason": "NoEvents", "message": "x" * 9999}, 1),
            (None, 1),
        ):
            changed.clear()
            picker.answer = {"synced": True, "pools": {"p": {"endpoints": [], "routing": routing}}}
            await asyncio.sleep(3)
            assert len(changed) == news
            found = observer.pickers["n", "treeline"].routing.get("p")
            assert found == (PoolRouting("history", "NoEvents", "x" * 400) if routing else None)
        await probe.stop()
        await task

    run(main())


def test_a_pickers_report_is_forgotten_when_it_is_silent_or_gone() -> None:
    async def main() -> None:
        store, observer, picker, probe, changed = set_up()
        store.put(picker_pod(2))
        picker.lists("a")
        task = asyncio.create_task(probe.run())
        probe.look("n", "treeline")
        await asyncio.sleep(1)
        picker.answer = None
        await asyncio.sleep(20)
        assert observer.pickers, "it may only be busy"
        await asyncio.sleep(20)
        assert not observer.pickers
        picker.lists("a")
        await asyncio.sleep(10)
        assert observer.pickers
        store.put(picker_pod(3, ready="False"))
        probe.look("n", "treeline")
        await asyncio.sleep(1)
        assert not observer.pickers
        asked = len(picker.asked)
        await asyncio.sleep(100)
        assert len(picker.asked) == asked, "there is no picker to ask"
        assert len(changed) == 4
        await probe.stop()
        await task

    run(main())


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b'{"pools": {"p": {"endpoints": [{"name": 3}]}}}', b"<html>", b'{"pools":{"\xff":{}}}', b"[" * 9999],
)
def test_an_invalid_answer_gives_no_view(body: bytes) -> None:
    async def main() -> None:
        store, observer, picker, probe, _ = set_up()
        store.put(picker_pod(2))

        async def ask(address: Address) -> bytes:
            return body

        picker.lists("a")
        task = asyncio.create_task(probe.run())
        probe.look("n", "treeline")
        await asyncio.sleep(1)
        assert observer.pickers
        picker.ask = ask  # type: ignore[method-assign]
        await asyncio.sleep(60)
        assert not observer.pickers
        await probe.stop()
        await task

    run(main())


async def test_a_picker_is_asked_over_http() -> None:
    app = web.Application()
    body = b"x" * 3_000_000
    replies = {"/endpoints": web.Response(body=body)}
    app.router.add_get("/endpoints", lambda request: replies[request.path])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with aiohttp.ClientSession() as session:
        asker, port = PickerClient(session), runner.addresses[0][1]
        assert await asker.ask(("127.0.0.1", port)) == body
        replies["/endpoints"] = web.Response(status=500)
        with pytest.raises(ConnectionError, match="answered 500"):
            await asker.ask(("127.0.0.1", port))
        await runner.cleanup()
        with pytest.raises(ConnectionError, match=r"127\.0\.0\.1"):
            await asker.ask(("127.0.0.1", port))
