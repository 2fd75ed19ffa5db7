"""Branches: forks of forks, joins, and branches that fail or are never joined."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from support.lang_backend import FakeBackend
from treeline_lang import function, gen
from treeline_lang.errors import Unreachable, WrongType


def test_a_thousand_branches_need_no_threads():
    threads: list[int] = []

    @function
    def wide(s: Any) -> None:
        s += "all"
        forks = s.fork(1000)
        forks += lambda i: f" {i}" + gen("x", max_tokens=1)
        threads.append(threading.active_count())
        forks.join()

    before = threading.active_count()
    backend = FakeBackend(lambda prompt, *_: prompt.text.split()[-1])
    assert wide.run(backend=backend)["x"] == [str(i) for i in range(1000)]
    assert threads[0] <= before + 1  # the loop
    assert len(backend.asked("warm")) == 1


def test_forks_of_forks_may_be_deeper_than_pythons_stack():
    @function
    def deep(s: Any) -> None:
        s += "0"
        states = [s]
        for level in range(1, 1500):
            states.append(states[-1].fork(1)[0])
            states[-1] += f" {level}"
        s.set_var("last", states[-1].text()[-4:])

    assert deep.run(backend=FakeBackend())["last"] == "1499"


def test_a_tree_of_forks_gathers_lists_of_lists():
    def grow(s: Any, depth: int) -> None:
        if depth == 0:
            s += gen("leaf", max_tokens=1)
            return
        forks = s.fork(2)
        for number, child in enumerate(forks):
            child += str(number)
            grow(child, depth - 1)
        forks.join()

    @function
    def tree(s: Any) -> None:
        s += "root"
        grow(s, 3)

    backend = FakeBackend(lambda prompt, *_: prompt.text[4:])
    assert tree.run(backend=backend)["leaf"] == [[["000", "001"], ["010", "011"]], [["100", "101"], ["110", "111"]]]


def test_unjoined_branches_delay_nothing():
    kept: list[Any] = []

    @function
    def forgets(s: Any) -> None:
        s += "x"
        kept.append(s.fork(2))
        kept[-1] += gen("a")

    assert forgets.run(backend=FakeBackend()).text() == "x"
    assert kept[0][0]["a"] == kept[0][1]["a"]
    states = forgets.run_batch([{}] * 4, backend=FakeBackend(), order="given")
    assert [state.error() for state in states] == [None] * 4
    for group in kept[1:]:
        assert all(child["a"].strip() for child in group), "a batch waits for them"


def test_an_error_in_an_unjoined_branch_stays_there():
    kept: list[Any] = []

    @function
    def forgets(s: Any) -> None:
        kept.extend(s.fork(2))
        kept[0] += "bad" + gen("a")
        kept[1] += "good" + gen("a")

    backend = FakeBackend()
    backend.fails = lambda request: Unreachable("gone") if request.text == "bad" else None
    assert forgets.run(backend=backend).error() is None
    assert kept[1]["a"].strip()
    with pytest.raises(Unreachable):
        kept[0]["a"]


def test_a_failed_branch_fails_the_join_and_its_siblings_stand():
    @function
    def judge(s: Any) -> None:
        forks = s.fork(3)
        forks += lambda i: f"branch {i}" + gen("x")
        forks.join()
        s.set_var("after", 1)

    backend = FakeBackend()
    backend.fails = lambda request: Unreachable("gone") if "1" in request.text else None
    state = judge.run(backend=backend)
    for name in ("x", "after"):
        with pytest.raises(Unreachable, match=r"gen\('x'\): gone"):
            state[name]
    assert len(backend.asked("generate")) == 3


def test_branches_that_fail_by_the_same_error_each_name_their_own_line():
    branches: list[Any] = []

    @function
    def forks(s: Any) -> None:
        branches.extend(s.fork(2))
        branches[0] += "x" + gen("a")
        branches[1] += "x" + gen("b")

    backend, error = FakeBackend(), Unreachable("gone")
    backend.fails = lambda _: error
    forks.run(backend=backend)
    line = forks.body.__code__.co_firstlineno
    places = [(str(found.where), found.step) for branch in branches if (found := branch.error())]
    name = Path(__file__).name
    assert places == [(f"{name}:{line + 3} in forks", "gen('a')"), (f"{name}:{line + 4} in forks", "gen('b')")]


# ---- cancelling -------------------------------------------------------------------------------------------------


def test_a_failure_reaches_forks_of_forks_deeper_than_pythons_stack() -> None:
    deepest: list[Any] = []

    @function
    def chain(s: Any) -> None:
        s += gen("a", dtype=int)
        for _ in range(2000):
            s = s.fork(1)[0]
        deepest.append(s)

    backend = FakeBackend(lambda *_: "no number")
    with backend.holding():
        state = chain.run(backend=backend)
    assert isinstance(state.error(), WrongType)
    assert isinstance(deepest[0].error(), WrongType)


def test_a_fork_of_an_ended_stream_is_an_error_and_fails_its_branches() -> None:
    @function
    def late(s: Any) -> None:
        group = s.fork(2)
        group.join()
        group[0].fork(2)

    states = late.run_batch([{}, {}], backend=FakeBackend())
    assert ["nothing can be appended any more" in str(state.error()) for state in states] == [True, True]
