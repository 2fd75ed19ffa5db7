"""What a plan consists of: writes to the API server, each with the reason for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from treeline_operator.world import Ref


@dataclass(frozen=True, slots=True)
class Apply:
    """Server-side apply of `object` with our field manager, forced. Only fields that we own are in it.

    `drift` are the paths that somebody else changed under us, empty where the intent itself is new. `clears`: somebody
    added something to what is ours as a whole; an apply alone would leave it there.
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
    """Set `spec.replicas` of a Deployment whose template is not to be touched."""

    ref: Ref
    uid: str
    replicas: int
    why: str


@dataclass(frozen=True, slots=True)
class Mark:
    """Server-side apply of labels and annotations of exactly this pod, and of nothing else.

    What we marked before and leave out now is removed. `step` says where on its way out the pod is then: it begins to
    drain, it may go, or it serves again. `in_flight` are the requests that it has, where that is known; `cut_off`
    tells that they were waited for in vain.
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
        """What is applied. With a uid it makes nothing where the pod has gone."""
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
    """The actions of one unit, in the order in which they are to be done.

    `recheck_s` asks for another look after so many seconds, where time itself is a reason (a grace period).
    `notes` explain decisions that led to no action, for `operate plan --explain` and the log.
    """

    actions: tuple[Action, ...] = ()
    recheck_s: float | None = None
    notes: tuple[str, ...] = field(default=())
