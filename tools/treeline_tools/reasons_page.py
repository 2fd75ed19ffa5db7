"""docs/reasons.md: the page of all conditions and reasons."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from treeline_operator.api.conditions import ConditionType, Reason

_HEAD: Final = """\
# Conditions and reasons

What `kubectl describe tlpool` and `tlmodel` show, and what to do. Conditions, Events and metrics use the same words.

**Reading a status.** `Ready` is True while requests for the model succeed, also while pods are added, replaced or
missing; `Progressing` and `WorkloadsReady` then show the progress. The reason of `Ready` is that of the most important
condition: what needs action comes first. Its message has names, numbers and what to do. `observedGeneration` is the
version of the spec that was judged; `lastTransitionTime` changes with the condition's status only. `RouteAccepted` is
absent without `gateway.parentRefs`, `ScalingActive` without `autoscaling`, `Warnings` without warnings.

**Kinds.** *Well*: nothing to do. *Passes*: wait, or a state that you asked for. *Needs you*: stays until somebody acts;
the Event is a Warning. "After 60 s": a normal start may show it for that long, so the Warning comes later.
"""

_SECTIONS: Final = (
    (Reason.SERVING, "The pool as a whole"),
    (Reason.ROLLING_OUT, "Rollouts"),
    (Reason.PODS_READY, "Pods"),
    (Reason.MODEL_LOADED, "The model"),
    (Reason.PICKER_SYNCED, "The picker"),
    (Reason.GATEWAY_SERVING, "The gateway"),
    (Reason.AUTOSCALER_ACTIVE, "Scaling"),
    (Reason.CLAIM_NOT_SHAREABLE, "Warnings"),
    (Reason.ACCEPTED, "InferenceModels"),
    (Reason.CREATED, "Actions of the operator (Events only)"),
)
"""The first reason of each section of the list, and the section's title."""

_KINDS: Final = {True: "well", None: "passes", False: "needs you"}


def page() -> str:
    """The whole page."""
    return "\n".join((_HEAD, *_conditions(), *_reasons())) + "\n"


def _conditions() -> Iterator[str]:
    yield "## Conditions\n"
    yield "| condition | healthy | meaning |\n|---|---|---|"
    for kind in ConditionType:
        yield f"| `{kind}` | {kind.polarity} | {kind.summary} |"


def _reasons() -> Iterator[str]:
    begins = dict(_SECTIONS)
    for reason in Reason:
        if reason in begins:
            yield f"\n## {begins[reason]}\n\n| reason | kind | meaning | what to do |\n|---|---|---|---|"
        info = reason.info
        kind = _KINDS[info.good] + (f" after {info.patience_s} s" if info.patience_s else "")
        yield f"| `{reason}` | {kind} | {info.summary} | {info.fix or 'Nothing.'} |"
