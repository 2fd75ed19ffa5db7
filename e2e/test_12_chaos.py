"""Random faults under traffic; then the system converges and the books balance. CHAOS_MINUTES (3), CHAOS_SEED (1)."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from e2e.kit.books import SHOWS_ITS_CACHE, books
from e2e.kit.faults import HANGS, fill_memory, kill_runtime, stop_runtime
from e2e.kit.kube import Kube
from e2e.kit.system import Installed, pool
from e2e.kit.traffic import Stream, traffic
from e2e.test_05_operator_killed import operators
from e2e.test_07_runtime_dies import PICKER_NOTICES_S, ip
from e2e.test_08_eviction import try_to_evict

MINUTES: Final = float(os.environ.get("CHAOS_MINUTES", "3"))
SEED: Final = int(os.environ.get("CHAOS_SEED", "1"))
DRIVEN: Final = ("runtime", "edge", "epp")


@dataclass(frozen=True)
class Death:
    """A container that was killed, or began to hang, at a time; from ``noticed`` on no request is sent there."""

    ip: str
    at: float
    noticed: float

    def explains(self, stream: Stream) -> bool:
        """Return whether the stream was on that container, as far as is known."""
        under_way = stream.begun < self.noticed and (stream.ended or self.at) >= self.at
        return under_way and stream.host in ("", self.ip)


class Chaos:
    """The faults, and a log of those that were made."""

    def __init__(self, treeline: Installed, seed: int) -> None:
        self.treeline = treeline
        self.chance = random.Random(seed)
        self.deaths: list[Death] = []
        self.story: list[str] = []
        self._begun = time.monotonic()
        self._faults: dict[str, Callable[[], None]] = {
            "a runtime is killed": lambda: self._end_a_runtime(kill_runtime, 0.5),
            "a runtime runs out of memory": lambda: self._end_a_runtime(fill_memory, 0.5),
            "a runtime hangs": lambda: self._end_a_runtime(stop_runtime, PICKER_NOTICES_S),
            "a pod is deleted": self._delete,
            "a pod is evicted": self._evict,
            "the picker is killed": self._kill_the_picker,
            "the operator is deleted": self._delete_the_operator,
            "another number of replicas": lambda: treeline.change("tiny", replicas=self.chance.randint(2, 3)),
            "another template": self._roll,
        }

    def strike(self) -> None:
        """Make one of the faults."""
        name = self.chance.choice(sorted(self._faults))
        self.story.append(f"+{time.monotonic() - self._begun:.0f} s {name}")
        self._faults[name]()

    def _a_pod(self, component: str) -> dict[str, Any] | None:
        """Return a random pod if there are several (the picker's: if there is one), so that the last one stays."""
        pods = self.treeline.ready_pods(component)
        return self.chance.choice(pods) if len(pods) > 1 or (pods and component == "epp") else None

    def _end_a_runtime(self, end: Callable[[Kube, dict[str, Any]], None], notice_s: float) -> None:
        if pod := self._a_pod("runtime"):
            at = time.monotonic()
            end(self.treeline.kube, pod)
            self.deaths.append(Death(ip(pod), at, time.monotonic() + notice_s))

    def _delete(self) -> None:
        if pod := self._a_pod(self.chance.choice(DRIVEN)):
            self.treeline.delete_pod(pod)

    def _evict(self) -> None:
        if pod := self._a_pod(self.chance.choice(DRIVEN)):
            try_to_evict(self.treeline, pod)

    def _kill_the_picker(self) -> None:
        if pod := self._a_pod("epp"):
            self.treeline.delete_pod(pod, now=True)

    def _delete_the_operator(self) -> None:
        for pod in operators(self.treeline):
            self.treeline.delete_pod(pod, now=True)

    def _roll(self) -> None:
        build = {"annotations": {"example.com/build": f"{self.chance.random()}"}}
        self.treeline.change("tiny", template={**HANGS, "metadata": build})


@pytest.mark.chaos
@pytest.mark.timeout(MINUTES * 60 + 1800)
def test_the_books_balance(treeline: Installed, kept: Path) -> None:
    treeline.apply(pool("tiny", engine=SHOWS_ITS_CACHE, template=HANGS, gateway={"standalone": {"replicas": 2}}))
    treeline.await_ready("tiny")
    chaos = Chaos(treeline, SEED)
    with traffic(treeline.url(), kept=kept) as driver:
        begun = time.monotonic()
        while time.monotonic() - begun < MINUTES * 60:
            chaos.strike()
            driver.await_served(chaos.chance.randint(3, 20))
        treeline.await_ready("tiny")
        driver.await_served(10)
        report = driver.stop()
    told = "\n".join([*chaos.story, str(report)])
    kept.with_suffix(".txt").write_text(told + "\n")

    # Every stream was served, refused with a proper status, or on a container that was killed.
    for stream in report.of("truncated", "failed"):
        assert any(death.explains(stream) for death in chaos.deaths), f"{stream}\n{told}"
    assert {stream.status for stream in report.of("refused")} <= {429, 503}, told
    lost = report.of("truncated", "failed")
    assert len(lost) <= len(chaos.deaths) * 2 * driver.mix.workers, told

    def balanced() -> bool:
        found = books(treeline)
        lines = (f"{name}: {book}\n" for name, book in found.items())
        kept.with_suffix(".books").write_text("".join(lines))
        return all(book.balances for book in found.values())

    treeline.until(balanced, "pages, reservations and the picker's tree to add up")
    treeline.conclude()
