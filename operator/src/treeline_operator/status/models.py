"""The status of InferenceModels: which names are served, and why others are not."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from treeline_wire.models import ModelAcceptance

from treeline_operator.api.conditions import ConditionType, Reason
from treeline_operator.api.model import InferenceModel, ModelStatus
from treeline_operator.api.pool import InferencePool
from treeline_operator.plan.model_names import names_of
from treeline_operator.status.conditions import Judgement, build


def model_statuses(
    models: Iterable[InferenceModel], pools: Iterable[InferencePool], now: datetime
) -> dict[str, ModelStatus]:
    """The statuses of all InferenceModels of a namespace, by name.

    A model that is being deleted has no status any more, and its name is free for the next.
    """
    live = [model for model in models if not model.deleting]
    verdicts = names_of(live, pools).verdicts
    return {model.name: _status(model, verdicts[model.name], now) for model in live}


def _status(model: InferenceModel, verdict: ModelAcceptance, now: datetime) -> ModelStatus:
    generation = model.metadata.generation
    judged: Judgement = "True" if verdict.accepted else "False", Reason(verdict.reason), verdict.message
    before = model.status.get("conditions", ())
    status = ModelStatus(
        observedGeneration=generation,
        conditions=build({ConditionType.ACCEPTED: judged}, generation, before, now, fixes=False),
    )
    if verdict.winner is not None:
        status["conflictingModel"] = verdict.winner
    return status
