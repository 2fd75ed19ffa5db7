"""A burst of InferenceModel changes, and the names that the picker must list afterwards."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from treeline_bench.context import BenchmarkError
from treeline_bench.kubernetes.api import MERGE, Api, Call
from treeline_bench.kubernetes.objects import Pool, model, models_path
from treeline_bench.kubernetes.running import Picker

CLIENTS = 16
POLL_S = 0.005
LIMIT_S = 60.0
PREFIX = "m-"


@dataclass
class Truth:
    """The InferenceModels of a gateway: object → (name in requests, pool)."""

    namespace: str
    pools: Sequence[Pool]
    models: dict[str, tuple[str, str]] = field(default_factory=dict)
    made: int = 0

    def create(self, count: int) -> list[Call]:
        """Calls that create so many; they count as done at once."""
        return [self._create() for _ in range(count)]

    def burst(self, count: int, rng: random.Random) -> list[Call]:
        """Makes `count` changes of different objects: two fifths created, three tenths renamed, three tenths deleted.

        Raises ValueError if there are too few models.
        """
        touched = rng.sample(sorted(self.models), 2 * (count * 3 // 10))
        renamed, deleted = touched[: len(touched) // 2], touched[len(touched) // 2 :]
        calls = [self._rename(name) for name in renamed] + [self._delete(name) for name in deleted]
        calls += self.create(count - len(calls))
        rng.shuffle(calls)
        return calls

    def by_pool(self) -> dict[str, set[str]]:
        """Pool → the names that the picker must list."""
        found: dict[str, set[str]] = {pool.name: set() for pool in self.pools}
        for name, pool in self.models.values():
            found[pool].add(name)
        return found

    def _create(self) -> Call:
        name, pool = f"model-{self.made}", self.pools[self.made % len(self.pools)].name
        self.models[name] = self._next_name(), pool
        body = model(name, self.models[name][0], pool, self.namespace)
        return Call("POST", models_path(self.namespace), body)

    def _rename(self, name: str) -> Call:
        self.models[name] = self._next_name(), self.models[name][1]
        spec = {"modelName": self.models[name][0]}
        return Call("PATCH", f"{models_path(self.namespace)}/{name}", {"spec": spec}, MERGE)

    def _delete(self, name: str) -> Call:
        del self.models[name]
        return Call("DELETE", f"{models_path(self.namespace)}/{name}")

    def _next_name(self) -> str:
        self.made += 1
        return f"{PREFIX}{self.made}"


class Burst(NamedTuple):
    """``consistent_s``: last answered change → the picker's list is right. ``rate``: changes answered per second."""

    consistent_s: float
    rate: float


def run_burst(api: Api, picker: Picker, truth: Truth, calls: Sequence[Call]) -> Burst:
    """Makes the changes as fast as the API server answers, then waits for the picker. Raises BenchmarkError."""
    answers = api.send_all(calls, CLIENTS)
    last = max(answer.answered for answer in answers)
    took = last - min(answer.sent for answer in answers)
    return Burst(await_truth(picker, truth) - last, len(calls) / took)


def await_truth(picker: Picker, truth: Truth) -> float:
    """The time (``time.monotonic``) of the first request that the picker answered correctly."""
    wanted = truth.by_pool()
    deadline = time.monotonic() + LIMIT_S
    while True:
        listed = {pool: {n for n in names if n.startswith(PREFIX)} for pool, names in picker.models().items()}
        now = time.monotonic()
        if listed == wanted:
            return now
        if now > deadline:
            wrong = {pool: len(names ^ listed.get(pool, set())) for pool, names in wanted.items()}
            raise BenchmarkError(f"after {LIMIT_S:g} s the picker's list is not the truth; names amiss: {wrong}")
        time.sleep(POLL_S)
