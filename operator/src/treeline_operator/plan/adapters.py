"""Which pods have which adapters: the InferenceModels' adapters, and the pods, to what each pod is asked for.

Every change of a source is a new version with a name of its own. Pods load it beside the old one; when all that should
have it do, requests go to it, and after SETTLE_S the old one leaves. Which pods: those that rank first for the model
by a hash of both names, so that few adapters move when a pod comes or goes. A pod that stands in for another keeps the
adapter until that one has it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import groupby
from typing import Final

import msgspec
from treeline_wire import labels
from treeline_wire.live_adapters import AdapterReport, AdapterWish, mark, version_name, wishes_of, wishes_text

from treeline_operator.actions import Annotate, Plan
from treeline_operator.api.model import InferenceModel
from treeline_operator.api.pool import InferencePool
from treeline_operator.api.source import Source
from treeline_operator.plan import facts
from treeline_operator.world import Observed

SETTLE_S: Final = 10.0
"""By then every picker has heard where the requests for a name go, and what it sent before has arrived."""


@dataclass(frozen=True, slots=True)
class AdapterPod:
    """A pod that can load adapters. `text` is its annotation, `report` the last that it said; `silent`: it should have
    said more by now."""

    observed: Observed
    role: str
    ready: bool
    text: str
    report: AdapterReport
    silent: bool = False
    asked: Mapping[str, AdapterWish] = field(default_factory=dict)

    @classmethod
    def of(cls, observed: Observed, report: AdapterReport | None, *, silent: bool = False) -> AdapterPod:
        """A pod as observed. One that drains counts as not ready."""
        pod = observed.object
        text = facts.annotation(pod, labels.ADAPTERS)
        ready = facts.is_available(pod) and not facts.is_draining(pod)
        try:
            asked = {wish.name: wish for wish in wishes_of(text)}
        except msgspec.MsgspecError:
            asked = {}  # it was changed by hand; what should be there is written over it
        role = facts.label(pod, labels.ROLE)
        return cls(observed, role, ready, text, report or AdapterReport(""), silent, asked)

    @property
    def name(self) -> str:
        return self.observed.ref.name

    def has(self, version: str) -> bool:
        """Whether the pod has loaded an adapter that it should have."""
        return version in self.asked and version in self.report.loaded

    def problem(self, version: str) -> str:
        """Why it has not; empty if that is only a matter of time."""
        if self.silent:
            return "it does not answer"
        if self.report.asked != mark(self.text):
            return ""
        return self.report.errors.get(version) or self.report.errors.get("", "")


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


def plan_adapters(
    models: Iterable[InferenceModel],
    pools: Iterable[InferencePool],
    pods: Mapping[str, Sequence[AdapterPod]],
    now: datetime,
    *,
    unread: Collection[str] = (),
) -> tuple[Plan, dict[str, AdapterState]]:
    """What to write to which pods, and the state of each InferenceModel with an adapter, by its name.

    `models` are those whose names are theirs. `pods` are by pool. `unread` are names of models that cannot be read:
    their adapters stay.
    """
    actions: list[Annotate] = []
    states: dict[str, AdapterState] = {}
    mine = [model for model in models if model.spec.adapter is not None]
    for pool in pools:
        there = pods.get(pool.name, ())
        asked = {pod.name: {w.name: w for w in pod.asked.values() if _model_name(w) in unread} for pod in there}
        for model in mine:
            if model.spec.pool_ref.name == pool.name:
                states[model.name], held = _placed(model, pool, there, now)
                for pod, wish in held:
                    asked[pod.name][wish.name] = wish
        for pod in there:
            text = wishes_text(asked[pod.name].values())
            if text != pod.text:
                why = f"is to have the adapters {', '.join(asked[pod.name]) or 'of nobody'}"
                actions.append(Annotate(pod.observed.ref, pod.observed.uid, labels.ADAPTERS, text, why))
    waits = [SETTLE_S for state in states.values() if state.since is not None and not _is_settled(state, now)]
    return Plan(tuple(actions), recheck_s=min(waits, default=None)), states


Held = list[tuple[AdapterPod, AdapterWish]]


def _placed(
    model: InferenceModel, pool: InferencePool, pods: Sequence[AdapterPod], now: datetime
) -> tuple[AdapterState, Held]:
    """The state of an adapter, and which versions of it are whose."""
    spec = model.spec
    assert spec.adapter is not None
    digest = spec.adapter.digest or ""
    new = AdapterWish(version_name(spec.model_name, spec.adapter.uri, digest), spec.adapter.uri, digest)
    chosen = _chosen(spec.model_name, spec.adapter.replicas, pods)
    state = replace(_served(model), refused=_refusal(spec.adapter.uri, pool))
    held: Held = []
    if not state.refused:
        have = [pod for pod in pods if pod.has(new.name)]
        lost = not any(pod.has(state.served) for pod in pods)
        if state.served != new.name and have and (lost or not {*map(_id, chosen)} - {*map(_id, have)}):
            state = replace(state, served=new.name, since=now)
        lacking = [pod for pod in chosen if not pod.has(new.name)]
        state = replace(
            state,
            wanted=tuple(sorted(pod.name for pod in chosen)),
            digests={pod.name: pod.report.loaded[new.name] for pod in chosen if pod.has(new.name)},
            problems={pod.name: problem for pod in lacking if (problem := pod.problem(new.name))},
        )
        held += ((pod, new) for pod in _holders(new.name, chosen, pods))
    if state.served != new.name:
        old = next((pod.asked[state.served] for pod in pods if state.served in pod.asked), None)
        held += ((pod, old) for pod in _holders(state.served, chosen, pods) if old is not None)
    if not _is_settled(state, now):
        held += ((pod, old) for pod in pods for old in pod.asked.values() if _model_name(old) == spec.model_name)
    return state, held


def _chosen(model_name: str, replicas: int | None, pods: Sequence[AdapterPod]) -> list[AdapterPod]:
    """The ready pods that should have a model's adapter: that many of each role, all by default."""

    def rank(pod: AdapterPod) -> tuple[str, bytes]:
        return pod.role, hashlib.sha256(f"{model_name} {pod.name}".encode()).digest()

    ranked = groupby(sorted((pod for pod in pods if pod.ready), key=rank), key=lambda pod: pod.role)
    return [pod for _, alike in ranked for pod in list(alike)[:replicas]]


