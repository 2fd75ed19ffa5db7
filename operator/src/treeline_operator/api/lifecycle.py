"""Owns how many pods there are and how they change: autoscaling, drain, rollout."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StrictBool, StrictInt

from treeline_operator.api.parts import CountOrPercent, Part
from treeline_operator.api.rules import Rule, forbidden


class PickerScaling(Part):
    """The demand that adds a replica. The highest one counts."""

    queued_tokens: Annotated[StrictInt, Field(ge=1, le=1_000_000_000)] = 16384
    """Waiting uncached prompt tokens per replica, at its engine or in the picker."""
    in_flight_requests: Annotated[StrictInt, Field(ge=1, le=1_000_000)] = 32
    """Requests per replica, including those that the picker holds."""
    ttft_milliseconds: Annotated[StrictInt, Field(ge=1, le=3_600_000)] | None = None
    """Limit of the predicted time to first token of nine in ten requests."""
    scale_down_seconds: Annotated[StrictInt, Field(ge=0, le=86400)] = 300
    """Time without demand after which pods are removed."""


class Autoscaling(Part):
    """Autoscaling, which sets spec.replicas."""

    RULES = (
        forbidden(
            "self.type != 'None' || (!has(self.minReplicas) && !has(self.maxReplicas))",
            "type None follows spec.replicas: remove minReplicas and maxReplicas, or set type to Picker",
        ),
        forbidden(
            "self.type == 'Picker' || !has(self.picker)",
            "picker is for type Picker only: remove it, or set type to Picker",
            field=".picker",
        ),
        Rule(
            "self.type == 'None' || has(self.maxReplicas)",
            "an autoscaler needs an upper bound: set maxReplicas",
            field=".maxReplicas",
            reason="FieldValueRequired",
        ),
        Rule(
            "!has(self.minReplicas) || !has(self.maxReplicas) || self.minReplicas <= self.maxReplicas",
            "minReplicas is more than maxReplicas: lower the one or raise the other",
            field=".minReplicas",
        ),
    )

    type: Literal["None", "Picker"] = "None"
    """None: you, or your own autoscaler with the pool as target. Picker: the operator, by the demand that pickers
    report; a request wakes a pool from zero."""
    min_replicas: Annotated[StrictInt, Field(ge=0, le=1000)] | None = None
    """Fewest replicas; default 1."""
    max_replicas: Annotated[StrictInt, Field(ge=1, le=1000)] | None = None
    """Most replicas."""
    picker: PickerScaling | None = None
    """Settings of type Picker."""


class Drain(Part):
    """Time for pods to finish their requests before they end."""

    timeout_seconds: Annotated[StrictInt, Field(ge=1, le=3600)] = 60
    """Time for running requests to end."""


class DisruptionBudget(Part):
    """The pool's PodDisruptionBudget."""

    RULES = (
        Rule(
            "!(string(self.maxUnavailable) in ['0', '0%'])",
            "0 would keep nodes from being drained: set maxUnavailable to 1 or more",
            field=".maxUnavailable",
        ),
    )

    max_unavailable: CountOrPercent = 1
    """Pods that may be missing while nodes are drained; percentages are rounded up."""


class Rollout(Part):
    """Replacement of pods after a change."""

    RULES = (
        Rule(
            "!(string(self.maxSurge) in ['0', '0%']) || !(string(self.maxUnavailable) in ['0', '0%'])",
            "with both at 0 no pod can be replaced: raise maxSurge or maxUnavailable",
        ),
        forbidden(
            "self.strategy != 'Replace' || string(self.maxSurge) in ['0', '0%', '1']",
            "strategy Replace starts no pod above replicas: remove maxSurge, or use strategy SurgeIfCapacity",
            field=".maxSurge",
        ),
    )

    strategy: Literal["SurgeIfCapacity", "Replace"] = "SurgeIfCapacity"
    """SurgeIfCapacity starts new pods beside the old ones; if no node has room for surgeTimeoutSeconds, it drains and
    replaces pods one by one. Replace removes old pods first, one or maxUnavailable at a time, without waiting for their
    requests."""
    max_surge: CountOrPercent = 1
    """Pods above replicas during a rollout; percentages are rounded up."""
    max_unavailable: CountOrPercent = 0
    """Pods below replicas during a rollout; percentages are rounded down."""
    surge_timeout_seconds: Annotated[StrictInt, Field(ge=0, le=604800)] = 120
    """How long SurgeIfCapacity waits for room. Raise it for a node autoscaler. A pool of one pod does not serve while
    its pod is replaced."""
    paused: StrictBool = False
    """Pause the rollout."""
