"""Owns `spec.prefill`: pods that compute prompts for the pool's pods, which then answer."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import Field, StrictInt, WithJsonSchema

from treeline_operator.api.engine import Accelerator, args_say
from treeline_operator.api.parts import Part, template_rules, template_schema
from treeline_operator.api.rules import Rule, forbidden

NIXL_PORT: Final = 5600
"""Where vLLM's engines meet; those of further data-parallel ranks count up from there."""
BOOTSTRAP_PORT: Final = 8998
"""Where SGLang's prefill engines are met."""
_ROLE_FLAGS: Final = {
    "vllm": ("--kv-transfer-config",),
    "sglang": ("--disaggregation-mode", "--disaggregation-bootstrap-port"),
}
_OWN: Final = "!has(self.prefill) || !has(self.prefill.accelerator)"


class Prefill(Part):
    """Pods that compute prompts. What is not given here is as for the pool's own pods."""

    RULES = (
        forbidden(
            "!has(self.accelerator) || self.accelerator.nodes == 1",
            "a prefill replica is one pod: remove nodes",
            field=".accelerator.nodes",
        ),
        Rule(
            "!has(self.minReplicas) || (has(self.maxReplicas) && self.minReplicas <= self.maxReplicas)",
            "minReplicas needs a maxReplicas that is not less: set prefill.maxReplicas",
            field=".minReplicas",
        ),
        *template_rules(),
    )

    replicas: Annotated[StrictInt, Field(ge=1, le=1000)] = 1
    """Number of pods; none while the pool's own replicas are 0. With maxReplicas the number to begin with."""
    min_replicas: Annotated[StrictInt, Field(ge=1, le=1000)] | None = None
    """Fewest pods; default 1."""
    max_replicas: Annotated[StrictInt, Field(ge=1, le=1000)] | None = None
    """Most pods: the operator has as many as `status.prefill.advisedReplicas`. With autoscaling.type Picker."""
    accelerator: Accelerator | None = None
    """Devices of a pod, in place of the pool's."""
    template: Annotated[dict[str, Any], WithJsonSchema(template_schema("`runtime` is the engine's"))] | None = None
    """PodTemplate fragment, laid over the pool's."""


PREFILL_RULES: Final = (
    forbidden(
        "!has(self.prefill) || !has(self.prefill.maxReplicas) || self.autoscaling.type == 'Picker'",
        "pods that compute prompts are scaled together with the others: set autoscaling.type to Picker",
        field=".prefill.maxReplicas",
    ),
    forbidden(
        "!has(self.prefill) || self.engine.type != 'custom'",
        "it is unknown how engine custom hands prompts over from pod to pod: remove prefill, or use another engine",
        field=".prefill",
    ),
    Rule(
        "!has(self.prefill) || self.engine.type != 'treeline' || has(self.engine.hostCache)",
        "prompts pass through the memory of both pods: set engine.hostCache, such as 16Gi",
        field=".engine.hostCache",
        reason="FieldValueRequired",
    ),
    forbidden(
        "!has(self.engine.hostCache) || self.accelerator.nodes == 1",
        "a model split over several pods has no host cache: remove engine.hostCache, or set accelerator.nodes to 1",
        field=".engine.hostCache",
    ),
    Rule(
        f"{_OWN} || self.engine.type != 'treeline' || self.accelerator.type == 'cpu' || has(self.engine.tensorParallel)"
        " || self.prefill.accelerator.count == self.accelerator.count",
        "both sides split the model over as many devices: set engine.tensorParallel, or both counts to the same",
        field=".prefill.accelerator.count",
    ),
    Rule(
        f"{_OWN} || self.prefill.accelerator.type == self.accelerator.type",
        "both sides have the engine's image: give prefill.accelerator the type of accelerator",
        field=".prefill.accelerator.type",
    ),
    Rule(
        f"{_OWN} || self.accelerator.type == 'cpu' || self.prefill.accelerator.count"
        " % ((has(self.engine.tensorParallel) ? self.engine.tensorParallel : 1) * self.engine.dataParallel) == 0",
        "every copy of the model needs its devices: set prefill.accelerator.count to a multiple of tensorParallel times"
        " dataParallel",
        field=".prefill.accelerator.count",
    ),
    Rule(
        f"!has(self.prefill) || (self.engine.port != {BOOTSTRAP_PORT} && (self.engine.port < {NIXL_PORT}"
        f" || self.engine.port >= {NIXL_PORT} + self.engine.dataParallel))",
        f"ports {BOOTSTRAP_PORT}, {NIXL_PORT} and the following ones, as many as dataParallel, are for prompts that are"
        " handed over: choose another",
        field=".engine.port",
    ),
    *(
        forbidden(
            f"!has(self.prefill) || self.engine.type != '{engine}' || !({args_say(flags, 'self.engine')})",
            f"the operator sets {' and '.join(flags)} of pods with prefill: remove them from args",
            field=".engine.args",
        )
        for engine, flags in _ROLE_FLAGS.items()
    ),
)
"""Rules of a pool's spec about its prefill pods."""
