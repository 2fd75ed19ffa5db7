"""Benchmark `operator`: the operator, and the picker's view of models, on a real API server.

Method. etcd, kube-apiserver and kube-controller-manager run on this machine (`control_plane/`), the operator
(`python -m treeline_operator`) beside them, over TLS, for all namespaces, with its lease, as one replica. There is no
kubelet and no scheduler: pods are made and stay Pending. 500 pools in 25 namespaces, 4 behind each of 125 gateways:
4 children a pool and 17 a gateway, which is 8.25 a pool and 4,125 in all, and 750 pods.

- `operator.rss_mb.0`, `.500`: resident memory of the operator's process without pools, and with all of them when it has
  had nothing to do for a while after making their children.
- `operator.converge_s.500`: first request that creates a pool to the last child made, all pools created at once.
- `operator.apply_s`: the API server's answer to the change of a pool to the last child that the change asks for, as a
  watch of the API server tells this process. 200 changes, each of another pool, four kinds in turn: replicas (1 child);
  an engine setting that makes a new revision (1); the engine's port (5: Deployment, Service and NetworkPolicy of the
  pool, two NetworkPolicies of its gateway); a picker setting of the gateway's oldest pool (1, and statuses of the other
  pools). The first 160 are made one after another, the rest eight at a time; all count in `.p50` and `.p95`, `.alone`
  and `.together` are the two parts.
- `operator.idle_writes`: the operator is restarted with `--resync-seconds 30`; its writes in the API server's audit log
  from that start on, for 10 minutes, renewals of the lease left out. `operator.idle_reconciles` shows that it looked.
- `epp.models_consistent_s`: a picker follows one gateway with 4 pools; 16 clients make 1,000 changes of InferenceModels
  (created, renamed, deleted) as fast as the API server answers; from the last answer until the picker's `/endpoints`
  lists exactly what is there. The worst of six bursts: three while the operator writes the models' statuses, three
  without it, which are faster. `epp.models_changes_s` is how fast the changes were answered.

Bias. All share this machine's cores, the API server and the controller manager take most of them; etcd does not wait
for the disk. Pods never become ready, so rollouts stop at their first step.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

from treeline_bench.context import Benchmark, BenchmarkError, Context
from treeline_bench.control_plane import ControlPlane
from treeline_bench.kubernetes import objects
from treeline_bench.kubernetes.api import Api, Call
from treeline_bench.kubernetes.changes import change
from treeline_bench.kubernetes.children import Children
from treeline_bench.kubernetes.models import Burst, Truth, await_truth, run_burst
from treeline_bench.kubernetes.objects import Fleet
from treeline_bench.kubernetes.running import OWN_NAMESPACE, Operator, cluster, operator, picker, writes_seen
from treeline_bench.metrics import row
from treeline_bench.results import Row
from treeline_bench.stats import percentile

CLIENTS = 8


@dataclass(frozen=True)
class Settings:
    """Sizes, and times in seconds. ``together`` changes come ``at_once`` at a time."""

    fleet: Fleet
    alone: int
    together: int
    at_once: int
    models: int
    changes: int
    bursts: int
    idle_s: float
    resync_s: float
    quiet_s: float
    converge_limit_s: float = 600.0
    change_limit_s: float = 60.0
    seed: int = 1


FULL = Settings(
    Fleet(25, 5),
    alone=160,
    together=40,
    at_once=8,
    models=600,
    changes=1000,
    bursts=3,
    idle_s=600.0,
    resync_s=30.0,
    quiet_s=5.0,
)
QUICK = Settings(
    Fleet(1, 1),
    alone=3,
    together=1,
    at_once=1,
    models=12,
    changes=20,
    bursts=1,
    idle_s=3.0,
    resync_s=1.0,
    quiet_s=1.0,
)


class _Run:
    """One run: the settings, the display, and what all steps need."""

    def __init__(self, settings: Settings, context: Context, plane: ControlPlane, api: Api) -> None:
        self.settings = settings
        self.display = context.display
        self.folder = context.folder
        self.plane = plane
        self.api = api
        self.children = Children(api)
        self.pools = settings.fleet.pools()
        behind_one_gateway = [settings.fleet.pool(0, rank) for rank in range(objects.POOLS_PER_GATEWAY)]
        self.truth = Truth(behind_one_gateway[0].namespace, behind_one_gateway)
        self.random = random.Random(settings.seed)

    def rows(self) -> list[Row]:
        self.display.phase("the operator without pools")
        for name in (OWN_NAMESPACE, *self.settings.fleet.namespace_names()):
            self.api.send(Call("POST", "/api/v1/namespaces", objects.namespace(name)))
        self.children.start()
        with operator(self.plane, self.folder) as running:
            rows = [*self._empty(running), *self._converge(running), *self._changes(running)]
            bursts = {"operator": self._bursts(running)}
        rows += self._idle()
        bursts["alone"] = self._bursts()
        return [*rows, *_models(bursts)]

    def _empty(self, running: Operator) -> Iterator[Row]:
        running.await_quiet(self.settings.quiet_s, self.settings.converge_limit_s)
        yield row("operator.rss_mb.0", running.rss_mb())

    def _converge(self, running: Operator) -> Iterator[Row]:
        size = len(self.pools)
        awaited = size * objects.CHILDREN_OF_POOL + size // objects.POOLS_PER_GATEWAY * objects.CHILDREN_OF_GATEWAY
        self.display.phase(f"children of {size} pools", awaited)
        calls = [Call("POST", objects.pools_path(pool.namespace), pool.manifest()) for pool in self.pools]
        begun = time.monotonic()
        self.api.send_all(calls, CLIENTS)
        self.children.await_count(awaited, self.settings.converge_limit_s, self.display.done)
        running.await_quiet(self.settings.quiet_s, self.settings.converge_limit_s)
        self.children.check()
        own = self.children.count_by_pool()
        if len(own) != size or len(set(own.values())) != 1:
            raise BenchmarkError(f"of {size} pools, {len(own)} have children, some more and some fewer")
        yield row(f"operator.converge_s.{size}", self.children.last_added - begun)
        yield row(f"operator.children.{size}", self.children.count())
        yield row(f"operator.rss_mb.{size}", running.rss_mb())

    def _changes(self, running: Operator) -> Iterator[Row]:
        alone, together = self.settings.alone, self.settings.together
        self.display.phase(f"{alone + together} changes of pools", alone + together)
        groups = [range(number, number + 1) for number in range(alone)]
        groups += [
            range(first, min(first + self.settings.at_once, alone + together))
            for first in range(alone, alone + together, self.settings.at_once)
        ]
        everything = [took for numbers in groups for took in self._change(numbers)]
        running.await_quiet(self.settings.quiet_s, self.settings.converge_limit_s)
        parts = {"alone": everything[:alone], "together": everything[alone:]}
        for q in (50, 95):
            yield row(f"operator.apply_s.p{q}", percentile(everything, q))
        for part, found in parts.items():
            yield row(f"operator.apply_s.p95.{part}", percentile(found, 95))

    def _change(self, numbers: range) -> list[float]:
        """Make these changes at once; the seconds that each took."""
        changes = [change(self.settings.fleet, number) for number in numbers]
        expected = [self.children.expect(each.pool.namespace, each.wants) for each in changes]
        answers = self.api.send_all([each.call() for each in changes], len(changes))
        limit = self.settings.change_limit_s
        took = [
            self.children.await_all(each, limit) - answer.answered
            for each, answer in zip(expected, answers, strict=True)
        ]
        self.display.done(numbers[-1] + 1)
        return took

    def _bursts(self, running: Operator | None = None) -> list[Burst]:
        """Bursts of changed models, with the operator quiet before each if there is one."""
        settings, truth = self.settings, self.truth
        said = "beside the operator" if running else "without the operator"
        self.display.phase(f"bursts of {settings.changes} changed models, {said}", settings.bursts)
        found: list[Burst] = []
        with picker(self.plane, self.folder, truth.namespace, truth.pools[0].gateway) as follower:
            self.api.send_all(truth.create(settings.models - len(truth.models)), CLIENTS)
            for number in range(settings.bursts):
                if running:
                    running.await_quiet(settings.quiet_s, settings.converge_limit_s)
                await_truth(follower, truth)
                calls = truth.burst(settings.changes, self.random)
                found.append(run_burst(self.api, follower, truth, calls))
                self.display.done(number + 1)
        if running:
            running.await_quiet(settings.quiet_s, settings.converge_limit_s)
        return found

    def _idle(self) -> Iterator[Row]:
        settings = self.settings
        self.display.phase(f"nothing changes for {settings.idle_s:g} s", round(settings.idle_s))
        before = len(writes_seen(self.plane))
        with operator(self.plane, self.folder, "--resync-seconds", f"{settings.resync_s:g}") as running:
            begun = time.monotonic()
            while (passed := time.monotonic() - begun) < settings.idle_s:
                self.display.done(int(passed))
                running.process.check()
                time.sleep(0.5)
            reconciles = running.vitals().reconciles
        writes = writes_seen(self.plane)[before:]
        if writes:
            shown = "\n".join(f"  {write}" for write in writes[:10])
            (self.folder / "idle-writes.txt").write_text("\n".join(writes))
            self.display.phase(f"{len(writes)} writes without a reason, the first:\n{shown}")
        yield row("operator.idle_writes", len(writes))
        yield row("operator.idle_reconciles", reconciles)


def _models(bursts: dict[str, list[Burst]]) -> Iterator[Row]:
    yield row("epp.models_consistent_s", max(each.consistent_s for found in bursts.values() for each in found))
    for beside, found in bursts.items():
        yield row(f"epp.models_changes_s.{beside}", max(each.rate for each in found))


def measure(settings: Settings, context: Context) -> list[Row]:
    """The rows of one run of such a size."""
    with cluster(context) as (plane, api):
        prepared = _Run(settings, context, plane, api)
        try:
            return prepared.rows()
        finally:
            prepared.children.stop()


def run(context: Context) -> list[Row]:
    return measure(QUICK if context.quick else FULL, context)


BENCHMARK = Benchmark(
    "operator",
    "The operator on a real API server",
    "changes to children, memory, idle writes, models in the picker (20 minutes)",
    run,
)
