"""The contents of a plan: writes to the API server, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from treeline_operator.world import Ref


@dataclass(frozen=True, slots=True)
class Apply:
    """Server-side apply of `object` with our field manager, forced. It contains only fields that we own.

    `drift` lists the paths that somebody else changed, empty if our own intent is new. `clears`: somebody added to a
    part that we own as a whole, which an apply alone would leave.
    """

    object: dict[str, Any]
    why: str
    drift: tuple[str, ...] = ()
    clears: bool = False

    @property
    def ref(self) -> Ref:
        return Ref.of(self.object)


@dataclass(frozen=True, slots=True)
class CreateKeys:
    """Create a Secret with fresh keys, a CURVE pair or one word; that it exists already is success. It is never read.

    `object` is the Secret without data.
    """

    object: dict[str, Any]
    why: str
    fresh: Literal["curve", "word"] = "curve"

    @property
    def ref(self) -> Ref:
        return Ref.of(self.object)


@dataclass(frozen=True, slots=True)
class Scale:
    """Set `spec.replicas` of a Deployment whose template must not change."""

    ref: Ref
    uid: str
    replicas: int
    why: str


@dataclass(frozen=True, slots=True)
class Mark:
    """Server-side apply of labels and annotations of exactly this pod.

    Marks that we set before and leave out now are removed. `step` is the pod's next state: draining, released, or
    serving again. `in_flight` is its number of requests, if known; `cut_off` says that the wait for them timed out.
    """

    ref: Ref
    uid: str
    labels: dict[str, str]
    annotations: dict[str, str]
    why: str
    step: Literal["drain", "release", "return"]
    in_flight: int | None = None
    cut_off: bool = False

    @property
    def object(self) -> dict[str, Any]:
        """The object to apply. With a uid it creates nothing if the pod is gone."""
        meta = {"name": self.ref.name, "namespace": self.ref.namespace, "uid": self.uid}
        marks = {"labels": self.labels, "annotations": self.annotations}
        return {"apiVersion": self.ref.api_version, "kind": self.ref.kind, "metadata": {**meta, **marks}}


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete exactly this object: `uid` is a precondition."""

    ref: Ref
    uid: str
    why: str


Action = Apply | CreateKeys | Scale | Mark | Delete


@dataclass(frozen=True, slots=True)
class Plan:
    """The actions of one unit, in order.

    `recheck_s` asks for another look after that many seconds, for example at the end of a grace period. `notes` explain
    decisions without actions, for `operate plan --explain` and the log.
    """

    actions: tuple[Action, ...] = ()
    recheck_s: float | None = None
    notes: tuple[str, ...] = field(default=())
