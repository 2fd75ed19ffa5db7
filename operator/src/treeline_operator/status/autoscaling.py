"""What the status says of a pool that is scaled by what its pickers tell."""

from __future__ import annotations

from treeline_operator.api.conditions import Reason
from treeline_operator.api.pool import AutoscalingStatus
from treeline_operator.plan.replicas import Target
from treeline_operator.status.conditions import Judgement, timestamp
from treeline_operator.world import PoolWorld, Scaled

_MESSAGE = 512


def scaling(world: PoolWorld) -> Judgement | None:
    """Whether the operator sets the replicas; None where it is not to."""
    if world.pool.spec.autoscaling.type == "None":
        return None
    state, target = world.scaling, Target.of(world.pool.spec.autoscaling)
    if state is None:
        return "Unknown", Reason.PENDING, "the pickers have not been asked yet"
    if state.owner:
        return "False", Reason.SCALED_BY_ANOTHER, f"{state.owner} scales the pool"
    if not state.heard:
        return "False", Reason.SIGNALS_MISSING, f"no picker of gateway {world.gateway.name} tells of the demand"
    text = f"the demand that the pickers see sets replicas between {target.least} and {target.most}"
    return "True", Reason.AUTOSCALER_ACTIVE, text


def last_scaled(world: PoolWorld) -> AutoscalingStatus:
    """The last time that the replicas were set by it; what an earlier operator wrote of that stays."""
    if world.pool.spec.autoscaling.type != "Picker":
        return {}
    if world.scaling is None or world.scaling.last is None:
        return world.pool.status.get("autoscaling", {})
    return _figures(world.scaling.last)


def _figures(last: Scaled) -> AutoscalingStatus:
    found: AutoscalingStatus = {
        "lastScaleTime": timestamp(last.at),
        "replicas": last.replicas,
        "message": last.why[:_MESSAGE],
    }
    if (told := last.signals) is None:
        return found
    asked = told.asked
    found["heldRequests"] = asked.held.requests
    found["missedRequests"] = asked.missed.requests
    found["queuedTokens"] = told.queued_tokens + asked.held.tokens
    found["inFlightRequests"] = told.in_flight_requests
    if asked.ttft_p90_s is not None:
        found["ttftMilliseconds"] = round(asked.ttft_p90_s * 1000)
    return found
