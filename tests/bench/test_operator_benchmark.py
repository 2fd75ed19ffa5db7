"""Benchmark `operator`: its writes, its waits, its readings, and a whole run on a real API server."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.bench import Remembered
from support.control_plane import control_plane_or_skip
from treeline_bench.context import BenchmarkError, Context
from treeline_bench.kubernetes import benchmark
from treeline_bench.kubernetes.api import Call
from treeline_bench.kubernetes.changes import KINDS, change
from treeline_bench.kubernetes.children import POOL_LABEL, Children
from treeline_bench.kubernetes.models import Truth
from treeline_bench.kubernetes.objects import CHILDREN_OF_GATEWAY, CHILDREN_OF_POOL, Fleet
from treeline_bench.kubernetes.running import leads, read_vitals

Object = dict[str, Any]


# -- what is sent


def test_there_are_500_pools_the_oldest_of_each_gateway_first() -> None:
    fleet = benchmark.FULL.fleet
    pools = fleet.pools()
    assert len(pools) == len(set(pools)) == 500
    assert {pool.rank for pool in pools[: fleet.places]} == {0}
    assert Counter(pool.namespace for pool in pools) == dict.fromkeys(fleet.namespace_names(), 20)


@pytest.mark.parametrize("settings", [benchmark.FULL, benchmark.QUICK])
def test_every_change_is_of_another_pool_and_kinds_take_turns(settings: benchmark.Settings) -> None:
    count = settings.alone + settings.together
    assert count <= len(settings.fleet.pools())
    changes = [change(settings.fleet, number) for number in range(count)]
    assert len({each.pool for each in changes}) == count
    assert all(each.pool.rank == 0 for each in changes[KINDS.index("picker") :: len(KINDS)])


def apply(calls: list[Call], there: dict[str, Object]) -> None:
    """Apply calls to objects as an API server does, each object at most once."""
    for call in calls:
        name = call.path.rpartition("/")[2]
        match call.method:
            case "POST":
                assert call.body["metadata"]["name"] not in there
                there[call.body["metadata"]["name"]] = dict(call.body["spec"])
            case "PATCH":
                there[name] |= call.body["spec"]
            case "DELETE":
                del there[name]


def test_the_expected_objects_are_the_result_of_a_bursts_calls() -> None:
    pools = [Fleet(1, 1).pool(0, rank) for rank in range(4)]
    truth, rng = Truth("bench-00", pools), random.Random(1)
    there: dict[str, Object] = {}
    apply(truth.create(60), there)
    for _ in range(3):
        calls = truth.burst(80, rng)
        assert Counter(call.method for call in calls) == {"POST": 32, "PATCH": 24, "DELETE": 24}
        apply(calls, there)
        names: dict[str, set[str]] = {pool.name: set() for pool in pools}
        for spec in there.values():
            names[spec["poolRef"]["name"]].add(spec["modelName"])
        assert truth.by_pool() == names


# -- what is waited for


def child(kind: str, name: str, pool: str = "", **spec: Any) -> Object:
    labels = {POOL_LABEL: pool} if pool else {}
    return {"kind": kind, "metadata": {"name": name, "namespace": "bench-00", "labels": labels}, "spec": spec}


def watched() -> Children:
    return Children(None)  # type: ignore[arg-type]


def test_children_are_counted_while_they_are_there() -> None:
    children = watched()
    for at, kind in enumerate(("Deployment", "Service"), 1):
        children.saw(kind, "ADDED", child(kind, "x", "p"), float(at))
    children.saw("ConfigMap", "ADDED", child("ConfigMap", "gateway"), 3.0)
    children.saw("Deployment", "MODIFIED", child("Deployment", "x", "p"), 4.0)
    assert (children.count(), children.last_added) == (3, 3.0)
    children.saw("Service", "DELETED", child("Service", "x", "p"), 5.0)
    assert children.count_by_pool() == {("bench-00", "p"): 1}


def test_a_change_of_the_port_is_complete_when_its_five_children_have_it() -> None:
    fleet = Fleet(1, 1)
    made = change(fleet, KINDS.index("port"))
    port, pool = made.spec["engine"]["port"], made.pool
    children = watched()
    expected = children.expect(pool.namespace, made.wants)
    with pytest.raises(BenchmarkError, match=f"a new revision of {pool.name}, Service {pool.name}-pods"):
        children.await_all(expected, 0.0)
    policies = [f"{pool.name}-pods", "gateway-0-epp", "gateway-0-edge"]
    objects = [child("NetworkPolicy", name, ingress=[{"ports": [{"port": port}]}]) for name in policies]
    objects.append(child("Service", f"{pool.name}-pods", pool.name, ports=[{"port": port}]))
    for at, obj in enumerate(objects):
        children.saw(obj["kind"], "MODIFIED", obj, float(at))
    children.saw("Deployment", "MODIFIED", child("Deployment", "old", pool.name), 8.0)
    assert not expected.complete.is_set()
    children.saw("Deployment", "ADDED", child("Deployment", "new", pool.name), 9.0)
    assert children.await_all(expected, 0.0) == 9.0


# -- what is read

PAGE = """\
# HELP treeline_operator_queue_depth Keys that wait for a worker.
treeline_operator_queue_depth 3.0
treeline_operator_reconciles_total{kind="pool",result="ok"} 10.0
treeline_operator_reconciles_total{kind="gateway",result="changed"} 2.0
treeline_operator_api_requests_total{code="200",resource="services",verb="patch"} 7.0
treeline_operator_api_requests_total{code="200",resource="services",verb="list"} 100.0
treeline_operator_api_requests_total{code="200",resource="leases",verb="update"} 50.0
treeline_operator_is_leader 1.0
"""


def test_writes_are_counted_without_reads_and_leases() -> None:
    vitals = read_vitals(PAGE)
    assert (vitals.depth, vitals.reconciles, vitals.writes) == (3, 12, 7)
    assert leads(PAGE)
    assert not leads(PAGE.replace("is_leader 1.0", "is_leader 0.0"))


# -- all of it


@pytest.mark.integration
@pytest.mark.deep
def test_four_pools_on_a_real_api_server(tmp_path: Path) -> None:
    control_plane_or_skip().stop()  # skipped here with the command that builds it
    display = Remembered()
    settings = dataclasses.replace(benchmark.QUICK, idle_s=1.0, resync_s=0.5, quiet_s=0.5)
    rows = {row.metric: row.value for row in benchmark.measure(settings, Context(display, tmp_path))}
    assert rows["operator.children.4"] == 4 * CHILDREN_OF_POOL + CHILDREN_OF_GATEWAY
    assert rows["operator.idle_writes"] >= 0
    assert rows["operator.idle_reconciles"] > 0
    assert 0 < rows["operator.apply_s.p50"] <= rows["operator.apply_s.p95"]
    assert rows["epp.models_consistent_s"] > 0
    assert rows["operator.rss_mb.0"] < rows["operator.rss_mb.4"]
    assert not list(tmp_path.glob("treeline-control-plane-*"))
    children = [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]
    assert not [p for p in children if str(tmp_path) in " ".join(p.cmdline())]
