"""Generations on their way to the scheduler: clients take turns, and few are on the way at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from treeline_runtime.gate import MARK_BYTES, WINDOW_BYTES, Gate
from treeline_runtime.server.errors import ApiError

CLIENTS = st.sampled_from(["one", "two", "three", None])
SIZES = st.sampled_from([1 << 12, MARK_BYTES - 1, MARK_BYTES, WINDOW_BYTES, 3 * WINDOW_BYTES])
MOST = 6


def test_the_scheduler_confirms_groups_of_generations() -> None:
    gate, asked = Gate[int](lambda size: size), 0
    for i in range(1024):
        gate.put(None, str(i), WINDOW_BYTES // 512)
        assert gate.take() is not None
        if (mark := gate.mark()) is not None:
            asked += 1
            gate.taken(mark)
    assert asked == 8


class Gates(RuleBasedStateMachine):
    """The gate beside a plain model."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate[int](lambda size: size, most=MOST)
        self.count = 0
        self.waiting: dict[str | None, dict[str, int]] = {}
        self.in_flight = Counter[str | None]()
        self.gone: list[int | None] = []
        """Sizes on the way, and None for each mark."""
        self.marks: list[int] = []
        self.served: dict[str | None, Counter[str | None]] = {}
        """For each waiting client: the turns of others since its own."""

    @rule(client=CLIENTS, sizes=st.lists(SIZES, min_size=1, max_size=3))
    def open(self, client: str | None, sizes: Sequence[int]) -> None:
        if self.in_flight[client] + len(sizes) > MOST:
            with pytest.raises(ApiError, match="generations in flight"):
                self.gate.enter(client, len(sizes))
            return
        self.gate.enter(client, len(sizes))
        self.in_flight[client] += len(sizes)
        for size in sizes:
            self.count += 1
            self.gate.put(client, str(self.count), size)
            self.waiting.setdefault(client, {})[str(self.count)] = size
            self.served.setdefault(client, Counter())

    @rule(client=CLIENTS, waits=st.booleans(), which=st.integers(0, MOST))
    def end(self, client: str | None, waits: bool, which: int) -> None:
        """End one of a client's generations, waiting or gone."""
        if not self.in_flight[client]:
            return
        line = self.waiting.get(client, {})
        if line and (waits or len(line) == self.in_flight[client]):
            id = list(line)[which % len(line)]
            assert self.gate.remove(client, id)
            del line[id]
            if not line:
                del self.waiting[client], self.served[client]
        else:
            assert not self.gate.remove(client, "gone")
        self.gate.leave(client, 1)
        self.in_flight[client] -= 1

    @rule()
    def take(self) -> None:
        found = self.gate.take()
        if found is None:
            assert not self.waiting or self.marks, "what waits goes once the scheduler has answered"
            return
        id, size = found
        (client,) = [name for name, line in self.waiting.items() if id in line]
        line = self.waiting[client]
        assert next(iter(line)) == id, "in the order of the client"
        assert line.pop(id) == size
        for other, seen in self.served.items():
            if other != client:
                seen[client] += 1
                assert seen[client] == 1, f"{client} has two turns while {other} waits for one"
        if line:
            self.served[client] = Counter()
        else:
            del self.waiting[client], self.served[client]
        self.gone.append(size)
        if (mark := self.gate.mark()) is not None:
            self.marks.append(mark)
            self.gone.append(None)

    @precondition(lambda self: self.marks)
    @rule()
    def answer(self) -> None:
        """Let the scheduler reach a mark."""
        self.gate.taken(self.marks.pop(0))
        del self.gone[: self.gone.index(None) + 1]

    @invariant()
    def little_is_on_its_way(self) -> None:
        sizes = [size for size in self.gone if size is not None]
        assert sum(sizes[:-1]) < WINDOW_BYTES
        assert len(self.gate) == sum(map(len, self.waiting.values()))
        assert self.gate._in_flight == +self.in_flight


def test_the_gate_behaves_like_a_plain_model() -> None:
    run_state_machine_as_test(Gates, settings=settings(stateful_step_count=40, deadline=None))
