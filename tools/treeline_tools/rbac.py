"""What the operator may do in a cluster: each right by feature, with its reason; the chart's Roles are made from it.

Two places: what is done in every watched namespace (`WATCHED`), and what is done in the operator's own (`OWN`). No
right to read Secrets is declared, and none may be: tokens and keys are mounted by reference.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import yaml
from treeline_operator.rbac import PICKER, RULES_GROUPS, WATCH, Need, rules_need

from treeline_tools import GENERATED

APPLY: Final = ("create", "patch")
"""Server-side apply is a PATCH; where that makes the object (answer 201) the API server asks for `create` too."""
ON_CONFLICT: Final = "get"
"""Used after a write alone that found another state than was observed; the only verb whose absence seldom shows."""
LASTING: Final = (ON_CONFLICT, *WATCH, *APPLY)
"""A kind of which the operator makes objects and looks after them; they go with their owner alone."""
CHILD: Final = (*LASTING, "delete")
"""A kind of which it also removes objects, while their owner stays."""


@dataclass(frozen=True, slots=True)
class Feature:
    """Rights that are used together.

    `value` is the key under `rbac` in the chart's values that grants them, empty for what must be granted.
    """

    name: str
    needs: tuple[Need, ...]
    value: str = ""


WATCHED: Final = (
    Feature(
        "resources",
        (
            Need("treeline.dev", ("inferencepools", "inferencemodels"), WATCH, "what users ask for"),
            Need(
                "treeline.dev",
                ("inferencepools/status", "inferencemodels/status"),
                ("patch",),
                "what came of it",
            ),
        ),
    ),
    Feature(
        "workloads",
        (
            Need("apps", ("deployments",), CHILD, "runtimes, pickers and Envoys"),
            Need("", ("pods",), WATCH, "readiness and the causes of its absence"),
            Need(
                "",
                ("pods",),
                ("patch",),
                "which pods are to go: out of the rotation first, then first of all",
            ),
            Need("", ("pods/log",), ("get",), "the last line of a crash, the progress of a download"),
            Need("", ("services",), CHILD, "one URL a gateway, and the picker's address"),
            Need("discovery.k8s.io", ("endpointslices",), WATCH, "whether anything answers at a gateway's URL"),
            Need("", ("serviceaccounts",), CHILD, "an identity for each picker and Envoy"),
            Need("", ("configmaps",), CHILD, "Envoy's configuration, the gateway's anchor"),
            Need(
                "",
                ("secrets",),
                ("create",),
                "key pairs for KV sockets, keys to SGLang's administration; no Secret is ever read",
            ),
        ),
    ),
    Feature(
        "model-cache",
        (
            Need(
                "",
                ("persistentvolumeclaims",),
                LASTING,
                "the weights; never deleted by the operator",
            ),
        ),
    ),
    Feature(
        "picker-role",
        (
            Need("rbac.authorization.k8s.io", ("roles", "rolebindings"), LASTING, "what a picker may see"),
            *(
                Need(need.group, need.resources, need.verbs, f"granted to pickers: {need.why}", asked=False)
                for need in PICKER
            ),
        ),
    ),
    Feature(
        "picker-rules",
        tuple(
            Need(need.group, need.resources, need.verbs, f"granted to pickers: {need.why}", asked=False)
            for need in map(rules_need, RULES_GROUPS)
        ),
        value="gatewayRules",
    ),
    Feature(
        "ownership",
        (
            Need(
                "treeline.dev",
                ("inferencepools/finalizers",),
                ("update",),
                "ownerReferences that block their owner's deletion, on API servers that check who may write them",
                asked=False,
            ),
        ),
    ),
    Feature("disruption", (Need("policy", ("poddisruptionbudgets",), CHILD, "evictions one at a time"),)),
    Feature(
        "network",
        (Need("networking.k8s.io", ("networkpolicies",), CHILD, "default deny, and the paths of requests"),),
    ),
    Feature(
        "events",
        (
            Need(
                "",
                ("events",),
                ("create", "list"),
                "what the operator did and saw; while a pool is not Ready, what others saw of its pods",
            ),
        ),
    ),
    Feature(
        "picker-scaling",
        (
            Need("treeline.dev", ("inferencepools/scale",), ("patch",), "autoscaling.type Picker"),
            Need("autoscaling", ("horizontalpodautoscalers",), ("list",), "whether one of yours scales the pool"),
        ),
    ),
    Feature(
        "gateway-api",
        (
            Need("gateway.networking.k8s.io", ("httproutes",), CHILD, "gateway.parentRefs"),
            Need("inference.networking.k8s.io", ("inferencepools",), CHILD, "what a route leads to"),
            Need("gateway.networking.k8s.io", ("gateways",), ("get",), "whether the parents listen"),
        ),
        value="gatewayApi",
    ),
    Feature(
        "prometheus",
        (Need("monitoring.coreos.com", ("podmonitors",), CHILD, "metrics of pods, pickers and Envoys"),),
        value="prometheus",
    ),
)
"""What is done in the namespaces whose pools the operator looks after."""

LEASE: Final = "LEASE"
"""Stands for the name of the operator's Lease, which the chart fills in."""

OWN: Final = (
    Feature(
        "leader-election",
        (
            Need("coordination.k8s.io", ("leases",), ("create",), "one of the replicas acts"),
            Need("coordination.k8s.io", ("leases",), ("get", "update"), "the same", names=(LEASE,)),
        ),
    ),
)
"""What is done in the operator's own namespace."""


def granted(features: Iterable[Feature]) -> set[tuple[str, str, str]]:
    """Every (API group, resource, verb) that these features are granted."""
    return {
        (need.group, resource, verb)
        for feature in features
        for need in feature.needs
        for resource in need.resources
        for verb in need.verbs
    }


def feature_of(group: str, resource: str, verb: str) -> list[str]:
    """The names of the features that a request belongs to; none means that nothing declares it."""
    return [
        feature.name
        for feature in (*WATCHED, *OWN)
        if any(need.asked and need.covers(group, resource, verb) for need in feature.needs)
    ]


def _rules(features: tuple[Feature, ...]) -> list[dict[str, Any]]:
    """One entry a feature. What a feature that is always on grants already is not repeated by a later one."""
    entries: list[dict[str, Any]] = []
    held: set[tuple[str, str, str]] = set()
    for feature in features:
        needs = [need for need in feature.needs if need.names or not granted([Feature("", (need,))]) <= held]
        entry: dict[str, Any] = {"feature": feature.name}
        if feature.value:
            entry["value"] = feature.value
        else:
            held |= granted([feature])
        entries.append({**entry, "rules": [need.rule() for need in needs]})
    return entries


def chart_file() -> str:
    """The text of `charts/treeline/files/rbac.yaml`."""
    body = {"watched": _rules(WATCHED), "own": _rules(OWN)}
    return GENERATED + yaml.safe_dump(body, sort_keys=False, default_flow_style=None, width=120)
