"""What an object that is there says of itself: labels, annotations, conditions, and how far its controller is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from treeline_operator.world import Observed


def find(children: Iterable[Observed], kind: str, name: str, group: str | None = None) -> Observed | None:
    """A child by kind and name, and by API group where kinds of several have that name."""
    for child in children:
        ref = child.ref
        if (ref.kind, ref.name) == (kind, name) and group in (None, ref.api_version.rpartition("/")[0]):
            return child
    return None


def label(obj: Mapping[str, Any], name: str) -> str:
    """The value of a label; empty without it."""
    return str((obj["metadata"].get("labels") or {}).get(name, ""))


def annotation(obj: Mapping[str, Any], name: str) -> str:
    """The value of an annotation; empty without it."""
    return str((obj["metadata"].get("annotations") or {}).get(name, ""))


def created(obj: Mapping[str, Any]) -> datetime:
    """When an object was made; long ago where it does not say."""
    return datetime.fromisoformat(obj["metadata"].get("creationTimestamp") or "1970-01-01T00:00:00Z")


def is_observed(obj: Mapping[str, Any]) -> bool:
    """Whether its controller has read its spec as it is now."""
    read: int = (obj.get("status") or {}).get("observedGeneration", 0)
    written: int = obj["metadata"].get("generation", 0)
    return read >= written


def since(obj: Mapping[str, Any], kind: str) -> datetime | None:
    """Since when a condition is as it is, or the object where it is not told; None where neither says."""
    told = condition_of(obj, kind).get("lastTransitionTime") or obj["metadata"].get("creationTimestamp")
    return datetime.fromisoformat(told) if told else None


def is_overdue(deployment: Mapping[str, Any]) -> bool:
    """Whether the Deployment's controller has given up waiting for its newest pods."""
    return condition_of(deployment, "Progressing").get("reason") == "ProgressDeadlineExceeded"


def condition_of(obj: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """A condition of an object's status by its type; empty where it is not told."""
    reported: Iterable[Mapping[str, Any]] = (obj.get("status") or {}).get("conditions") or ()
    return next((one for one in reported if one["type"] == kind), {})
