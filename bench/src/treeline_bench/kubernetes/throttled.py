"""Benchmark `operator-throttled`: 200 pools at once for an operator with a fifth of a processor.

Method. The control plane and operator of the benchmark `operator`, empty. Once it leads, the operator gets a control
group (the kernel's `cpu` controller, so this needs root) with a quota of 20 ms in each 100, like the kubelet's for a
limit of 200m. 200 pools, four behind each of 50 gateways, are created eight at a time.

- `operator.throttled.status_s`: first request that creates a pool until every pool has a status, as a list of them,
  twice a second, says; `.judged_s` until every status speaks of its pool's generation, which was planned then;
  `.converge_s` until the last child is there.
- `operator.throttled.lost`: how often the lease was lost. If the process ends, the benchmark fails.
- `operator.throttled.cpu_s`: time of the processor that the operator took until then.

Bias. The API server is not throttled, but shares the machine's cores. Pods never become ready.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from treeline_bench.context import Benchmark, BenchmarkError, Context
from treeline_bench.kubernetes import objects
from treeline_bench.kubernetes.api import Api, Call
from treeline_bench.kubernetes.children import Children
from treeline_bench.kubernetes.objects import CHILDREN_OF_GATEWAY, CHILDREN_OF_POOL, POOLS_PER_GATEWAY, Fleet
from treeline_bench.kubernetes.running import OWN_NAMESPACE, cluster, operator
from treeline_bench.metrics import row
from treeline_bench.processes import Child
from treeline_bench.results import Row

FULL: Final = Fleet(10, 5)
QUICK: Final = Fleet(1, 1)
SHARE: Final = 0.2
PERIOD_US: Final = 100_000
CLIENTS: Final = 8
POLL_S: Final = 0.5
LIMIT_S: Final = 900.0
GROUP: Final = Path("/sys/fs/cgroup/cpu")


@contextmanager
def throttled(process: Child) -> Iterator[None]:
    """Limits the process to `SHARE` of a processor. Raises BenchmarkError if that is impossible."""
    group = GROUP / f"treeline-bench-{process.process.pid}"
    try:
        group.mkdir()
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(int(SHARE * PERIOD_US)))
        (group / "cgroup.procs").write_text(str(process.process.pid))
    except OSError as error:
        raise BenchmarkError(f"cannot create a control group; run as root and mount {GROUP}: {error}") from error
    try:
        yield
    finally:
        (GROUP / "cgroup.procs").write_text(str(process.process.pid))
        group.rmdir()


def _with_status(api: Api, fleet: Fleet) -> tuple[int, int]:
    """Counts the pools with a status, and the pools whose status has an observedGeneration."""
    pools: list[Any] = []
    for name in fleet.namespace_names():
        pools += api.get(objects.pools_path(name))["items"]
    found = [pool["status"] for pool in pools if pool.get("status", {}).get("conditions")]
    return len(found), sum("observedGeneration" in status for status in found)


def _measured(context: Context, api: Api, children: Children, fleet: Fleet, process: Child) -> Iterator[Row]:
    pools = fleet.pools()
    size, spent = len(pools), process.cpu_seconds()
    context.display.phase(f"{size} pools at once, with {SHARE:g} of a processor", size)
    begun = time.monotonic()
    api.send_all([Call("POST", objects.pools_path(pool.namespace), pool.manifest()) for pool in pools], CLIENTS)
    reached: list[float] = []
    while (found := _with_status(api, fleet)) != (size, size):
        if found[0] == size and not reached:
            reached.append(time.monotonic() - begun)
        context.display.done(found[1])
        process.check()
        if time.monotonic() > begun + LIMIT_S:
            raise BenchmarkError(f"{found[0]} of {size} pools have a status after {LIMIT_S:g} s")
        time.sleep(POLL_S)
    reached.append(time.monotonic() - begun)
    yield row(f"operator.throttled.status_s.{size}", reached[0])
    yield row(f"operator.throttled.judged_s.{size}", reached[-1])
    awaited = CHILDREN_OF_POOL * size + CHILDREN_OF_GATEWAY * size // POOLS_PER_GATEWAY
    children.await_count(awaited, LIMIT_S, context.display.done)
    process.check()
    yield row(f"operator.throttled.converge_s.{size}", children.last_added - begun)
    yield row(f"operator.throttled.cpu_s.{size}", process.cpu_seconds() - spent)
    yield row(f"operator.throttled.lost.{size}", process.log_path.read_text().count("the lease treeline-operator is"))


def run(context: Context) -> list[Row]:
    """The rows of the benchmark."""
    fleet = QUICK if context.quick else FULL
    with cluster(context) as (plane, api):
        children = Children(api)
        try:
            for name in (OWN_NAMESPACE, *fleet.namespace_names()):
                api.send(Call("POST", "/api/v1/namespaces", objects.namespace(name)))
            children.start()
            with operator(plane, context.folder) as running, throttled(running.process):
                return list(_measured(context, api, children, fleet, running.process))
        finally:
            children.stop()


BENCHMARK = Benchmark(
    "operator-throttled",
    "Very many pools at once on a busy node",
    "how long 200 pools wait for a status of an operator with a fifth of a processor (5 minutes)",
    run,
)
