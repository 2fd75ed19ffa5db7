"""Download progress of pods: the last line that each download has logged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec
from treeline_kube.client import Client
from treeline_kube.errors import KubeError

from treeline_operator.controller.log_lines import last_line
from treeline_operator.controller.queue import Backoff, Outcome, Queue
from treeline_operator.controller.store import Store
from treeline_operator.plan.facts import DOWNLOAD, container_statuses
from treeline_operator.world import Key, Observed

log = logging.getLogger(__name__)

_EVERY_S: Final = 5.0
_STEP: Final = 256 << 20


class _Line(msgspec.Struct):
    """A line that `treeline_runtime.fetch` logs, as JSON."""

    bytes_done: int
    bytes_total: int = 0
    commits: dict[str, str] = {}


_decode = msgspec.json.Decoder(_Line).decode


@dataclass(slots=True)
class Downloads:
    """Follows the downloads of the pools that it is given, and reports which pools are further than before."""

    store: Store
    source: Client
    changed: Callable[[Key], None]
    _progress: dict[Key, dict[str, tuple[int, int]]] = field(default_factory=dict)
    _commits: dict[Key, dict[str, str]] = field(default_factory=dict)
    _queue: Queue = field(init=False)

    def __post_init__(self) -> None:
        self._queue = Queue(self._look, concurrency=4, backoff=Backoff(_EVERY_S, 60.0))

    def progress(self, key: Key) -> Mapping[str, tuple[int, int]]:
        """Pod → bytes done and total bytes (0: unknown), for the pool's running downloads."""
        return self._progress.get(key, {})

    def commits(self, key: Key) -> Mapping[str, str]:
        """URI → commit, for the pool's running downloads; if pods differ, the first one counts."""
        return self._commits.get(key, {})

    def see(self, key: Key, pods: Iterable[Observed]) -> None:
        """Follow the pool's downloads as long as one of its pods downloads."""
        if any(_downloads(pod) for pod in pods):
            self._queue.add_after(key, _EVERY_S if key in self._progress else 0.0)
        else:
            self._forget(key)

    def _forget(self, key: Key) -> None:
        self._progress.pop(key, None)
        self._commits.pop(key, None)

    async def run(self) -> None:
        """Follow downloads until `stop`."""
        await self._queue.run()

    async def stop(self) -> None:
        """Follow nothing more."""
        await self._queue.stop(0.0)

    async def _look(self, key: Key) -> Outcome:
        found: dict[str, tuple[int, int]] = {}
        before, commits = self._progress.get(key, {}), dict(self._commits.get(key, {}))
        pods = [pod for pod in self.store.pool_children(key.namespace, key.name) if _downloads(pod)]
        for pod in pods:
            name = pod.ref.name
            try:
                text = await self.source.logs(key.namespace, name, DOWNLOAD, tail_lines=5)
            except KubeError as exc:
                log.debug("no log of the download in %s: %s", name, exc)
                text = ""
            said = parse(text)
            commits = {**(said.commits if said else {}), **commits}
            now = (said.bytes_done, said.bytes_total) if said else before.get(name)
            if now is not None:
                found[name] = before[name] if name in before and _alike(before[name], now) else now
        if not pods:
            self._forget(key)
            return Outcome("none")
        news = (found, commits) != (before, self._commits.get(key, {}))
        self._progress[key], self._commits[key] = found, commits
        if news:
            self.changed(key)
        return Outcome(after_s=_EVERY_S)


def parse(text: str) -> _Line | None:
    """The last line with progress."""
    return last_line(text, _decode)


def _alike(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether two measurements are equal for a reader: a status is not written for every megabyte."""
    if one[1] != other[1]:
        return False
    step = one[1] // 100 if one[1] else _STEP
    return step > 0 and one[0] // step == other[0] // step and other[0] < (other[1] or other[0] + 1)


def _downloads(pod: Observed) -> bool:
    if pod.ref.kind != "Pod" or b'"initContainerStatuses"' not in pod.body:
        return False
    found = (one for one in container_statuses(pod.object, init=True) if one["name"] == DOWNLOAD)
    return any((one.get("state") or {}).get("running") is not None for one in found)
