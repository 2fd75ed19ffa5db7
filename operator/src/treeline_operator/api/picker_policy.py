"""Owns how a pool says by which policy its pods are chosen: names, parameters, and which policy has which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal

from pydantic import Field, StrictFloat, StrictInt

from treeline_operator.api.parts import Part
from treeline_operator.api.rules import Rule, forbidden

Policy = Literal[
    "treeline",
    "predicted_ttft",
    "cache_aware",
    "round_robin",
    "random",
    "power_of_two",
    "least_load",
    "prefix_hash",
    "consistent_hashing",
    "bucket",
    "lora_affinity",
]

PARAMETERS: Final[Mapping[str, tuple[Policy, ...]]] = {
    "cacheThreshold": ("cache_aware",),
    "balanceAbsThreshold": ("cache_aware", "bucket"),
    "balanceRelThreshold": ("cache_aware", "bucket"),
    "prefixTokenCount": ("prefix_hash",),
    "loadFactor": ("prefix_hash", "consistent_hashing"),
    "bucketAdjustIntervalSecs": ("bucket",),
    "loadS": ("lora_affinity",),
    "rememberS": ("lora_affinity",),
}
"""Parameter → the policies that have it. For the others it is refused, as the picker would."""

HEEDING: Final = frozenset({"treeline", "predicted_ttft", "cache_aware", "lora_affinity"})
"""Policies that look at what the pods hold of a prompt. `prefix_hash` reads prompts, too, and needs no tokenizer."""

Number = Annotated[StrictFloat, Field(ge=0, le=1_000_000)]
Factor = Annotated[StrictFloat, Field(ge=1, le=1000)]


def parameter_rules() -> tuple[Rule, ...]:
    """A rule for each parameter: only with a policy that has it."""
    return tuple(_rule(name, policies) for name, policies in PARAMETERS.items())


def _rule(name: str, policies: tuple[Policy, ...]) -> Rule:
    return forbidden(
        f"!has(self.policyParameters) || !has(self.policyParameters.{name}) || self.policy in {list(policies)}",
        f"{name} is a parameter of {' and '.join(policies)}: remove it, or choose that policy",
        field=f".policyParameters.{name}",
    )


class PolicyParameters(Part):
    """Parameters of the policy; one that the policy does not have is refused. docs/routing.md has their meaning."""

    cache_threshold: Annotated[StrictFloat, Field(ge=0, le=1)] | None = None
    """cache_aware: the share of a prompt that must be cached for its pod to be chosen. Absent means 0.3."""
    balance_abs_threshold: Number | None = None
    """cache_aware (64 requests) and bucket (32 characters): loads that differ by no more are even."""
    balance_rel_threshold: Factor | None = None
    """cache_aware (1.5) and bucket (1.0001): nor are they uneven up to this factor."""
    prefix_token_count: Annotated[StrictInt, Field(ge=1, le=1_000_000)] | None = None
    """prefix_hash: tokens of the prompt that count. Absent means 256."""
    load_factor: Factor | None = None
    """prefix_hash and consistent_hashing: no pod has more than so many times the average load. Absent means 1.25."""
    bucket_adjust_interval_secs: Annotated[StrictFloat, Field(gt=0, le=86400)] | None = None
    """bucket: how often the ranges of lengths are set anew. Absent means 5."""
    load_s: Number | None = None
    """lora_affinity: seconds that loading an adapter costs. Absent means 1."""
    remember_s: Number | None = None
    """lora_affinity: how long a pod to which a request was sent is taken to have its adapter. Absent means 60."""

    @property
    def given(self) -> dict[str, str]:
        """Those that are set, by the picker's names."""
        found = self.model_dump(exclude_none=True)
        return {name: f"{value:.12g}" if isinstance(value, float) else str(value) for name, value in found.items()}
