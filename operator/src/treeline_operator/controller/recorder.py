"""Writes Events: what `kubectl describe` shows of the operator's work. Few, deduplicated, and never in the way."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Literal

from treeline_kube.client import Client

from treeline_operator.controller.metrics import Metrics
from treeline_operator.status.conditions import timestamp
from treeline_operator.world import Ref

log = logging.getLogger(__name__)

_REPEAT_S: Final = 600.0
_REMEMBERED: Final = 4096
_BURST: Final = 20
_REFILL_S: Final = 15.0
_WAITING: Final = 1000
_MESSAGE: Final = 1000


@dataclass(slots=True)
class _Bucket:
    tokens: float
    at: float

    def take(self, now: float) -> bool:
        self.tokens = min(float(_BURST), self.tokens + (now - self.at) / _REFILL_S)
        self.at = now
        if self.tokens < 1.0:
            return False
        self.tokens -= 1.0
        return True


@dataclass(slots=True)
class Recorder:
    """A queue of Events, and one task that writes them.

    The same Event of an object is written once in ten minutes; an object gets 20 Events at once and one more every 15
    s. Events beyond that, or refused by the API server, are dropped and counted.
    """

    creator: Client
    metrics: Metrics
    instance: str
    clock: Callable[[], datetime]
    _queue: asyncio.Queue[dict[str, Any]] = field(default_factory=lambda: asyncio.Queue(_WAITING))
    _said: OrderedDict[tuple[str, str, str], float] = field(default_factory=OrderedDict)
    _buckets: OrderedDict[str, _Bucket] = field(default_factory=OrderedDict)

    def emit(self, ref: Ref, uid: str, type_: Literal["Normal", "Warning"], reason: str, message: str) -> None:
        """Queue an Event about an object."""
        now = asyncio.get_running_loop().time()
        if (last := self._said.get((uid, reason, message))) is not None and now - last < _REPEAT_S:
            return
        bucket = self._buckets.setdefault(uid, _Bucket(_BURST, now))
        self._buckets.move_to_end(uid)
        if not bucket.take(now):
            self.metrics.dropped("rate")
            return
        try:
            self._queue.put_nowait(self._event(ref, uid, type_, reason, message))
        except asyncio.QueueFull:
            self.metrics.dropped("backlog")
            return
        self._said[uid, reason, message] = now
        self._said.move_to_end((uid, reason, message))
        for memory in (self._said, self._buckets):
            while len(memory) > _REMEMBERED:
                memory.popitem(last=False)

    async def run(self) -> None:
        """Write queued Events until cancelled."""
        while True:
            event = await self._queue.get()
            try:
                await self.creator.create(event)
            except Exception as exc:
                # On any error (a deleted namespace, a missing right) the operator continues.
                log.info("event not written: %s", exc, extra={"reason": event["reason"]})
                self.metrics.dropped("refused")
            finally:
                self._queue.task_done()

    async def flush(self, timeout_s: float) -> None:
        """Wait until the queue is written, at most for this long."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._queue.join()
        except TimeoutError:
            log.info("%d events left unwritten", self._queue.qsize())

    def _event(self, ref: Ref, uid: str, type_: str, reason: str, message: str) -> dict[str, Any]:
        stamp = timestamp(self.clock())
        api_version, kind, namespace, name = ref
        about = {"apiVersion": api_version, "kind": kind, "namespace": namespace, "name": name, "uid": uid}
        meta = {"name": f"{name[:40]}.{uuid.uuid4().hex[:16]}", "namespace": namespace or "default"}
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": meta,
            "involvedObject": about,
            "type": type_,
            "reason": reason,
            "message": message if len(message) <= _MESSAGE else f"{message[: _MESSAGE - 1]}…",
            "source": {"component": "treeline-operator"},
            "reportingComponent": "treeline.dev/operator",
            "reportingInstance": self.instance,
            "firstTimestamp": stamp,
            "lastTimestamp": stamp,
            "count": 1,
        }
