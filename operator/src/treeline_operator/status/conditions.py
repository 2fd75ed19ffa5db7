"""Conditions as Kubernetes keeps them: generations, transition times, order, and when two statuses say the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from treeline_operator.api.conditions import ConditionType, Reason, Status
from treeline_operator.api.parts import Condition

_ORDER: Final = {kind: place for place, kind in enumerate(ConditionType)}
_MAX_MESSAGE: Final = 4096


Judgement = tuple[Status, Reason, str]
"""Status, reason and message of a condition; the reason's fix is added later."""


def with_fix(reason: Reason, detail: str) -> str:
    """The message of a condition or Event: the state, and what to do."""
    said = detail.strip().rstrip(".")[:_MAX_MESSAGE]
    return f"{said}. {reason.fix}" if reason.fix else f"{said}."


def build(
    judged: Mapping[ConditionType, Judgement],
    generation: int,
    previous: Iterable[Mapping[str, Any]],
    now: datetime,
    *,
    fixes: bool = True,
) -> list[Condition]:
    """The conditions of a status, in fixed order. Conditions that are not judged are dropped.

    `lastTransitionTime` stays as in `previous` while the status does, and never goes back. Without `fixes` the messages
    are complete.
    """
    known = {condition["type"]: condition for condition in previous}
    stamp = timestamp(now)
    return [
        Condition(
            type=str(kind),
            status=status,
            reason=str(reason),
            message=with_fix(reason, detail) if fixes else detail,
            lastTransitionTime=_since(status, known.get(kind), stamp),
            observedGeneration=generation,
        )
        for kind, (status, reason, detail) in sorted(judged.items(), key=lambda item: _ORDER[item[0]])
    ]


def few(items: Iterable[str], most: int = 5) -> str:
    """Some names, and how many more there are."""
    everything = list(items)
    more = f" and {len(everything) - most} more" if len(everything) > most else ""
    return ", ".join(everything[:most]) + more


def timestamp(moment: datetime) -> str:
    """A moment as Kubernetes writes it."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def same_status(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two statuses are equal, so that nothing needs to be written.

    The order of conditions, empty fields and transition times (which follow from statuses) do not count.
    """
    return _essence(one) == _essence(other)


def _essence(status: Mapping[str, Any]) -> dict[str, Any]:
    fields = {key: value for key, value in status.items() if value not in (None, "", [], {}, ())}
    reported = {
        condition["type"]: {key: value for key, value in condition.items() if key != "lastTransitionTime"}
        for condition in fields.get("conditions", ())
    }
    return {**fields, "conditions": reported}


def _since(status: Status, before: Mapping[str, Any] | None, stamp: str) -> str:
    if before is None:
        return stamp
    since = str(before.get("lastTransitionTime") or stamp)
    return since if before.get("status") == status else max(stamp, since)
