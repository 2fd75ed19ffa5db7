"""Carries out a plan: each action as one request, answers into the store, refusals gathered."""

from __future__ import annotations

import base64
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

import zmq
from treeline_kube.client import Client
from treeline_kube.errors import AlreadyExists, Conflict, Forbidden, Invalid, KubeError, NotFound, Unavailable
from treeline_wire.security import PUBLIC_FILE, SECRET_FILE

from treeline_operator import names
from treeline_operator.actions import Action, Apply, CreateKeys, Delete, Mark, Plan, Scale
from treeline_operator.api.conditions import Reason
from treeline_operator.controller.store import Store
from treeline_operator.plan.diff import whole_spec
from treeline_operator.plan.facts import label
from treeline_operator.status.conditions import timestamp
from treeline_operator.world import Ref

log = logging.getLogger(__name__)

Object = dict[str, Any]

_INTERNAL: Final = 500
"""The answer where a webhook for one kind is broken: the other kinds are written all the same."""


@dataclass(slots=True)
class Done:
    """The outcome of a plan. `refused` are the objects that could not be written, each with the reason."""

    written: dict[Reason, list[str]] = field(default_factory=dict)
    drifted: list[tuple[Ref, tuple[str, ...]]] = field(default_factory=list)
    refused: list[tuple[Ref, KubeError]] = field(default_factory=list)
    stale: bool = False
    """An object was not as observed: plan again from the present state."""

    def note(self, reason: Reason, ref: Ref, more: str = "") -> None:
        """One write was done."""
        self.written.setdefault(reason, []).append(f"{ref.kind} {ref.name}{more}")


@dataclass(slots=True)
class Executor:
    """Does what plans say, in their order."""

    writer: Client
    store: Store
    clock: Callable[[], datetime]

    async def execute(self, plan: Plan) -> Done:
        """Do all of a plan. A refusal does not keep the other objects from being applied, but nothing is scaled or
        deleted behind one: what should have replaced it may not be there. Other KubeErrors end it.
        """
        done = Done()
        for action in plan.actions:
            if (done.refused or done.stale) and _takes_away(action):
                continue
            try:
                await self._do(action, done)
            except (Conflict, NotFound) as exc:
                log.info("not as observed: %s", exc)
                await self._observe_anew(action, exc)
                done.stale = True
            except (Invalid, Forbidden, Unavailable) as exc:
                if isinstance(exc, Unavailable) and exc.code != _INTERNAL:
                    raise
                if exc.has_cause("NamespaceTerminating"):
                    log.info("namespace %s is being deleted: nothing more is created in it", action.ref.namespace)
                    break
                log.warning("refused: %s", exc, extra={"object": action.ref, "why": action.why})
                done.refused.append((action.ref, exc))
        return done

    async def _do(self, action: Action, done: Done) -> None:
        log.debug("%s %s: %s", type(action).__name__, action.ref, action.why)
        match action:
            case Apply():
                known = self.store.get(action.ref) is not None
                if not known and (foreign := await self._foreign_object(action)):
                    done.refused.append((action.ref, foreign))
                    return
                self.store.put(await self._apply(action))
                if action.drift:
                    done.drifted.append((action.ref, action.drift))
                else:
                    done.note(Reason.APPLIED if known else Reason.CREATED, action.ref)
            case CreateKeys():
                try:
                    await self.writer.create(with_keys(action))
                    done.note(Reason.CREATED, action.ref)
                except AlreadyExists:
                    log.debug("%s is there already", action.ref)
            case Scale():
                self.store.put(await self.writer.scale(action.ref, action.uid, action.replicas))
                done.note(Reason.SCALED, action.ref, f" to {action.replicas}")
            case Mark():
                self.store.put(await self.writer.apply(action.object))
                _note_mark(action, done)
            case Delete():
                await self.writer.delete(action.ref, uid=action.uid)
                self.store.mark_deleting(action.ref, action.uid, timestamp(self.clock()))
                done.note(Reason.DELETED, action.ref)

    async def _apply(self, action: Apply) -> Object:
        """Apply. If other owners' fields in a part that is ours as a whole remain, or cause a refusal (a second port of
        the same name), first correct them."""
        there = self.store.get(action.ref)
        spec = None if there is None else whole_spec(action.object, there.object)
        refused: Invalid | None = None
        if not action.clears or there is None or spec is None:
            try:
                return await self.writer.apply(action.object)
            except Invalid as exc:
                if there is None or spec is None:
                    raise
                refused = exc
        try:
            await self.writer.replace_spec(action.ref, there.resource_version, spec)
        except Invalid as exc:
            raise refused or exc from None
        return await self.writer.apply(action.object)

    async def _foreign_object(self, action: Apply) -> KubeError | None:
        """Return why an object that we do not see cannot be applied, or None: an object of that name may belong to
        another owner, and server-side apply would take it over. Our own objects without their label are recognised by
        their owner."""
        try:
            there = await self.writer.get(action.ref)
        except NotFound:
            return None
        wanted = _owners(action.object["metadata"])
        # Objects shared by pools (a gateway's anchor) have no controller among their owners; all others have one.
        controlled = any(wanted.values())
        owners = {uid for uid, controls in _owners(there["metadata"]).items() if controls or not controlled}
        if label(there, names.MANAGED_BY) == names.MANAGER or owners & wanted.keys():
            return None
        text = f"{action.ref.kind} {action.ref.name} exists and is not the operator's; rename or delete it"
        log.warning("%s", text)
        return KubeError(text, code=409)

    async def _observe_anew(self, action: Action, exc: KubeError) -> None:
        """Read the one object that was not as expected. The Secret with the keys is never read; a pod is not read
        either, since its watch will report it."""
        known = self.store.get(action.ref)
        if isinstance(action, CreateKeys):
            return
        if isinstance(exc, Conflict) and not isinstance(action, Mark):
            try:
                self.store.put(await self.writer.get(action.ref))
                return
            except NotFound:
                pass
        if known is not None and not isinstance(action, Apply):
            self.store.remove(action.ref, known.uid, known.resource_version)


def _takes_away(action: Action) -> bool:
    """Whether the action ends something that serves."""
    return isinstance(action, Scale | Delete) or (isinstance(action, Mark) and action.step != "return")


def _note_mark(mark: Mark, done: Done) -> None:
    left = "" if mark.in_flight is None else f" ({mark.in_flight} in flight)"
    match mark.step:
        case "drain":
            done.note(Reason.DRAINING, mark.ref, left)
        case "return":
            done.note(Reason.DRAIN_CANCELLED, mark.ref)
        case "release" if mark.cut_off:
            done.note(Reason.DRAIN_TIMEOUT, mark.ref, left)


def with_keys(action: CreateKeys) -> Object:
    """The requested Secret: a key pair as `treeline_wire.security` reads it, or a word of 256 bits."""
    if action.fresh == "word":
        data = {names.ADMIN_KEY_FILE: secrets.token_hex(32).encode()}
    else:
        public, private = zmq.curve_keypair()
        data = {PUBLIC_FILE: public + b"\n", SECRET_FILE: private + b"\n"}
    return {**action.object, "data": {name: base64.b64encode(key).decode() for name, key in data.items()}}


def _owners(meta: Object) -> dict[str, bool]:
    """Owner's uid → whether it controls the object."""
    return {owner["uid"]: bool(owner.get("controller")) for owner in meta.get("ownerReferences") or ()}
