"""Which Events tell how a status changed: one for each thing that somebody would want to hear of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

from treeline_operator.api.conditions import ConditionType, Reason

_WORTH_TELLING: Final = frozenset(
    (
        Reason.SCALED_TO_ZERO,
        Reason.ROLLING_OUT,
        Reason.PAUSED,
        Reason.WEIGHTS_DOWNLOADING,
        Reason.POD_SECURITY_EXCEPTION,
        Reason.FAIL_CLOSE_FORCED,
    )
)
"""Of the reasons that are neither good nor bad, those that are more than a moment's waiting."""


_MILESTONES: Final = frozenset((Reason.ROLLOUT_COMPLETE, Reason.MODEL_LOADED))
"""Good news even where nothing was wrong before."""


class EventNote(NamedTuple):
    """An Event to be recorded about the object whose status it is."""

    type: Literal["Normal", "Warning"]
    reason: Reason
    message: str


def transitions(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[EventNote]:
    """The Events for the step from one status to the next, each reason once; none for a status that says the same.

    What is bad is always told, unless it also passes by itself (see `alarms`); that all is well, only of what was not
    so before, and of `Ready` itself.
    """
    before = {condition["type"]: condition for condition in old.get("conditions", ())}
    notes: dict[Reason, EventNote] = {}
    # Ready repeats the reason of the condition that it fails for: that one is told first, in its own words.
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
    return was is not None and (reason in _MILESTONES or Reason(was["reason"]).info.good is False)
