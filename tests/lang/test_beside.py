"""Programs that are called within another."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from support.lang_backend import PATIENCE_S, FakeBackend
from treeline_lang import function, gen


def test_programs_called_within_one_run_beside_it_and_with_parallel_false_do_not():
    @function
    def one(s: Any, number: int) -> None:
        s += f"program {number}" + gen("x")

    @function
    def several(s: Any) -> list[str]:
        called = [one(number=number) for number in range(4)]
        return [state["x"] for state in called]

    backend = FakeBackend()
    with backend.holding("generate"), ThreadPoolExecutor(1) as pool:
        running = pool.submit(several.run, backend=backend)
        backend.wait_running(4)
        backend.holds = lambda _: False
        backend.release()
        together = running.result(PATIENCE_S).ret_value
    apart = FakeBackend()
    assert several.run(backend=apart, parallel=False).ret_value == together
    assert apart.most == 1
