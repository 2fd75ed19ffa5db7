"""The operator's children, as a watch of the API server sees them, and waits for them."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from treeline_bench.context import BenchmarkError
from treeline_bench.kubernetes.api import Api

SELECTOR = "app.kubernetes.io%2Fmanaged-by%3Dtreeline"
POOL_LABEL = "treeline.dev/pool"
PATHS = {
    "Deployment": "/apis/apps/v1/deployments",
    "Service": "/api/v1/services",
    "ConfigMap": "/api/v1/configmaps",
    "Secret": "/api/v1/secrets",
    "ServiceAccount": "/api/v1/serviceaccounts",
    "Role": "/apis/rbac.authorization.k8s.io/v1/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/rolebindings",
    "PodDisruptionBudget": "/apis/policy/v1/poddisruptionbudgets",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/networkpolicies",
}
"""The kinds of children. Pods and EndpointSlices come from controllers and do not count."""

_POLL_S = 0.05

Object = dict[str, Any]


class _Event(msgspec.Struct):
    type: str
    object: Object


@dataclass(frozen=True)
class Want:
    """A child in its expected state: its kind and how to recognise it; ``what`` names it in errors."""

    kind: str
    what: str
    test: Callable[[str, Object], bool]
    """Takes the event's type (ADDED, MODIFIED) and the object."""


@dataclass
class Expected:
    """The children expected of a change. Registered before the change, so that nothing is missed."""

    namespace: str
    wants: Sequence[Want]
    seen: list[float | None] = field(default_factory=list)
    complete: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.seen = [None] * len(self.wants)

    def look(self, kind: str, event: str, obj: Object, at: float) -> bool:
        """Takes an event into account; returns whether everything has been seen."""
        for number, want in enumerate(self.wants):
            if self.seen[number] is None and want.kind == kind and want.test(event, obj):
                self.seen[number] = at
        return None not in self.seen

    def missing(self) -> str:
        return ", ".join(want.what for want, at in zip(self.wants, self.seen, strict=True) if at is None)

    def last(self) -> float:
        """The time at which the last one was seen."""
        return max(at for at in self.seen if at is not None)


class Children:
    """All children of all pools. Watches run in threads; times are taken when an event is read."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._lock = threading.Lock()
        self._there: dict[tuple[str, str, str], str] = {}
        self._waiting: list[Expected] = []
        self._failure = ""
        self._stopped = False
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.last_added = 0.0

    def start(self) -> None:
        """Starts the watches."""
        for kind, path in PATHS.items():
            version = self._api.get(f"{path}?labelSelector={SELECTOR}")["metadata"]["resourceVersion"]
            query = f"labelSelector={SELECTOR}&watch=1&resourceVersion={version}&timeoutSeconds=7200"
            connection = self._api.connect(timeout_s=None)
            connection.request("GET", f"{path}?{query}")
            self._sockets.append(connection.sock)
            thread = threading.Thread(target=self._watch, args=(kind, connection), daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Ends the watches and their threads."""
        self._stopped = True
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # what wakes a thread that reads; closing does not
        for thread in self._threads:
            thread.join(5.0)

    def count(self) -> int:
        """The number of existing children."""
        return len(self._there)

    def await_count(self, count: int, timeout_s: float, tick: Callable[[int], None]) -> None:
        """Waits for so many; ``tick`` gets the current number. Raises BenchmarkError after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while (there := self.count()) < count:
            self.check()
            if time.monotonic() > deadline:
                raise BenchmarkError(f"after {timeout_s:g} s there are {there} children of {count}")
            tick(there)
            time.sleep(_POLL_S)

    def count_by_pool(self) -> Counter[tuple[str, str]]:
        """Each pool's own children, by namespace and name."""
        with self._lock:
            return Counter((where, pool) for (_, where, _), pool in self._there.items() if pool)

    def expect(self, namespace: str, wants: Sequence[Want]) -> Expected:
        """Looks for these in later events."""
        expected = Expected(namespace, wants)
        with self._lock:
            self._waiting.append(expected)
        return expected

    def await_all(self, expected: Expected, timeout_s: float) -> float:
        """Waits for all, and returns the time at which the last one was seen. Raises BenchmarkError after
        ``timeout_s``, naming the missing ones."""
        if not expected.complete.wait(timeout_s):
            self.check()
            raise BenchmarkError(f"after {timeout_s:g} s still missing: {expected.missing()}")
        return expected.last()

    def check(self) -> None:
        """Raises BenchmarkError if a watch has ended."""
        if self._failure:
            raise BenchmarkError(self._failure)

    def saw(self, kind: str, event: str, obj: Object, at: float) -> None:
        """An event of a watch."""
        meta = obj["metadata"]
        key = (kind, meta["namespace"], meta["name"])
        with self._lock:
            if event == "DELETED":
                self._there.pop(key, None)
                return
            if key not in self._there:
                self.last_added = at
            self._there[key] = (meta.get("labels") or {}).get(POOL_LABEL, "")
            done = [
                each
                for each in self._waiting
                if each.namespace == meta["namespace"] and each.look(kind, event, obj, at)
            ]
            for each in done:
                self._waiting.remove(each)
                each.complete.set()

    def _watch(self, kind: str, connection: http.client.HTTPSConnection) -> None:
        decode = msgspec.json.Decoder(_Event).decode
        try:
            reply = connection.getresponse()
            while line := reply.readline():
                at = time.monotonic()
                event = decode(line)
                if event.type == "ERROR":
                    raise BenchmarkError(str(event.object))
                self.saw(kind, event.type, event.object, at)
            why = "it ended"
        except (OSError, ValueError, AttributeError, http.client.HTTPException, BenchmarkError) as error:
            why = repr(error)
        if not self._stopped:
            self._failure = f"the watch of {kind} was lost: {why}"
