"""docs/reasons.md: the page of all conditions and reasons."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from treeline_operator.api.conditions import ConditionType, Reason

_HEAD: Final = """\
# Conditions and reasons

What `kubectl describe tlpool` and `tlmodel` say, and what to do about it. This page is generated from the words that
the operator uses (`operator/src/treeline_operator/api/conditions.py`); conditions, Events and metrics have
the same ones.

**Reading a status.** Look at `Ready`. It is True while requests for the model succeed, also while pods are added,
replaced or missing; then `Progressing` and `WorkloadsReady` say how far that is. Its reason is that of the condition
which matters most: what needs somebody comes before what passes by itself, also where it is True. Its message has
names, numbers, and the line of the table below under "what to do". `observedGeneration` says which version of the
spec was judged; `lastTransitionTime` moves only when the condition turns over. Conditions without a meaning for the
pool are absent: `RouteAccepted` without `gateway.parentRefs`, `ScalingActive` without `autoscaling`,
`Warnings` without any.

**Kinds.** *Well*: nothing to do. *Passes*: wait, or a state that somebody asked for. *Needs you*: it stays so until
somebody acts; the Event is a Warning. What a normal start may show for a moment too has its time beside it, and the
Warning comes when it has lasted for longer.
"""

_SECTIONS: Final = (
    (Reason.SERVING, "The pool as a whole"),
    (Reason.ROLLING_OUT, "Rollouts"),
    (Reason.PODS_READY, "Pods"),
    (Reason.MODEL_LOADED, "The model"),
    (Reason.PICKER_SYNCED, "The picker"),
    (Reason.GATEWAY_SERVING, "The gateway"),
    (Reason.AUTOSCALER_ACTIVE, "Scaling"),
    (Reason.CLAIM_NOT_SHAREABLE, "What the spec asks for in vain"),
    (Reason.ACCEPTED, "InferenceModels"),
    (Reason.CREATED, "What the operator did (Events only)"),
)
"""Where a part of the list begins."""

_KINDS: Final = {True: "well", None: "passes", False: "needs you"}


def page() -> str:
    """The whole page."""
    return "\n".join((_HEAD, *_conditions(), *_reasons())) + "\n"


def _conditions() -> Iterator[str]:
    yield "## Conditions\n"
    yield "| condition | all is well | means |\n|---|---|---|"
    for kind in ConditionType:
        yield f"| `{kind}` | {kind.polarity} | {kind.summary} |"


def _reasons() -> Iterator[str]:
    begins = dict(_SECTIONS)
    for reason in Reason:
        if reason in begins:
            yield f"\n## {begins[reason]}\n\n| reason | kind | means | what to do |\n|---|---|---|---|"
        info = reason.info
        kind = _KINDS[info.good] + (f" after {info.patience_s} s" if info.patience_s else "")
        yield f"| `{reason}` | {kind} | {info.summary} | {info.fix or 'Nothing.'} |"
