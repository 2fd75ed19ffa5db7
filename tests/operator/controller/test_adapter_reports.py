"""What pods say of their adapters is followed pod by pod; one that says nothing is noticed and delays no other."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from support.virtual_loop import run
from treeline_kube.errors import Unavailable
from treeline_operator.controller.adapters import AdapterReports, parse
from treeline_operator.controller.observe import Observer, keys_for_change
from treeline_operator.controller.store import Change, Store
from treeline_operator.world import Key, Observed, Platform
from treeline_wire.labels import ADAPTERS, POOL
from treeline_wire.live_adapters import AdapterReport, AdapterWish, mark, wishes_text

SPACE = Key("models", "n")
WISHED = wishes_text([AdapterWish("sql@0123456789", "hf://o/a")])


def pod(name: str, version: int, text: str | None = "[]") -> dict[str, Any]:
    meta = {"name": name, "namespace": "n", "uid": name, "resourceVersion": str(version), "labels": {POOL: "p"}}
    annotations = {} if text is None else {"annotations": {ADAPTERS: text}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta | annotations}


class Logs:
    """The pods' logs; a pod without one waits for ever, like a node that is gone."""

    def __init__(self) -> None:
        self.text: dict[str, str] = {}
        self.reads: list[str] = []

    async def logs(self, namespace: str, pod: str, container: str, *, tail_lines: int) -> str:
        assert (namespace, container) == ("n", "adapters")
        self.reads.append(pod)
        if pod not in self.text:
            await asyncio.sleep(20)
            raise Unavailable("no kubelet")
        return self.text[pod]

    def say(self, pod: str, text: str, **report: Any) -> None:
        self.text[pod] = "WARNING words\n" + msgspec.json.encode(AdapterReport(mark(text), **report)).decode()


def test_the_last_report_of_a_log_counts() -> None:
    assert parse("") is parse("words\n") is parse('{"asked": 5}') is None
    assert parse('{"asked": "a"}\n{"asked": "b", "loaded": {"x": "d"}}\nwords\n{"ask') == AdapterReport("b", {"x": "d"})


def test_news_of_a_pod_arrive_and_a_pod_that_says_nothing_is_noticed_and_delays_no_other() -> None:
    async def main() -> None:
        store, source, changed = Store(), Logs(), []
        loop = asyncio.get_running_loop()
        reports = AdapterReports(store, source, changed.append, loop.time)  # type: ignore[arg-type]
        task = asyncio.create_task(reports.run())
        observer = Observer(store, Platform())
        for name in ("good", "mute"):
            store.put(pod(name, 1))
        store.put(pod("other", 1, None))

        def now() -> dict[str, tuple[dict[str, str], bool]]:
            return {one.name: (one.report.loaded, one.silent) for one in reports.of(observer.adapter_pods("n", "p"))}

        source.say("good", "[]")
        assert now() == {"good": ({}, False), "mute": ({}, False)}
        await asyncio.sleep(2)
        assert changed == [SPACE]
        store.put(pod("good", 2, WISHED))
        assert now()["good"] == ({}, False)
        await asyncio.sleep(2)
        source.say("good", WISHED, loaded={"sql@0123456789": "d"})
        await asyncio.sleep(2)
        assert now() == {"good": ({"sql@0123456789": "d"}, False), "mute": ({}, False)}
        await asyncio.sleep(60)
        assert now()["mute"] == ({}, True)
        before = source.reads.count("good")
        await asyncio.sleep(30)
        assert source.reads.count("good") - before <= 4, "what is settled is looked at now and then"
        source.say("mute", "[]")
        await asyncio.sleep(31)
        assert now()["mute"] == ({}, False)
        for name, version in (("good", "2"), ("mute", "1")):
            known = next(one for one in observer.adapter_pods("n", "p") if one.ref.name == name)
            store.remove(known.ref, known.uid, version + "9")
        await asyncio.sleep(15)
        reads = len(source.reads)
        await asyncio.sleep(60)
        assert len(source.reads) == reads, "pods that are gone are not asked"
        await reports.stop()
        await task

    run(main())


def test_a_change_of_a_pod_that_loads_adapters_is_one_for_the_models_of_its_namespace() -> None:
    plain, able = Observed.of(pod("a", 1, None)), Observed.of(pod("a", 1))
    for before, after, expected in (
        (None, able, True),
        (able, None, True),
        (None, plain, False),
        (plain, plain, False),
    ):
        keys = keys_for_change(Change(able.ref, before, after, frozenset()), Store())
        assert (SPACE in keys) is expected
