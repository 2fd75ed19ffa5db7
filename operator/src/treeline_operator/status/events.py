"""Chooses the Events that report a change of status. A problem that also occurs in a normal start is reported only if
it lasts longer."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final, Literal, NamedTuple

from treeline_operator.api.conditions import ConditionType, Reason
from treeline_operator.world import Ref

_WORTH_TELLING: Final = frozenset(
    (
        Reason.SCALED_TO_ZERO,
        Reason.ROLLING_OUT,
        Reason.PAUSED,
        Reason.WEIGHTS_DOWNLOADING,
        Reason.FAIL_CLOSE_FORCED,
    )
)
"""Neutral reasons that last longer than a moment."""

_PROBLEMS: Final = frozenset(reason for reason in Reason if reason.info.good is False)
_MILESTONES: Final = frozenset((Reason.ROLLOUT_COMPLETE, Reason.MODEL_LOADED))
"""Good news even where nothing was wrong before."""


class EventNote(NamedTuple):
    """An Event to record about the object of the status."""

    type: Literal["Normal", "Warning"]
    reason: Reason
    message: str


def transitions(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[EventNote]:
    """The Events for a change of status, each reason once; none if the status is the same.

    Problems are always reported, unless they may pass by themselves (see `Alarms`); recovery only for earlier problems,
    and for `Ready`.
    """
    before = {condition["type"]: condition for condition in old.get("conditions", ())}
    notes: dict[Reason, EventNote] = {}
    # Ready repeats another condition's reason: that condition's message is reported.
    for condition in sorted(new.get("conditions", ()), key=lambda one: one["type"] == ConditionType.READY):
        was = before.get(condition["type"])
        if was is not None and (was["status"], was["reason"]) == (condition["status"], condition["reason"]):
            continue
        reason = Reason(condition["reason"])
        if _matters(condition, was, reason):
            warning = reason.info.good is False
            notes.setdefault(reason, EventNote("Warning" if warning else "Normal", reason, condition["message"]))
    already = {
        condition["reason"]
        for kind, condition in before.items()
        if any(one["type"] == kind and one["reason"] == condition["reason"] for one in new.get("conditions", ()))
    }
    return [note for reason, note in notes.items() if reason not in already]


def _matters(condition: Mapping[str, Any], was: Mapping[str, Any] | None, reason: Reason) -> bool:
    kind, good = ConditionType(condition["type"]), reason.info.good
    if reason.info.patience_s:
        return False
    if good is False or reason in _WORTH_TELLING:
        return True
    if good is None:
        return False
    if kind in (ConditionType.READY, ConditionType.ACCEPTED):
        return True
    return was is not None and (reason in _MILESTONES or was["reason"] in _PROBLEMS)


class Due(NamedTuple):
    """Warnings to be posted now, and the seconds until the next one may be due."""

    notes: tuple[EventNote, ...] = ()
    again_s: float | None = None


@dataclass(slots=True)
class _Alarm:
    since: datetime
    reported: bool = False


@dataclass(slots=True)
class Alarms:
    """The start of each object's state that needs action, for reasons with a patience. In memory only: a new operator
    takes the time from the present condition."""

    _known: dict[Ref, dict[Reason, _Alarm]] = field(default_factory=dict)

    def due(self, ref: Ref, before: Mapping[str, Any], status: Mapping[str, Any], now: datetime) -> Due:
        """The Warnings for the change from `before` to `status`. Each is posted once while it lasts; a reason that
        disappears and returns starts again."""
        reported, known = dict(_patient(status)), self._known.get(ref, {})
        found = {reason: known.get(reason) or _noticed(reason, before, now) for reason in reported}
        notes, again = [], []
        for reason, alarm in found.items():
            left_s = reason.info.patience_s - (now - alarm.since).total_seconds()
            if alarm.reported:
                continue
            if left_s > 0:
                again.append(left_s)
                continue
            alarm.reported = True
            notes.append(EventNote("Warning", reason, reported[reason]))
        if found:
            self._known[ref] = found
        else:
            self._known.pop(ref, None)
        return Due(tuple(notes), min(again, default=None))

    def forget(self, ref: Ref) -> None:
        """Forget a deleted object."""
        self._known.pop(ref, None)

    def retain(self, kind: str, namespace: str, names: Container[str]) -> None:
        """Forget the objects of a kind and namespace that have none of these names: they were deleted."""
        gone = [r for r in self._known if (r.kind, r.namespace) == (kind, namespace) and r.name not in names]
        for ref in gone:
            del self._known[ref]


def _patient(status: Mapping[str, Any]) -> Iterator[tuple[Reason, str]]:
    """Reasons with a patience, and their messages from the first condition with that reason."""
    conditions: Iterable[Mapping[str, Any]] = status.get("conditions", ())
    # Ready comes first here and is overwritten: it repeats the reason of another condition.
    for condition in sorted(conditions, key=lambda one: one["type"] != ConditionType.READY):
        reason = Reason(condition["reason"])
        if reason.info.good is False and reason.info.patience_s:
            yield reason, condition["message"]


def _noticed(reason: Reason, before: Mapping[str, Any], now: datetime) -> _Alarm:
    """An alarm for a reason that this process sees for the first time. It starts now, or when the former operator
    reported it."""
    for condition in before.get("conditions", ()):
        if condition["reason"] == reason and condition.get("lastTransitionTime"):
            since = min(now, datetime.fromisoformat(condition["lastTransitionTime"]))
            return _Alarm(since, reported=now - since >= timedelta(seconds=reason.info.patience_s))
    return _Alarm(now)
