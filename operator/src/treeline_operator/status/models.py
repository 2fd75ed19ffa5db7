"""The status of InferenceModels: which names are served, and why others are not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Final

from treeline_wire.models import ModelAcceptance

from treeline_operator.api.conditions import ConditionType, Reason
from treeline_operator.api.model import AdapterStatus, InferenceModel, ModelStatus
from treeline_operator.api.pool import InferencePool
from treeline_operator.plan.adapters import AdapterState
from treeline_operator.plan.model_names import names_of
from treeline_operator.status.conditions import Judgement, build, few, timestamp, with_fix

_MOST_PODS: Final = 5
NO_ADAPTERS: Final[Mapping[str, AdapterState]] = {}


def model_statuses(
    models: Iterable[InferenceModel],
    pools: Iterable[InferencePool],
    now: datetime,
    adapters: Mapping[str, AdapterState] = NO_ADAPTERS,
) -> dict[str, ModelStatus]:
    """The statuses of all InferenceModels of a namespace, by name. `adapters` are those of accepted ones that have one.

    A model that is being deleted has no status any more, and its name is free for the next.
    """
    live = [model for model in models if not model.deleting]
    verdicts = names_of(live, pools).verdicts
    return {model.name: _status(model, verdicts[model.name], now, adapters.get(model.name)) for model in live}


def _status(
    model: InferenceModel, verdict: ModelAcceptance, now: datetime, adapter: AdapterState | None
) -> ModelStatus:
    generation = model.metadata.generation
    judged: dict[ConditionType, Judgement] = {
        ConditionType.ACCEPTED: ("True" if verdict.accepted else "False", Reason(verdict.reason), verdict.message)
    }
    if adapter is not None:
        judged[ConditionType.ADAPTER_LOADED] = _loaded(adapter)
    before = model.status.get("conditions", ())
    status = ModelStatus(
        observedGeneration=generation,
        conditions=build(judged, generation, before, now, fixes=False),
    )
    if verdict.winner is not None:
        status["conflictingModel"] = verdict.winner
    if adapter is not None:
        status["adapter"] = _adapter(adapter)
    return status


def _adapter(state: AdapterState) -> AdapterStatus:
    told = AdapterStatus(loaded=len(state.digests), wanted=len(state.wanted))
    if state.since is not None:
        told |= {"name": state.served, "since": timestamp(state.since)}
    if len(digests := {*state.digests.values()}) == 1:
        told["digest"] = digests.pop()
    return told


def _loaded(state: AdapterState) -> Judgement:
    """The judgement, such as "loaded on 2 of 3 pods: pod a: it has no rank 8"."""
    if state.refused:
        return "False", Reason.ADAPTER_REFUSED, with_fix(Reason.ADAPTER_REFUSED, state.refused)
    text = f"loaded on {len(state.digests)} of {len(state.wanted)} pods"
    if len({*state.digests.values()}) > 1:
        differing = few(f"{digest} on {pod}" for pod, digest in sorted(state.digests.items()))
        return "False", Reason.ADAPTER_FAILING, f"{text}, with different files: {differing}. Set spec.adapter.digest."
    if state.problems:
        why = "; ".join(f"pod {pod}: {problem}" for pod, problem in sorted(state.problems.items())[:_MOST_PODS])
        return "False", Reason.ADAPTER_FAILING, with_fix(Reason.ADAPTER_FAILING, f"{text}: {why}")
    if state.wanted and len(state.digests) == len(state.wanted):
        return "True", Reason.ADAPTER_LOADED, f"{text}."
    lacking = few(pod for pod in state.wanted if pod not in state.digests) or "no pod that loads adapters is ready"
    return "False", Reason.ADAPTER_LOADING, with_fix(Reason.ADAPTER_LOADING, f"{text}: {lacking}")
