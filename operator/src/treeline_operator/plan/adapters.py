"""Which pods have which adapters: from the InferenceModels' adapters, and the pods, to what each pod is asked for.

Another source or digest is another version, with a name of its own. Pods load it beside the old one; when all that
should have it do, requests go to it, and SETTLE_S later the old one leaves. Which pods: those that rank first for the
model by a hash of both names, so that few adapters move when a pod comes or goes. Until those have it others keep it.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import groupby
from typing import Final, NamedTuple

import msgspec
from treeline_wire import labels
from treeline_wire.live_adapters import AdapterReport, AdapterWish, version_name, wishes_of, wishes_text

from treeline_operator.api.model import InferenceModel
from treeline_operator.api.pool import InferencePool
from treeline_operator.api.source import Source
from treeline_operator.plan import facts
from treeline_operator.world import Observed

SETTLE_S: Final = 10.0
"""By then every picker has heard where the requests for a name go, and what it sent before has arrived."""
_LOOK_S: Final = (1.0, 10.0)
"""How soon pods are asked again: while something is under way, and otherwise."""
MOST_TEXT: Final = 200_000
"""Characters of wishes: all annotations of a pod together have 256 KiB."""


@dataclass(frozen=True, slots=True)
class AdapterPod:
    """A pod that can load adapters: what its annotation `text` asks for, and what it says of that."""

    observed: Observed
    role: str
    ready: bool
    text: str
    asked: Mapping[str, AdapterWish]
    report: AdapterReport

    @classmethod
    def of(cls, observed: Observed, report: AdapterReport) -> AdapterPod:
        """A pod as observed. One that drains counts as not ready."""
        pod = observed.object
        text = facts.annotation(pod, labels.ADAPTERS)
        try:
            asked = wishes_of(text)
        except (msgspec.MsgspecError, RecursionError):
            asked = {}  # it was changed by hand, and will be written over
        ready = facts.is_available(pod) and not facts.is_draining(pod)
        return cls(observed, facts.label(pod, labels.ROLE), ready, text, asked, report)

    @property
    def name(self) -> str:
        return self.observed.ref.name

    def has(self, version: str) -> bool:
        """Whether the pod has loaded a version that it should have."""
        return version in self.asked and version in self.report.loaded

    def problem(self, wish: AdapterWish) -> str:
        """Why it has not loaded it, if more is known."""
        if wish.name not in self.asked and len(self.text) + len(wishes_text([wish])) - 1 > MOST_TEXT:
            return "its annotation has no room for more adapters"
        return self.report.errors.get(wish.name) or self.report.errors.get("", "")

    def wishes(self, held: Iterable[AdapterWish]) -> str:
        """The text of its annotation. Adapters that stand there already come first, others while there is room."""
        kept, left = list[AdapterWish](), MOST_TEXT
        for wish in sorted({one.name: one for one in held}.values(), key=lambda one: one.name not in self.asked):
            if (size := len(wishes_text([wish])) - 1) < left:
                kept.append(wish)
                left -= size
        return wishes_text(kept)

    @property
    def is_busy(self) -> bool:
        """Whether it is about to say of some adapter that it is there, or why not."""
        known = self.report.loaded.keys() | self.report.errors.keys()
        return "" not in known and not self.asked.keys() <= known


@dataclass(frozen=True, slots=True)
class AdapterState:
    """How it stands with the adapter of an InferenceModel.

    `served` is the version that gets the requests, since `since`; empty before the first. `wanted` are the pods that
    should have the newest, `digests` those that have it, `problems` others of which more is known. `refused`: why the
    pool cannot have it at all.
    """

    served: str = ""
    since: datetime | None = None
    wanted: tuple[str, ...] = ()
    digests: Mapping[str, str] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)
    refused: str = ""

    def is_settled(self, now: datetime) -> bool:
        """Whether what served before may leave."""
        return self.since is None or now - self.since >= timedelta(seconds=SETTLE_S)


class AdapterPlan(NamedTuple):
    """Pods with the annotation to write; the state of each InferenceModel with an adapter; when to look again."""

    writes: list[tuple[Observed, str]]
    states: dict[str, AdapterState]
    again_s: float | None


Held = list[tuple[AdapterPod, AdapterWish]]


def plan_adapters(
    models: Iterable[InferenceModel],
    pools: Iterable[InferencePool],
    pods: Mapping[str, Sequence[AdapterPod]],
    now: datetime,
    *,
    unread: Collection[str] = (),
) -> AdapterPlan:
    """`models` are those whose names are theirs; `pods` are by pool. Adapters of the models named in `unread`, which
    cannot be read, stay."""
    writes: list[tuple[Observed, str]] = []
    states: dict[str, AdapterState] = {}
    mine = [model for model in models if model.spec.adapter is not None]
    for pool in pools:
        there = pods.get(pool.name, ())
        asked, held = defaultdict[str, Held](list), defaultdict[str, list[AdapterWish]](list)
        for holder, wish in ((pod, wish) for pod in there for wish in pod.asked.values()):
            asked[_model_name(wish)].append((holder, wish))
        wanted = [one for name in unread for one in asked[name]]
        for model in mine:
            if model.spec.pool_ref.name == pool.name:
                states[model.name], own = _placed(model, pool, there, asked[model.spec.model_name], now)
                wanted += own
        for holder, wish in wanted:
            held[holder.name].append(wish)
        writes += [(pod.observed, text) for pod in there if (text := pod.wishes(held[pod.name])) != pod.text]
    busy = any(pod.is_busy for there in pods.values() for pod in there)
    moves = not all(state.is_settled(now) for state in states.values())
    return AdapterPlan(writes, states, _LOOK_S[0] if writes or busy or moves else _LOOK_S[1] if states else None)


def _placed(
    model: InferenceModel, pool: InferencePool, pods: Sequence[AdapterPod], asked: Held, now: datetime
) -> tuple[AdapterState, Held]:
    """The state of an adapter, and which versions of it are whose. `asked`: those that pods are asked for."""
    spec, told = model.spec, model.status.get("adapter", {})
    assert spec.adapter is not None
    uri, digest = spec.adapter.uri, spec.adapter.digest or ""
    new = AdapterWish(version_name(spec.model_name, uri, digest), uri, digest)
    chosen = _chosen(spec.model_name, spec.adapter.replicas, pods)
    since = datetime.fromisoformat(told["since"]) if "since" in told else None
    state = AdapterState(told.get("name", ""), since, refused=_refusal(uri, pool))
    held: Held = []
    if not state.refused:
        lost = not any(pod.has(state.served) for pod in pods)
        if state.served != new.name and any(pod.has(new.name) for pod in pods) and (lost or _all_have(chosen, new)):
            state = replace(state, served=new.name, since=now)
        state = replace(
            state,
            wanted=tuple(sorted(pod.name for pod in chosen)),
            digests={pod.name: pod.report.loaded[new.name] for pod in chosen if pod.has(new.name)},
            problems={pod.name: why for pod in chosen if not pod.has(new.name) and (why := pod.problem(new))},
        )
        held += _holders(new, chosen, pods)
    if state.refused or state.served != new.name:
        for old in [old for _, old in asked if old.name == state.served][:1]:
            held += _holders(old, chosen, pods)
    if not state.is_settled(now):
        held += asked
    return state, held


def _chosen(model_name: str, replicas: int | None, pods: Sequence[AdapterPod]) -> list[AdapterPod]:
    """The ready pods that should have a model's adapter: that many of each role, all by default."""

    def rank(pod: AdapterPod) -> tuple[str, bytes]:
        return pod.role, hashlib.sha256(f"{model_name} {pod.name}".encode()).digest()

    ranked = groupby(sorted((pod for pod in pods if pod.ready), key=rank), key=lambda pod: pod.role)
    return [pod for _, alike in ranked for pod in list(alike)[:replicas]]


def _holders(version: AdapterWish, chosen: Sequence[AdapterPod], pods: Sequence[AdapterPod]) -> Held:
    """The chosen pods; others keep it until all of those have it, or while they are not ready and may come back."""
    whole, own = _all_have(chosen, version), {pod.name for pod in chosen}
    holders = (p for p in pods if p.name in own or (version.name in p.asked and not (p.ready and whole)))
    return [(pod, version) for pod in holders]


def _all_have(pods: Iterable[AdapterPod], version: AdapterWish) -> bool:
    return all(pod.has(version.name) for pod in pods)


def _refusal(uri: str, pool: InferencePool) -> str:
    own, source = pool.spec.engine.lora, Source.parse(uri)
    if own is None:
        return f"pool {pool.name} has no engine.lora, so its pods load no adapters"
    if source.scheme == "pvc" and source.root not in own.claims:
        return f"claim {source.root} is none of engine.lora.claims of pool {pool.name}"
    return ""


def _model_name(wish: AdapterWish) -> str:
    return wish.name.rpartition("@")[0]
