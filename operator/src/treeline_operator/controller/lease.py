"""Leader election by a Lease: one operator writes, the others wait.

Clocks of different machines are never compared: a lease has expired when we have seen it unchanged for its duration. A
leader counts from before the request that renewed it, and gives up (`renew_s`) before another may take over
(`duration_s`).

One holder needs no wait: the former container of our own pod. The kubelet restarts a container only after the previous
one has ended, so a holder with our pod's uid is our former self.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import random
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from treeline_kube.client import Client
from treeline_kube.clock import now
from treeline_kube.connection import Retry
from treeline_kube.credentials import SERVICE_ACCOUNT
from treeline_kube.errors import AlreadyExists, Conflict, KubeError, LostLease, NotFound

from treeline_operator.world import Ref

log = logging.getLogger(__name__)

_JITTER: Final = 0.2


@dataclass(frozen=True, slots=True)
class LeaseTiming:
    """Seconds: others may take over after `duration_s`; we give up after `renew_s`; tries are `retry_s` apart."""

    duration_s: float = 15.0
    renew_s: float = 10.0
    retry_s: float = 2.0


class Elector:
    """One candidate: `acquire()`, then `hold()` beside the work until it raises LostLease, or `release()`.

    `owner` is a reference to the lease's owner: the lease is deleted with it. `pod` is the prefix of the identities of
    our pod's containers (see `identity_of`); if it is empty, every holder is waited for. `leader` is the last holder
    seen.
    """

    def __init__(
        self,
        cluster: Client,
        namespace: str,
        name: str,
        identity: str,
        timing: LeaseTiming | None = None,
        owner: dict[str, Any] | None = None,
        pod: str = "",
    ) -> None:
        self.cluster = cluster
        self._ref = Ref("coordination.k8s.io/v1", "Lease", namespace, name)
        self._identity = identity
        self._timing = timing or LeaseTiming()
        self._pod = pod
        self._owners = {} if owner is None else {"ownerReferences": [owner]}
        self._random = random.Random(identity)
        self._lease: dict[str, Any] | None = None
        self._seen_at = 0.0
        self._valid_until = 0.0
        self.leader = ""

    def valid_until(self) -> float:
        """The instant of `clock.now` until which we may write; in the past while we do not lead."""
        return self._valid_until

    @property
    def is_leader(self) -> bool:
        return now() < self._valid_until

    async def acquire(self) -> None:
        """Return when we lead. The API server's silence or refusal is logged and waited out."""
        waits_for = ""
        while True:
            if await self._try():
                return
            if self.leader != waits_for:
                waits_for = self.leader
                log.info("standby: waiting for the lease %s, held by %s", self._ref.name, waits_for or "nobody")
            await asyncio.sleep(self._timing.retry_s * self._random.uniform(1, 1 + _JITTER))

    async def hold(self) -> None:
        """Renew until cancelled. Raises LostLease when another replica leads or the renewal is late."""
        while self.is_leader and self.leader == self._identity:
            await asyncio.sleep(min(self._timing.retry_s, max(self._valid_until - now(), 0)))
            renewed = await self._try()
            if not renewed and self._lease is None:
                # it was changed or deleted by others: find its holder before any write
                await self._try()
        self._valid_until = 0.0
        late = f"not renewed in time, in {self._timing.renew_s:g} s"
        holder = late if self.leader == self._identity else f"held by {self.leader or 'nobody'}"
        raise LostLease(f"the lease {self._ref.name} is {holder}", sent=False)

    async def release(self) -> None:
        """Give the lease up so that the next leader need not wait; write nothing afterwards."""
        held, self._valid_until = self.is_leader, 0.0
        if not held or self._lease is None:
            return
        gone = {**self._lease["spec"], "holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": _stamp()}
        with contextlib.suppress(KubeError):
            await self._write({**self._lease, "spec": gone})
        log.info("released the lease %s", self._ref.name)

    # One try

    async def _try(self) -> bool:
        started = now()
        patience = self._timing.renew_s / 2
        if self.is_leader:
            patience = min(patience, self._valid_until - started)
        try:
            async with asyncio.timeout(patience):
                took = await self._take()
        except (Conflict, AlreadyExists):
            # another replica was faster, or our own write arrived late: read before the next try
            self._lease = None
            return False
        except (KubeError, TimeoutError) as error:
            why = str(error) or f"no answer in {patience:.1f} s: the API server or this process may be short of CPU"
            log.warning("lease %s: %s: %s", self._ref.name, type(error).__name__, why)
            # an unanswered renewal may have been done: its resourceVersion is unknown then
            self._lease = None if self.leader == self._identity else self._lease
            return False
        if took:
            self._valid_until = started + self._timing.renew_s
        return took

    async def _take(self) -> bool:
        ours = self._lease is not None and self.leader == self._identity
        if not ours:
            await self._look()
        if self._lease is None:
            self._observe(await self.cluster.create(self._fresh(), guarded=False, retry=self._once))
            return True
        holder = self._lease["spec"].get("holderIdentity") or ""
        if holder not in ("", self._identity) and not self._expired():
            if not self._pod or not holder.startswith(self._pod):
                return False
            log.info("taking over the lease %s of this pod's former container, %s", self._ref.name, holder)
        self._observe(await self._write(self._renewed(self._lease, holder)))
        return True

    async def _look(self) -> None:
        try:
            self._observe(await self.cluster.get(self._ref, retry=self._once))
        except NotFound:
            self._lease = None

    def _observe(self, lease: dict[str, Any]) -> None:
        version = lease["metadata"]["resourceVersion"]
        if self._lease is None or self._lease["metadata"]["resourceVersion"] != version:
            self._seen_at = now()
        self._lease = lease
        self.leader = lease["spec"].get("holderIdentity") or ""

    def _expired(self) -> bool:
        assert self._lease is not None
        return now() >= self._seen_at + (self._lease["spec"].get("leaseDurationSeconds") or 1)

    # Writing

    @property
    def _once(self) -> Retry:
        return Retry(attempt_s=self._timing.renew_s / 2, budget_s=self._timing.renew_s / 2, attempts=1)

    async def _write(self, lease: dict[str, Any]) -> dict[str, Any]:
        return await self.cluster.update(lease, guarded=False, retry=self._once)

    def _fresh(self) -> dict[str, Any]:
        stamp = _stamp()
        return {
            "apiVersion": self._ref.api_version,
            "kind": self._ref.kind,
            "metadata": {"name": self._ref.name, "namespace": self._ref.namespace, **self._owners},
            "spec": {
                "holderIdentity": self._identity,
                "leaseDurationSeconds": self._seconds,
                "acquireTime": stamp,
                "renewTime": stamp,
                "leaseTransitions": 0,
            },
        }

    def _renewed(self, lease: dict[str, Any], holder: str) -> dict[str, Any]:
        spec = {**lease["spec"], "leaseDurationSeconds": self._seconds, "renewTime": _stamp()}
        if holder != self._identity:
            spec["holderIdentity"] = self._identity
            spec["acquireTime"] = spec["renewTime"]
            spec["leaseTransitions"] = (spec.get("leaseTransitions") or 0) + 1
        return {**lease, "metadata": {**lease["metadata"], **self._owners}, "spec": spec}

    @property
    def _seconds(self) -> int:
        # whole seconds on the wire, never fewer than ours
        return -int(-self._timing.duration_s // 1)


class Candidate:
    """An elector with a thread, an event loop and a connection of its own: no plan and no crowd of requests in the
    caller's loop keeps it from renewing."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, Elector]]) -> None:
        self._make = make
        self._loop = asyncio.new_event_loop()
        self._elector: Elector | None = None
        threading.Thread(target=self._loop.run_forever, name="lease", daemon=True).start()

    def valid_until(self) -> float:
        """The elector's `valid_until`; 0 before the first attempt."""
        return self._elector.valid_until() if self._elector is not None else 0.0

    async def acquire(self) -> None:
        """Acquire the Lease, as the elector does. Raises NoCluster."""
        await self._run(self._acquire())

    async def hold(self) -> None:
        """Hold the Lease, as the elector does. Raises LostLease."""
        assert self._elector is not None
        await self._run(self._elector.hold())

    async def close(self) -> None:
        """Release the lease, if we have it, and end the thread."""
        await self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _acquire(self) -> None:
        if self._elector is None:
            self._elector = await self._make()
        await self._elector.acquire()

    async def _close(self) -> None:
        if self._elector is not None:
            await self._elector.release()
            await self._elector.cluster.close()

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))


def identity_of(environ: Mapping[str, str], host: str, process: str) -> tuple[str, str]:
    """Our identity in the lease, and the prefix of identities of all containers of our pod.

    Names of pods and hosts are not unique (a StatefulSet's pod may return while its former one lives on a lost node);
    only the uid is. Without `POD_UID` the second is empty. `process` differs with each start.
    """
    name, uid = environ.get("POD_NAME") or host, environ.get("POD_UID", "")
    pod = f"{name}_{uid}_" if uid else ""
    return f"{pod or f'{name}_'}{process}", pod


def own_account(namespace: str, token: Path = SERVICE_ACCOUNT) -> dict[str, Any] | None:
    """An owner reference to our token's ServiceAccount, for objects that should be deleted with it; None outside a pod.

    Only for objects of `namespace`: an owner in another namespace counts as gone, and its objects are collected.
    """
    try:
        claims = token.read_text().split(".")[1]
        told = json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))["kubernetes.io"]
        account, home = told["serviceaccount"], told["namespace"]
        owner = {"apiVersion": "v1", "kind": "ServiceAccount", "name": account["name"], "uid": account["uid"]}
    except (OSError, ValueError, IndexError, KeyError, TypeError):
        return None
    return owner if home == namespace else None


def _stamp() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