def _holders(version: str, chosen: Sequence[AdapterPod], pods: Sequence[AdapterPod]) -> list[AdapterPod]:
    """The pods that keep or get a version: the chosen ones, those that stand in for them, and those that are not ready
    and may come back."""
    whole = all(pod.has(version) for pod in chosen)
    own = {*map(_id, chosen)}

    def holds(pod: AdapterPod) -> bool:
        return _id(pod) in own or (version in pod.asked and not (pod.ready and (whole or not pod.has(version))))

    return [pod for pod in pods if holds(pod)]


def _served(model: InferenceModel) -> AdapterState:
    told = model.status.get("adapter", {})
    since = told.get("since")
    return AdapterState(told.get("name", ""), datetime.fromisoformat(since) if since else None)


def _is_settled(state: AdapterState, now: datetime) -> bool:
    """Whether all requests for the name go to the version that serves, and have for a while."""
    return state.since is None or now - state.since >= timedelta(seconds=SETTLE_S)


def _refusal(uri: str, pool: InferencePool) -> str:
    own, source = pool.spec.engine.lora, Source.parse(uri)
    if own is None:
        return f"pool {pool.name} has no engine.lora, so its pods load no adapters"
    if source.scheme == "pvc" and source.root not in own.claims:
        return f"claim {source.root} is none of engine.lora.claims of pool {pool.name}"
    return ""


def _model_name(wish: AdapterWish) -> str:
    return wish.name.rpartition("@")[0]


def _id(pod: AdapterPod) -> str:
    return pod.name
