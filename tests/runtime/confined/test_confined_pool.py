"""A pool lends each process to one thread at a time, and ends every one."""

from __future__ import annotations

import contextlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from treeline_runtime.confined.pool import ConfinedPool, PoolClosedError
from treeline_runtime.confined.process import ConfinedProcess


class Fake(ConfinedProcess):
    """A stand-in for a process that records calls."""

    pids = itertools.count(1)

    def __init__(self) -> None:
        self.pid = next(self.pids)
        self.uses = 0
        self.killed = False
        self.ended = 0

    def wait_ready(self, seconds: float = 0.0) -> None:
        pass

    def alive(self) -> bool:
        return not self.killed

    def kill(self) -> None:
        self.killed = True

    def end(self) -> None:
        self.kill()
        self.ended += 1


class Broken(Exception):
    pass


class World:
    """A pool, its processes, and those that are lent out; a process serves three times."""

    def __init__(self) -> None:
        self.started = list[Fake]()
        self.lent = list[tuple[Fake, contextlib.ExitStack]]()
        self.pool = ConfinedPool(self._start, keep=lambda process: process.uses < 3)

    def _start(self) -> Fake:
        self.started.append(Fake())
        return self.started[-1]

    @property
    def idle(self) -> list[Fake]:
        return [one for one in self.started if not one.ended and all(one is not lent for lent, _ in self.lent)]

    def do(self, action: str, which: int) -> None:
        match action:
            case "borrow":
                could = [one for one in self.idle if one.alive()]
                stack = contextlib.ExitStack()
                process = stack.enter_context(self.pool.lend())
                assert process.alive()
                assert process in could if could else process is self.started[-1]
                assert all(process is not other for other, _ in self.lent)
                process.uses += 1
                self.lent.append((process, stack))
            case "return" if self.lent:
                process, stack = self.lent.pop(which % len(self.lent))
                stack.close()
                assert bool(process.ended) is (process.uses == 3)
            case "fail" if self.lent:
                process, stack = self.lent.pop(which % len(self.lent))
                with pytest.raises(Broken), stack:
                    raise Broken
                assert process.ended
            case "die" if self.started:
                self.started[which % len(self.started)].kill()


ACTIONS = st.tuples(st.sampled_from(["borrow", "return", "fail", "die"]), st.integers(0, 9))


@given(st.lists(ACTIONS, max_size=40))
def test_each_process_is_lent_to_one_borrower_and_ended_once(actions: list[tuple[str, int]]) -> None:
    world = World()
    for action, which in actions:
        world.do(action, which)
        assert set(world.pool.pids()) == {one.pid for one in world.started if not one.ended}
    world.pool.close()
    assert not any(one.alive() for one in world.started)
    for _, stack in world.lent:
        stack.close()
    assert [one.ended for one in world.started] == [1] * len(world.started)
    assert world.pool.pids() == []


def test_a_closed_pool_lends_and_starts_nothing() -> None:
    world = World()
    world.pool.close()
    with pytest.raises(PoolClosedError), world.pool.lend():
        pass
    assert world.started == []


def test_a_process_that_starts_while_the_pool_is_closed_is_ended() -> None:
    made = Fake()

    def start() -> Fake:
        pool.close()
        return made

    pool = ConfinedPool(start)
    with pytest.raises(PoolClosedError), pool.lend():
        pass
    assert made.ended == 1


def test_a_process_that_is_killed_by_close_before_it_is_ready_is_not_lent() -> None:
    class Slow(Fake):
        def wait_ready(self, seconds: float = 0.0) -> None:
            pool.close()
            assert self.killed, "close has seen it"
            raise OSError("the process did not start")

    made = Slow()
    pool = ConfinedPool(lambda: made)
    with pytest.raises(OSError, match="did not start"), pool.lend():
        pass
    assert made.ended == 1
    assert pool.pids() == []


def test_a_process_that_fails_to_start_is_not_kept() -> None:
    def start() -> Fake:
        raise OSError("no memory")

    pool = ConfinedPool(start)
    with pytest.raises(OSError, match="no memory"), pool.lend():
        pass
    assert pool.pids() == []
