"""Hints are optional: if refused, slow or unanswered, they cost a program time and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.lang_backend import FakeBackend
from treeline_lang import Unreachable, executor, function, gen
from treeline_lang.program import Function

CONTEXT = "What all have in common. " * 8


def dead(backend: FakeBackend) -> None:
    backend.fails = lambda request: Unreachable("gone") if request.kind == "warm" else None


def silent(backend: FakeBackend) -> None:
    backend.holds = lambda request: request.kind == "warm"


@function
def panel(s: Any, question: str) -> list[str]:
    s += CONTEXT
    group = s.fork(3)
    group += lambda number: question + str(number) + gen("a")
    group.join()
    return list(s["a"])


@pytest.mark.parametrize("trouble", [dead, silent])
@pytest.mark.parametrize("program", [panel, panel.compile(strict=True)], ids=["interpreted", "compiled"])
def test_a_program_ends_as_without_hints(
    trouble: Callable[[FakeBackend], None], program: Function, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "HINT_S", 0.02)
    expected = [program.run(question=word, backend=FakeBackend(), hints=False).ret_value for word in ("oak", "ash")]
    backend = FakeBackend()
    trouble(backend)
    assert program.run(question="oak", backend=backend).ret_value == expected[0]
    states = program.run_batch([{"question": "oak"}, {"question": "ash"}], backend=backend)
    assert [state.ret_value for state in states] == expected
    assert len(backend.asked("warm")) == 4, "one of each program's fork, one of the batch"
    backend.wait_running(0)
