"""docs/reasons.md: the page of all conditions and reasons."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Final

from treeline_operator.api.conditions import ConditionType, Reason

_HEAD: Final = """\
# Conditions and reasons

The words of `kubectl describe tlpool` and `tlmodel`, of Events and of metrics.

`Ready` is True while requests for the model succeed, also while pods are added, replaced or missing. Its reason is that
of the most important condition, its message has names, numbers and what to do. A condition that does not apply is
absent. `observedGeneration` is the version of the spec that was judged.

"Warning" says when the Event becomes a Warning: *at once*, after the time that a normal start may take, or *no* for
states that pass or that you asked for.
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


def page() -> str:
    """The whole page."""
    return "\n".join((_HEAD, *_conditions(), *_reasons())) + "\n"


def _conditions() -> Iterator[str]:
    yield "## Conditions\n"
    yield "| condition | healthy | meaning |\n|---|---|---|"
    for kind in ConditionType:
        yield f"| `{kind}` | {kind.polarity} | {kind.summary} |"


def _reasons() -> Iterator[str]:
    starts = [*(list(Reason).index(first) for first, _ in _SECTIONS), len(Reason)]
    for (_, title), (start, end) in zip(_SECTIONS, pairwise(starts), strict=True):
        found = list(Reason)[start:end]
        yield f"\n## {title}\n"
        if well := [f"`{reason}`" for reason in found if reason.info.good]:
            yield f"All is well: {', '.join(well)}.\n"
        yield "| reason | Warning | meaning | what to do |\n|---|---|---|---|"
        yield from (_row(reason) for reason in found if not reason.info.good)


def _row(reason: Reason) -> str:
    info = reason.info
    warning = "no" if info.good is None else f"{info.patience_s} s" if info.patience_s else "at once"
    return f"| `{reason}` | {warning} | {info.summary} | {info.fix} |"
