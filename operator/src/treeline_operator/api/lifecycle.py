"""Owns how many pods there are and how they change: autoscaling, drain, rollout."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StrictBool, StrictInt

from treeline_operator.api.parts import CountOrPercent, Part
from treeline_operator.api.rules import Rule, forbidden


class PickerScaling(Part):
    """By how much demand a replica more is asked for. What asks for most counts."""

    queued_tokens: Annotated[StrictInt, Field(ge=1, le=1_000_000_000)] = 16384
    """Prompt tokens that may wait for each replica, at its engine or in the picker. Cached ones do not count."""
    in_flight_requests: Annotated[StrictInt, Field(ge=1, le=1_000_000)] = 32
    """Requests that each replica is to have at once, those that the picker holds included."""
    ttft_milliseconds: Annotated[StrictInt, Field(ge=1, le=3_600_000)] | None = None
    """Time to first token that nine of ten requests are to stay below, as the picker predicts it when it sends them.
    Absent: it is not looked at."""
    scale_down_seconds: Annotated[StrictInt, Field(ge=0, le=86400)] = 300
    """Pods are taken away when nothing has asked for more for so long, and a pool goes to zero when it was idle for so
    long."""


class Autoscaling(Part):
    """Who owns the replicas."""

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
    """None: you by spec.replicas, or an autoscaler of yours, which takes the pool for its target: a
    HorizontalPodAutoscaler, a ScaledObject of KEDA. Picker: the operator, by what the pool's pickers see; a request
    wakes a pool from zero."""
    min_replicas: Annotated[StrictInt, Field(ge=0, le=1000)] | None = None
    """Fewest replicas; absent means 1."""
    max_replicas: Annotated[StrictInt, Field(ge=1, le=1000)] | None = None
    """Most replicas."""
    picker: PickerScaling | None = None
    """Settings of type Picker."""


class Drain(Part):
    """How a pod ends."""

    timeout_seconds: Annotated[StrictInt, Field(ge=1, le=3600)] = 60
    """Longest time that running requests get to end. Grace period, preStop and timeouts follow from it."""


class DisruptionBudget(Part):
    """The pool's PodDisruptionBudget."""

    RULES = (
        Rule(
            "!(string(self.maxUnavailable) in ['0', '0%'])",
            "a budget that allows no eviction keeps nodes from being drained: set maxUnavailable to 1 or more",
            field=".maxUnavailable",
        ),
    )

    max_unavailable: CountOrPercent = 1
    """Pods that may be missing while nodes are drained, as a number or a percentage of the pods (rounded up)."""


class Rollout(Part):
    """How a change reaches the pods."""

    RULES = (
        Rule(
            "!(string(self.maxSurge) in ['0', '0%']) || !(string(self.maxUnavailable) in ['0', '0%'])",
            "with neither a pod more nor a pod less nothing can be replaced: raise maxSurge or maxUnavailable",
        ),
        forbidden(
            "self.strategy != 'Replace' || string(self.maxSurge) in ['0', '0%', '1']",
            "strategy Replace starts no pod above replicas: remove maxSurge, or use strategy SurgeIfCapacity",
            field=".maxSurge",
        ),
    )

    strategy: Literal["SurgeIfCapacity", "Replace"] = "SurgeIfCapacity"
    """SurgeIfCapacity starts new pods beside the old ones. Where no node has had room for surgeTimeoutSeconds, it
    replaces them one by one: an old pod finishes its requests, goes, and the new one takes its place. Replace takes old
    pods away first, one or maxUnavailable at a time, and does not wait for their requests."""
    max_surge: CountOrPercent = 1
    """Pods above replicas while rolling, as a number or a percentage of replicas (rounded up). For strategy
    SurgeIfCapacity."""
    max_unavailable: CountOrPercent = 0
    """Pods below replicas while rolling, as a number or a percentage of replicas (rounded down)."""
    surge_timeout_seconds: Annotated[StrictInt, Field(ge=0, le=604800)] = 120
    """How long strategy SurgeIfCapacity waits for a node with room for a new pod before it replaces pods one by one.
    More gives a cluster autoscaler time to add nodes; a pool of one pod does not serve while its pod is replaced."""
    paused: StrictBool = False
    """Keep old and new pods as they are."""
