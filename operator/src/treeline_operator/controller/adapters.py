"""What pods say of their adapters: the last report that the container beside each engine has logged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

import msgspec
from treeline_kube.client import Client
from treeline_kube.clock import now
from treeline_kube.errors import KubeError
from treeline_wire import labels
from treeline_wire.live_adapters import AdapterReport, mark, wishes_of

from treeline_operator.controller.queue import Backoff, Outcome, Queue
from treeline_operator.controller.store import Store
from treeline_operator.plan.adapters import AdapterPod
from treeline_operator.plan.facts import ADAPTERS, annotation
from treeline_operator.world import Key, Observed, Ref

log = logging.getLogger(__name__)

_HURRIED_S: Final = 1.0
_CALM_S: Final = 10.0
_PATIENCE_S: Final = 30.0
"""The kubelet shows a changed annotation in the pod within seconds."""


@dataclass(slots=True)
class _Heard:
    """The last report of a pod; `behind` is the time since which it is about an earlier annotation than the present."""

    report: AdapterReport | None = None
    behind: float | None = None
    silent: bool = False


@dataclass(slots=True)
class AdapterReports:
    """Follows the pods that it is given, each by itself, and names namespaces with news."""

    store: Store
    source: Client
    changed: Callable[[Key], None]
    monotonic: Callable[[], float] = now
    _heard: dict[Key, _Heard] = field(default_factory=dict)
    _queue: Queue = field(init=False)

    def __post_init__(self) -> None:
        self._queue = Queue(self._look, concurrency=16, backoff=Backoff(_HURRIED_S, 60.0))

    def of(self, pods: Iterable[Observed]) -> tuple[AdapterPod, ...]:
        """The pods with what they have said. They are followed from now on, until they are gone."""
        return tuple(self._of(pod) for pod in pods)

    def _of(self, observed: Observed) -> AdapterPod:
        key = Key("models", observed.ref.namespace, observed.ref.name)
        heard = self._heard.get(key)
        if heard is None:
            heard = self._heard[key] = _Heard()
            self._queue.add(key)
        pod = AdapterPod.of(observed, heard.report, silent=heard.silent)
        if pod.report.asked != mark(pod.text) and heard.behind is None:
            self._queue.add_after(key, _HURRIED_S)
        return pod

    async def run(self) -> None:
        """Follow pods until `stop`."""
        await self._queue.run()

    async def stop(self) -> None:
        """Follow nothing more."""
        await self._queue.stop(0.0)

    async def _look(self, key: Key) -> Outcome:
        pod = self.store.get(Ref("v1", "Pod", key.namespace, key.name))
        if pod is None:
            self._heard.pop(key, None)
            return Outcome("none")
        heard = self._heard.setdefault(key, _Heard())
        before = heard.report, heard.silent
        try:
            text = await self.source.logs(key.namespace, key.name, ADAPTERS, tail_lines=5)
            heard.report = parse(text)
        except KubeError as exc:
            log.debug("no log of the adapters in %s: %s", key.name, exc)
            heard.report = None
        wished = annotation(pod.object, labels.ADAPTERS)
        answers = heard.report is not None and heard.report.asked == mark(wished)
        heard.behind = None if answers else heard.behind if heard.behind is not None else self.monotonic()
        heard.silent = heard.behind is not None and self.monotonic() - heard.behind >= _PATIENCE_S
        if (heard.report, heard.silent) != before:
            self.changed(Key("models", key.namespace))
        return Outcome(after_s=_CALM_S if heard.silent or (answers and _is_done(heard.report, wished)) else _HURRIED_S)


def parse(text: str) -> AdapterReport | None:
    """The last line that is a report."""
    for line in reversed(text.splitlines()):
        try:
            return _decode(line)
        except (msgspec.MsgspecError, RecursionError):
            continue
    return None


_decode = msgspec.json.Decoder(AdapterReport).decode


def _is_done(report: AdapterReport | None, wished: str) -> bool:
    """Whether a report says of all adapters that they are loaded, or why not."""
    try:
        wishes = wishes_of(wished)
    except msgspec.MsgspecError:
        return True
    return report is not None and all(wish.name in {**report.loaded, **report.errors} for wish in wishes)
