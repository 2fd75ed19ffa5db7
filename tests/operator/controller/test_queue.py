from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support.virtual_loop import run
from treeline_operator.controller.queue import Backoff, Outcome, Queue, Schedule
from treeline_operator.world import Key

KEYS = [Key("pool", "a", "x"), Key("pool", "a", "y"), Key("gateway", "a", "x"), Key("models", "b")]
X, Y = KEYS[0], KEYS[1]


class Tally:
    def __init__(self) -> None:
        self.runs: list[tuple[Key, str, float, float]] = []
        self.retries: Counter[Key] = Counter()

    def finished(self, key: Key, outcome: Outcome, waited_s: float, ran_s: float) -> None:
        self.runs.append((key, outcome.result, round(waited_s, 3), round(ran_s, 3)))
        self.retries[key] += outcome.retry


class ScheduleMachine(RuleBasedStateMachine):
    """The queue against a model that only knows, for each key, the latest time by which a look was requested."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.schedule = Schedule(Backoff(1.0, 8.0), chance=lambda: 0.0)
        self.owed: dict[Key, float] = {}
        self.running: set[Key] = set()
        self.failures: Counter[Key] = Counter()

    def owe(self, key: Key, due: float) -> None:
        self.owed[key] = min(due, self.owed.get(key, float("inf")))

    @rule(key=st.sampled_from(KEYS), new=st.booleans())
    def add(self, key: Key, new: bool) -> None:
        self.schedule.add(key, self.now, new=new)
        self.owe(key, self.now)

    @rule(key=st.sampled_from(KEYS), delay=st.sampled_from([0.0, 0.5, 3.0, 40.0]))
    def add_after(self, key: Key, delay: float) -> None:
        self.schedule.add_after(key, delay, self.now)
        self.owe(key, self.now + delay)

    @rule(seconds=st.sampled_from([0.1, 1.0, 10.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def start(self) -> None:
        key = self.schedule.pop(self.now)
        due = {k for k, at in self.owed.items() if at <= self.now and k not in self.running}
        if key is None:
            assert not due, f"{due} were due at {self.now} and not given out"
            return
        assert key in due, f"{key} was given out before anybody asked for it"
        assert key not in self.running, f"{key} runs twice"
        self.running.add(key)
        del self.owed[key]

    @rule(data=st.data(), retry=st.booleans(), after=st.sampled_from([None, 0.5, 20.0]))
    def end(self, data: st.DataObject, retry: bool, after: float | None) -> None:
        if not self.running:
            return
        key = data.draw(st.sampled_from(sorted(self.running)))
        self.running.remove(key)
        self.schedule.done(key, Outcome(retry=retry, after_s=after), self.now)
        if retry:
            self.failures[key] += 1
            delay = max(min(8.0, 2.0 ** (self.failures[key] - 1)), after or 0.0)
            asked = self.owed.pop(key, None)
            self.owe(key, self.now + delay)
            if asked is not None:
                self.owe(key, max(asked, self.now + min(delay, 1.0)))
        else:
            self.failures[key] = 0
            if after is not None:
                self.owe(key, self.now + after)

    @invariant()
    def nothing_is_lost(self) -> None:
        assert set(self.schedule.known()) >= set(self.owed) | self.running

    @invariant()
    def every_key_is_in_one_place(self) -> None:
        assert max(Counter(self.schedule.known()).values(), default=1) == 1

    @invariant()
    def failures_count_in_a_row(self) -> None:
        assert all(self.schedule.failures(key) == self.failures[key] for key in KEYS)


TestSchedule = ScheduleMachine.TestCase
TestSchedule.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    # All time in the machine is its own. The one look at the clock is Hypothesis's at its own speed, and that is the
    # machine's load: the first examples are drawn while it reads the sources of every module that is loaded.
    suppress_health_check=[HealthCheck.too_slow],
)


def test_backoff_doubles_to_its_cap_and_spreads_by_half() -> None:
    backoff = Backoff(0.5, 10.0)
    assert [backoff.delay(n, 0.0) for n in (1, 2, 3, 10, 5000)] == [0.5, 1.0, 2.0, 10.0, 10.0]
    assert backoff.delay(3, 1.0) == 1.0


def test_a_forgotten_delay_does_not_grow_the_heap() -> None:
    schedule = Schedule()
    for n in range(10_000):
        schedule.add_after(X, 1e6 - n, 0.0)
    assert len(schedule._heap) < 200
    assert schedule.next_due() == 1e6 - 9_999


def test_oldest_counts_waiting_and_running_but_not_delayed_keys() -> None:
    schedule = Schedule()
    schedule.add_after(Y, 100.0, 0.0)
    assert schedule.oldest(50.0) == 0.0
    schedule.add(X, 10.0)
    assert schedule.oldest(15.0) == 5.0
    assert schedule.pop(15.0) == X
    assert schedule.oldest(18.0) == 8.0


def test_namespaces_take_turns_and_new_keys_come_first() -> None:
    schedule = Schedule()
    crowd = [Key("pool", "crowd", str(n)) for n in range(100)]
    for key in crowd:
        schedule.add(key, 0.0)
    schedule.add(X, 1.0)
    schedule.add(crowd[50], 2.0, new=True)
    assert [schedule.pop(3.0) for _ in range(4)] == [crowd[50], crowd[0], X, crowd[1]]
    assert schedule.depth() == 97
    assert schedule.oldest(3.0) == 3.0


def test_a_hundred_adds_during_a_run_make_one_more_run() -> None:
    async def main() -> list[tuple[Key, str, float, float]]:
        tally = Tally()
        gate = asyncio.Event()

        async def reconcile(key: Key) -> Outcome:
            await gate.wait()
            return Outcome()

        queue = Queue(reconcile, finished=tally.finished)
        task = asyncio.create_task(queue.run())
        for _ in range(100):
            queue.add(X)
            await asyncio.sleep(0.01)
        gate.set()
        await asyncio.sleep(1)
        assert queue.idle()
        await queue.stop(1)
        await task
        return tally.runs

    runs = run(main())
    assert [r[1] for r in runs] == ["ok", "ok"]
    assert runs[1][3] == 0.0


def test_a_key_never_runs_twice_at_once_and_no_more_than_the_limit_run() -> None:
    async def main() -> None:
        running: Counter[Key] = Counter()
        peak = 0

        async def reconcile(key: Key) -> Outcome:
            nonlocal peak
            running[key] += 1
            assert running[key] == 1
            peak = max(peak, running.total())
            await asyncio.sleep(0.3)
            running[key] -= 1
            return Outcome(after_s=0.1)

        queue = Queue(reconcile, finished=Tally().finished, concurrency=3)
        task = asyncio.create_task(queue.run())
        for n in range(200):
            queue.add(Key("pool", "a", str(n % 7)))
            await asyncio.sleep(0.05)
        assert peak == 3
        await queue.stop(5)
        await task

    run(main())


def test_failures_back_off_and_success_resets(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> list[float]:
        at: list[float] = []
        tally = Tally()

        async def reconcile(key: Key) -> Outcome:
            at.append(asyncio.get_running_loop().time())
            if len(at) == 2:
                raise ValueError("a defect")
            return Outcome("error", retry=True) if len(at) in (1, 3, 5) else Outcome()

        queue = Queue(reconcile, finished=tally.finished, backoff=Backoff(1.0, 60.0), chance=lambda: 0.0)
        task = asyncio.create_task(queue.run())
        queue.add(X)
        await asyncio.sleep(100)
        assert queue.failures(X) == 0
        queue.add(X)
        await asyncio.sleep(100)
        await queue.stop(1)
        await task
        assert tally.retries[X] == 4
        return [round(b - a, 3) for a, b in itertools.pairwise(at)]

    with caplog.at_level(logging.CRITICAL):
        assert run(main()) == [1.0, 2.0, 4.0, 93.0, 1.0]


def test_a_fatal_error_ends_the_run_and_stop_lets_the_others_finish() -> None:
    class LostLease(Exception):
        pass

    async def main() -> list[str]:
        tally = Tally()

        async def reconcile(key: Key) -> Outcome:
            if key == X:
                raise LostLease
            await asyncio.sleep(2)
            return Outcome()

        queue = Queue(reconcile, finished=tally.finished, fatal=(LostLease,))
        queue.add(Y)
        queue.add(X)
        with pytest.raises(LostLease):
            await queue.run()
        assert await queue.stop(5) == 0
        return [r[1] for r in tally.runs]

    assert run(main()) == ["fatal", "ok"]


def test_stop_cancels_runs_that_outlast_their_grace() -> None:
    async def main() -> int:
        async def reconcile(key: Key) -> Outcome:
            await asyncio.sleep(1000)
            return Outcome()

        queue = Queue(reconcile, finished=Tally().finished)
        queue.add(X)
        task = asyncio.create_task(queue.run())
        await asyncio.sleep(1)
        cancelled = await queue.stop(3)
        await task
        assert asyncio.get_running_loop().time() == pytest.approx(4.0)
        return cancelled

    assert run(main()) == 1
