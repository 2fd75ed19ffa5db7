"""The operator's rights by feature, each with its reason; the chart's Roles are made from it.

`WATCHED` is for every watched namespace, `OWN` for the operator's own. There is no right to read Secrets, and there
must be none: tokens and keys are mounted by reference.
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
"""Used only after a write conflict, so its absence seldom shows."""
LASTING: Final = (ON_CONFLICT, *WATCH, *APPLY)
"""Verbs for kinds that the operator creates and maintains; they are deleted only with their owner."""
CHILD: Final = (*LASTING, "delete")
"""Verbs for kinds whose objects it also deletes while their owner exists."""


@dataclass(frozen=True, slots=True)
class Feature:
    """Rights that are used together.

    `value` is the key under `rbac` in the chart's values that grants them; empty if always granted.
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
                "their status",
            ),
        ),
    ),
    Feature(
        "workloads",
        (
            Need("apps", ("deployments",), CHILD, "runtimes, pickers and Envoys"),
            Need("", ("pods",), WATCH, "readiness, and why pods are not ready"),
            Need(
                "",
                ("pods",),
                ("patch",),
                "marking pods that leave: first out of rotation, then deleted first",
            ),
            Need("", ("pods/log",), ("get",), "the last line of a crash; download progress"),
            Need("", ("services",), CHILD, "a gateway's URL, and the picker's address"),
            Need("discovery.k8s.io", ("endpointslices",), WATCH, "whether a gateway has endpoints"),
            Need("", ("serviceaccounts",), CHILD, "an identity for each picker and Envoy"),
            Need("", ("configmaps",), CHILD, "Envoy's configuration, the gateway's record"),
            Need(
                "",
                ("secrets",),
                ("create",),
                "key pairs of KV sockets, keys of SGLang's administration; no Secret is read",
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
            Need("rbac.authorization.k8s.io", ("roles", "rolebindings"), LASTING, "rights of a picker"),
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
        (Need("networking.k8s.io", ("networkpolicies",), CHILD, "default deny, and exceptions for requests"),),
    ),
    Feature(
        "events",
        (
            Need(
                "",
                ("events",),
                ("create", "list"),
                "the operator's Events; Events of pods while a pool is not Ready",
            ),
        ),
    ),
    Feature(
        "picker-scaling",
        (
            Need("treeline.dev", ("inferencepools/scale",), ("patch",), "autoscaling.type Picker"),
            Need("autoscaling", ("horizontalpodautoscalers",), ("list",), "whether another autoscaler scales the pool"),
        ),
    ),
    Feature(
        "gateway-api",
        (
            Need("gateway.networking.k8s.io", ("httproutes",), CHILD, "gateway.parentRefs"),
            Need("inference.networking.k8s.io", ("inferencepools",), CHILD, "backends of routes"),
            Need("gateway.networking.k8s.io", ("gateways",), ("get",), "whether the parents are ready"),
        ),
        value="gatewayApi",
    ),
    Feature(
        "groups",
        (Need("leaderworkerset.x-k8s.io", ("leaderworkersets",), CHILD, "replicas of several pods"),),
        value="leaderWorkerSet",
    ),
    Feature(
        "prometheus",
        (Need("monitoring.coreos.com", ("podmonitors",), CHILD, "metrics of pods, pickers and Envoys"),),
        value="prometheus",
    ),
)
"""Rights in the namespaces whose pools the operator manages."""

LEASE: Final = "LEASE"
"""Placeholder of the Lease's name, which the chart fills in."""

OWN: Final = (
    Feature(
        "leader-election",
        (
            Need("coordination.k8s.io", ("leases",), ("create",), "one replica is active"),
            Need("coordination.k8s.io", ("leases",), ("get", "update"), "the same", names=(LEASE,)),
        ),
    ),
)
"""Rights in the operator's own namespace."""


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
    """The features that allow a request; empty if none does."""
    return [
        feature.name
        for feature in (*WATCHED, *OWN)
        if any(need.asked and need.covers(group, resource, verb) for need in feature.needs)
    ]


def _rules(features: tuple[Feature, ...]) -> list[dict[str, Any]]:
    """One entry a feature, without what an earlier, always granted feature has."""
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
