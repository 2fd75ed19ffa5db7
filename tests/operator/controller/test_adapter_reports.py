"""What pods say of their adapters; one that says nothing is noticed, and holds up no other."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
from support.virtual_loop import run
from treeline_kube.connection import MAX_CONNECTIONS
from treeline_kube.errors import Unavailable
from treeline_operator.controller.adapters import heard, parse
from treeline_operator.controller.observe import Observer, keys_for_change
from treeline_operator.controller.store import Change, Store
from treeline_operator.world import Key, Observed, Platform
from treeline_wire.labels import ADAPTERS, POOL
from treeline_wire.live_adapters import AdapterReport

SPACE = Key("models", "n")
SAID = AdapterReport({"sql@0123456789": "d"}, {"poet@0123456789": "no"})
LONG = [*("older\n" * 99).splitlines(), msgspec.json.encode(SAID).decode(), *("warning\n" * 50).splitlines()]


def pod(name: str, text: str | None = "[]") -> dict[str, Any]:
    meta = {"name": name, "namespace": "n", "uid": name, "resourceVersion": "1", "labels": {POOL: "p"}}
    annotations = {} if text is None else {"annotations": {ADAPTERS: text}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta | annotations}


class Logs:
    async def logs(self, namespace: str, pod: str, container: str, *, tail_lines: int) -> str:
        assert (namespace, container) == ("n", "adapters")
        match pod:
            case "hangs":
                await asyncio.sleep(3600)
            case "refuses":
                raise Unavailable("no kubelet")
            case "young":
                return ""
            case "wordy":
                return "\n".join(LONG[-tail_lines:])
        return "words\n" + msgspec.json.encode(SAID).decode()


def test_the_last_report_of_a_log_counts() -> None:
    assert parse("") is parse("words\n") is parse('{"loaded": 5}') is None
    assert parse('{"loaded": {}}\n{"loaded": {"x": "d"}}\nwords\n{"load') == AdapterReport({"x": "d"})


@pytest.mark.parametrize(
    "line",
    [
        '{"loaded": {"a": ' + "[" * 99_999,
        '{"x": ' + '{"x": ' * 99_999,
        json.dumps({"loaded": {"a": "d" * 17}}),
        json.dumps({"errors": {"a": "e" * 301}}),
    ],
    ids=["deep", "unknown", "long digest", "long error"],
)
def test_what_no_container_of_ours_writes_is_no_report(line: str) -> None:
    assert parse(f'{{"loaded": {{"x": "d"}}}}\n{line}') == AdapterReport({"x": "d"})


def test_pods_are_asked_at_once_and_those_that_do_not_answer_are_known() -> None:
    store = Store()
    for name in ("good", "hangs", "refuses", "young", "wordy"):
        store.put(pod(name))
    store.put(pod("plain", None))

    async def main() -> dict[str, AdapterReport]:
        pods = {"p": Observer(store, Platform()).adapter_pods("n", "p")}
        return {one.name: one.report for one in (await heard(Logs(), pods))["p"]}  # type: ignore[arg-type]

    mute = AdapterReport(errors={"": "it does not answer"})
    assert run(main()) == {"good": SAID, "hangs": mute, "refuses": mute, "young": AdapterReport(), "wordy": SAID}


def test_pods_of_lost_nodes_leave_connections_for_all_others() -> None:
    class Connections(Logs):
        """As many as the operator has."""

        free = asyncio.Semaphore(MAX_CONNECTIONS)

        async def logs(self, namespace: str, pod: str, container: str, *, tail_lines: int) -> str:
            async with self.free:
                assert not self.free.locked(), "nothing else can be asked"
                return await super().logs(namespace, pod.partition("-")[0], container, tail_lines=tail_lines)

    lost, good = ([Observed.of(pod(f"{name}-{i}")) for i in range(2 * MAX_CONNECTIONS)] for name in ("hangs", "good"))
    found = run(heard(Connections(), {"a": lost, "b": good}))  # type: ignore[arg-type]
    assert [one.report for one in found["b"]] == [SAID] * len(good)
    assert all(one.report.errors for one in found["a"])


def test_a_change_of_a_pod_that_loads_adapters_is_one_for_the_models_of_its_namespace() -> None:
    plain, able = Observed.of(pod("a", None)), Observed.of(pod("a"))
    for before, after, expected in (
        (None, able, True),
        (able, None, True),
        (None, plain, False),
        (plain, plain, False),
    ):
        keys = keys_for_change(Change(able.ref, before, after, frozenset()), Store())
        assert (SPACE in keys) is expected
