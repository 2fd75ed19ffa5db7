"""The rights that the operator grants to each picker's ServiceAccount.

The operator's own rights are in `tools/treeline_tools/rbac.py`, from which the chart's Roles are made. They must
include all of these: Kubernetes lets no account grant more than it has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

WATCH: Final = ("list", "watch")


@dataclass(frozen=True, slots=True)
class Need:
    """One right: verbs on resources of one API group, and its reason.

    `names` limits it to objects of these names (not possible for verbs without a name, such as `create`). `asked` is
    False for a right that no request uses by itself: the API server checks it while it admits another.
    """

    group: str
    resources: tuple[str, ...]
    verbs: tuple[str, ...]
    why: str
    names: tuple[str, ...] = ()
    asked: bool = True

    def rule(self) -> dict[str, Any]:
        """The rule of a Role that grants exactly this."""
        rule = {"apiGroups": [self.group], "resources": list(self.resources), "verbs": list(self.verbs)}
        return rule | {"resourceNames": list(self.names)} if self.names else rule

    def covers(self, group: str, resource: str, verb: str) -> bool:
        """Whether this right allows the request, apart from names."""
        return group == self.group and resource in self.resources and verb in self.verbs


PICKER: Final = (
    Need("", ("pods",), WATCH, "the endpoints of its pools"),
    Need("treeline.dev", ("inferencepools", "inferencemodels"), WATCH, "pools and models that it serves"),
)
"""Rights of our own pickers (`--gateway`), besides `rules_need`. Users who run a picker for an upstream InferencePool
(`--pool-name`) grant it the rights to that kind themselves."""

RULES_GROUPS: Final = ("inference.networking.x-k8s.io", "llm-d.ai")
"""API groups of InferenceObjectives and InferenceModelRewrites (v1alpha2): of the Gateway API Inference Extension up to
1.5, and of llm-d since."""


def rules_need(group: str) -> Need:
    """Further rights of a picker with `--rules-group`; these kinds may be missing from the cluster."""
    return Need(group, ("inferenceobjectives", "inferencemodelrewrites"), WATCH, "priorities and rewrites of requests")
