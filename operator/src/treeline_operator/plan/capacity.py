"""What a rollout knows of nodes: would a pod that finds none find one in the place of another, and since when."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from decimal import Decimal
from typing import Any, Final

from treeline_operator.plan.facts import condition_of, since
from treeline_operator.quantity import quantity

Json = Mapping[str, Any]

_LACKING: Final = re.compile(r"Insufficient ([^\s,.]+(?:\.[^\s,.]+)*)")
_TOO_MANY: Final = "Too many pods"
_PLACING: Final = ("nodeSelector", "affinity", "tolerations", "runtimeClassName", "schedulerName", "nodeName")
"""Fields of a pod that decide on which nodes it may be."""


def waited_s(pods: Iterable[Json], refused_since: str | None, now: datetime) -> float:
    """The longest time for which one of these pods has had no node; `refused_since` is when pods began to be refused
    before they were made."""
    begun = [since(pod, "PodScheduled") for pod in pods]
    begun += [datetime.fromisoformat(refused_since)] if refused_since else []
    return max(((now - one).total_seconds() for one in begun if one is not None), default=0.0)


def fits_in_place(pods: Iterable[Json], new: Json, old: Json) -> bool:
    """Whether pods of the template `new` that have no node would get one if a pod of the template `old` went.

    Both are specs of pods. That is certain only if the nodes are the same and what is lacking is something that the new
    pod needs no more of. Pods that no node suits for another reason (a taint, a volume, a misspelt class) would find
    none either way, and then nothing may be taken away for them. Without pods a quota refuses them.
    """
    if any(new.get(field) != old.get(field) for field in _PLACING):
        return False
    needed, freed = requests(new), requests(old)
    lacking: set[str] = set()
    for pod in pods:
        words = str(condition_of(pod, "PodScheduled").get("message", ""))
        short = lacking_of(words)
        if not short and _TOO_MANY not in words:
            return False
        lacking |= short
    wanted = lacking or needed.keys()
    return all(needed.get(name, Decimal(0)) <= freed.get(name, Decimal(0)) for name in wanted)


def lacking_of(words: str) -> set[str]:
    """The resources of which nodes have too little, in a message of the scheduler."""
    return set(_LACKING.findall(words))


def requests(pod: Json) -> dict[str, Decimal]:
    """What the scheduler counts: the containers together, or an init container that needs more."""
    total: dict[str, Decimal] = {}
    for container in pod.get("containers", ()):
        for name, value in _asked(container).items():
            total[name] = total.get(name, Decimal(0)) + value
    for container in pod.get("initContainers", ()):
        for name, value in _asked(container).items():
            total[name] = max(total.get(name, Decimal(0)), value)
    return total


def _asked(container: Json) -> dict[str, Decimal]:
    resources = container.get("resources") or {}
    found = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {name: quantity(value) or Decimal(0) for name, value in found.items()}
