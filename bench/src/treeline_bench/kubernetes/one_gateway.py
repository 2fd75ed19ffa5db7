"""Benchmark `one-gateway`: what the operator spends on each pool when very many share one gateway.

Method. The control plane and the operator of the benchmark `operator`, with nothing in them. 125 pools of one gateway
are created eight at a time, and once the operator has been quiet, 1,000 pools of another gateway in another namespace.
Then one pool of the 1,000 is deleted, and the oldest changes a setting that holds for all.

- `operator.one_gateway.converge_s`: first request that creates a pool to the last child made.
- `operator.one_gateway.cpu_ms`, `.reconciles`: time of the processor and reconciliations of any kind, for each pool,
  until the operator is quiet. Work that is linear in the pools leaves both the same at 125 and at 1,000.
- `operator.one_gateway.delete_reconciles`: reconciliations after the deletion. `.change_cpu_ms`: time of the processor
  for each pool after the change, which every pool's status is to hear of.

Bias. All share this machine's cores, and the API server takes most of them. Pods never become ready.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import psutil

from treeline_bench.context import Benchmark, Context
from treeline_bench.kubernetes import objects
from treeline_bench.kubernetes.api import MERGE, Api, Call
from treeline_bench.kubernetes.children import Children
from treeline_bench.kubernetes.objects import CHILDREN_OF_GATEWAY, CHILDREN_OF_POOL, Pool
from treeline_bench.kubernetes.running import OWN_NAMESPACE, Operator, cluster, operator
from treeline_bench.metrics import row
from treeline_bench.results import Row

FULL: Sequence[int] = (125, 1000)
QUICK: Sequence[int] = (4, 8)
CLIENTS = 8
QUIET_S = 5.0
LIMIT_S = 900.0


class _Meter:
    """What the operator has spent since the last look."""

    def __init__(self, running: Operator) -> None:
        self._running = running
        self._process = psutil.Process(running.process.process.pid)
        self._last = self._now()

    def _now(self) -> tuple[float, float]:
        used = self._process.cpu_times()
        return 1e3 * (used.user + used.system), self._running.vitals().reconciles

    def spent(self) -> tuple[float, float]:
        """Milliseconds of the processor, and reconciliations, once the operator is quiet."""
        self._running.await_quiet(QUIET_S, LIMIT_S)
        before, self._last = self._last, self._now()
        return self._last[0] - before[0], self._last[1] - before[1]


def _pools(size: int) -> list[Pool]:
    return [Pool(f"bench-of-{size}", "gateway", rank) for rank in range(size)]


def _created(context: Context, api: Api, children: Children, meter: _Meter, pools: Sequence[Pool]) -> Iterator[Row]:
    size, there = len(pools), children.count()
    awaited = CHILDREN_OF_POOL * size + CHILDREN_OF_GATEWAY
    context.display.phase(f"children of {size} pools of one gateway", awaited)
    begun = time.monotonic()
    api.send_all([Call("POST", objects.pools_path(pool.namespace), pool.manifest()) for pool in pools], CLIENTS)
    children.await_count(there + awaited, LIMIT_S, lambda count: context.display.done(count - there))
    cpu_ms, reconciles = meter.spent()
    children.check()
    yield row(f"operator.one_gateway.converge_s.{size}", children.last_added - begun)
    yield row(f"operator.one_gateway.cpu_ms.{size}", cpu_ms / size)
    yield row(f"operator.one_gateway.reconciles.{size}", reconciles / size)


def _changed(context: Context, api: Api, meter: _Meter, pools: Sequence[Pool]) -> Iterator[Row]:
    size = len(pools)
    context.display.phase("one of the pools is deleted, and the oldest changes what holds for all")
    api.send_all([Call("DELETE", pools[size // 2].path)], 1)
    _, reconciles = meter.spent()
    yield row(f"operator.one_gateway.delete_reconciles.{size}", reconciles)
    patch = {"spec": {"endpointPicker": {"failureMode": "FailClose"}}}
    api.send_all([Call("PATCH", pools[0].path, patch, MERGE)], 1)
    cpu_ms, _ = meter.spent()
    yield row(f"operator.one_gateway.change_cpu_ms.{size}", cpu_ms / size)


def measure(sizes: Sequence[int], context: Context) -> list[Row]:
    """The rows for so many pools of one gateway each time."""
    with cluster(context) as (plane, api):
        children = Children(api)
        try:
            for name in (OWN_NAMESPACE, *(_pools(size)[0].namespace for size in sizes)):
                api.send(Call("POST", "/api/v1/namespaces", objects.namespace(name)))
            children.start()
            with operator(plane, context.folder) as running:
                meter = _Meter(running)
                rows: list[Row] = []
                for size in sizes:
                    meter.spent()
                    rows += _created(context, api, children, meter, _pools(size))
                return [*rows, *_changed(context, api, meter, _pools(sizes[-1]))]
        finally:
            children.stop()


def run(context: Context) -> list[Row]:
    return measure(QUICK if context.quick else FULL, context)


BENCHMARK = Benchmark(
    "one-gateway",
    "Very many pools behind one gateway",
    "what the operator spends on each of 125 and of 1,000 pools (5 minutes)",
    run,
)
