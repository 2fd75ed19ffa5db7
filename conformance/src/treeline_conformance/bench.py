"""The environment of a case: the proxy's side of the picker, the pods, the Kubernetes API, and ways to change them.

Every change is undone at the end of its case, and the next case begins when the picker has seen that.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import grpc.aio
from treeline_bench.api_server import PODS, POOLS, ApiServer

from treeline_conformance.messages import Mode
from treeline_conformance.picker import Picker
from treeline_conformance.pods import Pod
from treeline_conformance.proxy import Answer, Asking, Proxy, open_channel
from treeline_conformance.verdict import Failed, Need

POOL: Final = "pool"
LABELS: Final = {"app": "conformance"}
SETTLE_S: Final = 10.0
"""Longest time for a picker to follow a change of pods or pools."""


class Bench:
    """One picker under test. `begin` before each case, `finish` after it."""

    def __init__(self, picker: Picker, pods: list[Pod], api: ApiServer, patience_s: float) -> None:
        self.picker = picker
        self.pods = pods
        self.api = api
        self.patience_s = patience_s
        self.served: set[Mode] = set()
        """The body modes in which the picker answers."""
        self.said: list[tuple[str, Any]] = []
        self.deviates: bool | None = None
        """Whether the case has seen GIE 1.5's deviating behaviour; None: it did not look."""
        self._channel: grpc.aio.Channel | None = None
        self._proxy: Proxy | None = None

    @property
    def proxy(self) -> Proxy:
        assert self._proxy is not None, "there is a connection from begin() to finish()"
        return self._proxy

    @property
    def endpoints(self) -> list[str]:
        return [endpoint for pod in self.pods for endpoint in pod.endpoints]

    async def begin(self) -> None:
        """Begin a case with a connection and a transcript of its own."""
        self.said, self.deviates = [], None
        self._channel = open_channel(self.picker.address)
        self._proxy = Proxy(self._channel, self.patience_s, self.said)

    async def finish(self) -> None:
        if self._proxy is not None and self._channel is not None:
            self._proxy.close()
            await self._channel.close()
        self._proxy = self._channel = None

    @contextlib.asynccontextmanager
    async def another_connection(self) -> AsyncIterator[Proxy]:
        """Open a second proxy besides the case's own."""
        async with open_channel(self.picker.address) as channel:
            proxy = Proxy(channel, self.patience_s, self.said)
            try:
                yield proxy
            finally:
                proxy.close()

    async def ask(self, mode: Mode = Mode.DUPLEX, **asking: Any) -> Answer:
        """Send one request, and return all of the picker's answers; the fields are those of `Asking`."""
        return await self.proxy.ask(Asking(mode, **asking))

    def judge(self, seen: object, *, spec: object, gie15: object, what: str) -> None:
        """Raise Failed if the behaviour is not the expected one, and note whether it is GIE 1.5's."""
        self.deviates = seen == gie15
        if seen != spec:
            raise Failed(f"{what}: {seen} instead of {spec}" + (", as GIE 1.5" if self.deviates else ""))

    # --- pods and pools ---------------------------------------------------------------------------------------------

    def has(self, need: Need) -> bool:
        match need:
            case Need.KUBERNETES:
                return self.api.followed.is_set()
            case Need.STARTED:
                return self.picker.started
            case Need.METRICS:
                return bool(self.picker.metrics_address)
            case Need.HEALTH:
                return bool(self.picker.health_address)

    def put_pool(self, *ports: int) -> None:
        numbers = ports or self.pods[0].ports
        spec = {
            "selector": {"matchLabels": LABELS},
            "targetPorts": [{"number": port} for port in numbers],
            "endpointPickerRef": {"name": "picker", "kind": "Service", "port": {"number": 9002}},
        }
        self.api.put(POOLS, POOL, spec=spec, status={})

    def put_pod(self, pod: Pod, *, ready: bool | None = None, **metadata: Any) -> None:
        """Set a pod's object in Kubernetes: by default by the pod's own state."""
        ready = pod.ready if ready is None else ready
        container = {"name": "vllm", "image": "vllm", "ports": [{"containerPort": port} for port in pod.ports]}
        conditions = [{"type": kind, "status": str(ready)} for kind in ("Ready", "ContainersReady")]
        status = {
            "phase": "Running",
            "podIP": pod.ip,
            "podIPs": [{"ip": pod.ip}],
            "hostIP": "127.0.0.1",
            "conditions": conditions,
            "containerStatuses": [{"name": "vllm", "image": "vllm", "imageID": "", "ready": ready, "restartCount": 0}],
        }
        spec = {"containers": [container], "nodeName": "node"}
        self.api.put(PODS, pod.name, **{"labels": LABELS, "spec": spec, "status": status} | metadata)

    async def until(self, true: Callable[[], Awaitable[bool]], what: str, seconds: float = SETTLE_S) -> None:
        """Ask until a condition is true. Raises Failed with the condition."""
        deadline = time.monotonic() + seconds
        while True:
            kept = len(self.said)
            if await true():
                return
            if time.monotonic() > deadline:
                raise Failed(f"not within {seconds:g} s: {what}")
            del self.said[kept:]  # only the last try is shown
            await asyncio.sleep(0.1)

    async def until_gone(self, pod: Pod, mode: Mode) -> None:
        """Wait until a pod is not chosen, even if it alone is allowed; other cases judge the answer to that. A list
        without it would prove nothing: a list need not have every endpoint.
        """

        async def gone() -> bool:
            return await self.chosen(mode=mode, hint=[pod.endpoint]) not in self.endpoints

        await self.until(gone, f"{pod.endpoint} is not chosen")

    async def chosen(self, **asking: Any) -> str:
        """Return the destination of a request: an endpoint, or the status by which it is refused, or the failure in
        words.
        """
        try:
            answer = await self.ask(**asking)
        except Failed as error:
            return str(error)
        if answer.refusal is not None:
            return str(answer.refusal.status)
        return answer.destinations[0] if answer.destinations else "no destination"

    async def settled(self) -> None:
        """Wait until each pod can be chosen again. A picker without subsets must at least answer. Raises Failed."""
        await self.until(self._routes, "a request is routed to a pod", 3 * SETTLE_S)
        for endpoint in self.endpoints:
            with contextlib.suppress(Failed):
                await self.until(functools.partial(self._reaches, endpoint), f"{endpoint} can be chosen", SETTLE_S / 4)

    async def _routes(self) -> bool:
        return await self.chosen() in self.endpoints

    async def _reaches(self, endpoint: str) -> bool:
        return await self.chosen(hint=[endpoint]) == endpoint

    @contextlib.asynccontextmanager
    async def unready(self, *pods: Pod) -> AsyncIterator[None]:
        """Make these pods unready, in Kubernetes and in their own health checks."""
        try:
            for pod in pods:
                pod.ready = False
                self.put_pod(pod)
            yield
        finally:
            for pod in pods:
                pod.ready = True
                self.put_pod(pod)
            await self.settled()

    @contextlib.asynccontextmanager
    async def without(self, *pods: Pod) -> AsyncIterator[None]:
        """Remove these pods for a while."""
        try:
            for pod in pods:
                self.api.delete(PODS, pod.name)
            yield
        finally:
            for pod in pods:
                self.put_pod(pod)
            await self.settled()

    @contextlib.asynccontextmanager
    async def besides(self, pod: Pod, **metadata: Any) -> AsyncIterator[None]:
        """Add one more pod for a while."""
        try:
            self.put_pod(pod, **metadata)
            yield
        finally:
            self.api.delete(PODS, pod.name)

    @contextlib.asynccontextmanager
    async def loaded(self, *pods: Pod, waiting: int, kv_usage: float, running: int = 0) -> AsyncIterator[None]:
        """Let these pods report this load."""
        try:
            for pod in pods:
                pod.waiting, pod.kv_usage, pod.running = waiting, kv_usage, running
            yield
        finally:
            for pod in pods:
                pod.waiting, pod.kv_usage, pod.running = 0, 0.05, 0
            await self.settled()

    async def stays(self, what: str, true: Callable[[], Awaitable[bool]]) -> None:
        """Check that a condition is true six times in a row. Raises Failed."""
        for _ in range(6):
            if not await true():
                raise Failed(what)
