"""Streams: order within one, no order between two, and readers that always get an answer."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.lang_backend import PATIENCE_S, FakeBackend
from treeline_lang import assistant, background, function, gen, user
from treeline_lang.errors import Cancelled, ProgramError, UnknownVariable, Unreachable


@function
def three(s: Any) -> None:
    s += "one" + gen("a")
    s += "two" + gen("b")
    s += "three" + gen("c")


def in_thread(work: Any) -> Any:
    """Return the result of a call in another thread; a call that hangs fails."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result(PATIENCE_S)


def test_steps_of_a_stream_are_done_in_the_order_of_their_submission():
    backend = FakeBackend()
    state = three.run(backend=backend)
    assert state.text() == f"one{state['a']}two{state['b']}three{state['c']}"
    assert [request.text for request in backend.requests] == [
        "one",
        f"one{state['a']}two",
        f"one{state['a']}two{state['b']}three",
    ]


def test_submitting_returns_at_once_and_reading_waits():
    backend = FakeBackend()
    with backend.holding():
        state = three.run(backend=backend)  # the body has ended
        backend.wait_running(1)
        with pytest.raises(TimeoutError):
            state.get_var("a", timeout=0.01)
        with pytest.raises(TimeoutError):
            state.get_meta_info("c", timeout=0.01)
    assert state["c"].strip()


def test_branches_run_concurrently_unless_parallel_is_false():
    @function
    def many(s: Any) -> None:
        s += "together"
        forks = s.fork(8)
        forks += lambda i: f"branch {i}" + gen("x")
        forks.join()

    backend = FakeBackend()
    with backend.holding("generate"), ThreadPoolExecutor(1) as pool:
        running = pool.submit(many.run, backend=backend)
        backend.wait_running(8)
        backend.holds = lambda _: False
        backend.release()
        assert len(running.result(PATIENCE_S)["x"]) == 8
    apart = FakeBackend()
    assert many.run(backend=apart, parallel=False)["x"] == running.result()["x"]
    assert apart.most == 1


def test_a_failed_step_ends_its_stream_and_what_waits_for_later_ones():
    backend = FakeBackend()
    backend.fails = lambda request: Unreachable("gone") if "two" in request.text else None
    with backend.holding():
        state = three.run(backend=backend)  # the body ends before anything fails
    assert state["a"].strip()
    for read in (lambda: state["b"], lambda: state["c"], lambda: list(state.text_iter("b"))):
        with pytest.raises(Unreachable, match=r"test_executor.py:\d+ in three: gen\('b'\): gone"):
            in_thread(read)
    assert len(backend.requests) == 2
    error = state.error()
    assert error is not None
    assert error.where is not None
    assert (error.step, error.where.function) == ("gen('b')", "three")


def test_an_error_of_the_body_names_its_line_and_reaches_readers():
    @function
    def broken(s: Any) -> None:
        s += "x" + gen("a")
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        broken.run(backend=FakeBackend())
    state = broken.run(backend=FakeBackend(), stream=True)
    for read in (lambda: state["never"], lambda: list(state.text_iter()), state.text, lambda: state.ret_value):
        with pytest.raises(ProgramError, match=r"test_executor.py:\d+ in broken: the program: RuntimeError: no more"):
            in_thread(read)
    assert broken.run_batch([{}], backend=FakeBackend())[0].error() is not None


def test_a_foreign_exception_becomes_an_error_of_its_step():
    def answer(*_: Any) -> str:
        return [][1]

    state = three.run(backend=FakeBackend(answer))
    with pytest.raises(ProgramError, match=r"gen\('a'\): IndexError") as caught:
        state.text()
    assert isinstance(caught.value.__cause__, ProgramError)


# ---- variables that nothing sets --------------------------------------------------------------------------------


def test_a_variable_that_nothing_sets_is_an_error_wherever_it_is_read():
    found: list[str] = []

    @function
    def reads(s: Any) -> None:
        s += "x" + gen("there")
        for state in (s, *s.fork(2)):
            with pytest.raises(UnknownVariable, match="nothing sets the variable 'lost'; there are: there"):
                state["lost"]
            assert "lost" not in state
            assert "there" in state
        found.append("all")

    state = reads.run(backend=FakeBackend())
    assert found == ["all"]
    for read in (lambda: state["lost"], lambda: state.get_meta_info("lost"), lambda: list(state.text_iter("lost"))):
        with pytest.raises(KeyError):
            in_thread(read)


def test_another_thread_waits_for_a_variable_until_the_program_ends():
    go = threading.Event()
    branches: list[Any] = []

    @function
    def later(s: Any) -> None:
        branches.extend(s.fork(1))
        assert go.wait(PATIENCE_S)
        s += "x" + gen("late")

    state = later.run(backend=FakeBackend(), stream=True)
    with pytest.raises(TimeoutError, match="has not come to 'late'"):
        state.get_var("late", timeout=0.01)
    with ThreadPoolExecutor(3) as pool:
        late = pool.submit(lambda: state["late"])
        lost = pool.submit(lambda: state["lost"])
        of_branch = pool.submit(lambda: branches[0]["lost"])
        go.set()
        assert late.result(PATIENCE_S).strip()
        for hopeless in (lost, of_branch):
            with pytest.raises(UnknownVariable):
                hopeless.result(PATIENCE_S)


def test_a_parallel_program_can_be_read_before_its_body_begins():
    @function
    def quick(s: Any) -> None:
        s += "x" + gen("a")

    backend = FakeBackend()
    for _ in range(200):
        assert quick.run(backend=backend, stream=True)["a"].strip()


def test_the_text_of_a_scope_cannot_be_read_within_it():
    @function
    def scoped(s: Any) -> None:
        with s.var_scope("all"):
            s += "x" + gen("a")
            for state in (s, s.fork(1)[0]):
                with pytest.raises(UnknownVariable, match="'all' is the text of a scope, which has not ended"):
                    state["all"]
        assert s["all"] == f"x{s['a']}"

    scoped.run(backend=FakeBackend())


def test_a_branch_joined_within_its_scope_is_an_error_and_its_text_fails():
    @function
    def early(s: Any) -> None:
        forks = s.fork(1)
        with forks[0].var_scope("all"):
            forks[0] += "x"
            forks.join()

    with pytest.raises(ProgramError, match="nothing can be appended"):
        early.run(backend=FakeBackend())
    state = early.run_batch([{}], backend=FakeBackend())[0]
    with pytest.raises(ProgramError):
        in_thread(lambda: state["all"])


def test_nothing_can_be_appended_to_an_ended_stream():
    @function
    def joined(s: Any) -> None:
        forks = s.fork(2)
        forks += "x"
        forks.join()
        with pytest.raises(ProgramError, match="the branch was joined"):
            forks[0] += "more"
        with pytest.raises(ProgramError, match="the branch was joined"):
            forks[0]["x"] = 1
        with pytest.raises(ProgramError, match="the branch was joined"):
            forks.join()

    state = joined.run(backend=FakeBackend())
    with pytest.raises(ProgramError, match=r"test_executor.py:\d+ in .*: \+=: nothing can be appended"):
        state += "more"
    with pytest.raises(ProgramError, match="the program has ended"):
        state.fork(2)


# ---- many, and deep ---------------------------------------------------------------------------------------------


def test_cancelling_ends_waiting_steps_and_keeps_finished_ones():
    backend = FakeBackend()
    done = three.run(backend=backend)
    done.sync()
    with backend.holding():
        hanging = three.run(backend=backend)
        backend.wait_running(1)
        done.cancel()
        hanging.cancel()
        with pytest.raises(Cancelled):
            in_thread(lambda: hanging["c"])
        backend.wait_running(0)
    assert backend.cancelled == 1
    assert done.error() is None
    assert done.text().startswith("one")


def test_ctrl_c_while_a_stream_is_followed_ends_its_program():
    backend = FakeBackend()

    def interrupt() -> None:
        while not state._stream.growing._wake:  # until it is followed
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with backend.holding():
            state = three.run(backend=backend, stream=True)
            backend.wait_running(1)
            threading.Thread(target=interrupt).start()
            with pytest.raises(KeyboardInterrupt):
                "".join(state.text_iter())
            backend.wait_running(0)
    finally:
        signal.signal(signal.SIGINT, before)
    assert backend.cancelled == 1
    assert isinstance(state.error(), Cancelled)


def test_cancelling_before_a_step_has_begun_leaves_no_reader_behind():
    """A stream's task that is cancelled before its first turn on the loop never runs at all."""
    backend, go = FakeBackend(), threading.Event()
    background.loop().call_soon_threadsafe(go.wait, PATIENCE_S)
    state = three.run(backend=backend)  # submits, and cannot begin
    state.cancel()
    go.set()
    with pytest.raises(Cancelled):
        state.get_var("c", timeout=PATIENCE_S)
    assert backend.requests == []


def test_a_run_that_is_cancelled_takes_no_more_steps():
    backend = FakeBackend()
    go = threading.Event()

    @function
    def goes_on(s: Any) -> None:
        assert go.wait(PATIENCE_S)
        forks = s.fork(2)
        forks += "x" + gen("a")
        forks.join()

    state = goes_on.run(backend=backend, stream=True)
    state.cancel()
    go.set()
    with pytest.raises(Cancelled):
        state.text()
    assert backend.requests == []


# ---- threads, loops and processes -------------------------------------------------------------------------------


def test_programs_run_and_are_followed_from_event_loops():
    backend = FakeBackend()

    async def main() -> None:
        state = three.run(backend=backend, stream=True)
        pieces = [piece async for piece in state.text_async_iter()]
        assert "".join(pieces) == state.text()
        assert "".join([piece async for piece in state.text_async_iter("b")]) == state["b"]
        assert await state.get_var_async("c") == state["c"]
        last = [meta async for _, meta in state.text_async_iter("c", return_meta_data=True)][-1]
        assert last["finish_reason"] == {"type": "stop"}
        assert three.run_batch([{}] * 3, backend=backend)[2]["a"] == state["a"]

    for _ in range(2):
        asyncio.run(main())
    loop = asyncio.new_event_loop()  # as a notebook's, which runs all the time
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        for _ in range(2):
            asyncio.run_coroutine_threadsafe(main(), loop).result(PATIENCE_S)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE_S)
        loop.close()


def test_a_reader_on_a_loop_waits_for_a_variable_without_blocking_it():
    go = threading.Event()

    @function
    def later(s: Any) -> None:
        assert go.wait(PATIENCE_S)
        s += "x" + gen("late")

    async def main() -> str:
        state = later.run(backend=FakeBackend(), stream=True)
        reading = asyncio.ensure_future(state.get_var_async("late"))
        await asyncio.sleep(0)
        go.set()  # reached at all: the loop is free
        return await asyncio.wait_for(reading, PATIENCE_S)

    assert asyncio.run(main()).strip()


def test_a_reader_whose_loop_has_ended_does_the_program_no_harm():
    backend = FakeBackend()

    async def whole(state: Any) -> str:
        return "".join([piece async for piece in state.text_async_iter("a")])

    async def looks(state: Any) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(whole(state), 0.02)

    with backend.holding():
        state = three.run(backend=backend, stream=True)
        asyncio.run(looks(state))
    assert state.text().startswith("one")
    assert state.error() is None


def test_two_programs_on_one_backend_are_independent():
    @function
    def one(s: Any, word: str) -> None:
        s += user(word)
        s += assistant(gen("a"))

    backend = FakeBackend(lambda prompt, *_: prompt.messages[-1]["content"][::-1])
    with ThreadPoolExecutor(8) as pool:
        words = [f"word{i}" for i in range(64)]
        states = list(pool.map(lambda word: one.run(word=word, backend=backend), words))
    assert [state["a"] for state in states] == [word[::-1] for word in words]
    sessions = {request.call.session for request in backend.requests}
    assert len(sessions) == len(words), "each run has its own"


def test_called_programs_run_concurrently_unless_parallel_is_false():
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


def test_a_forked_process_runs_programs_of_its_own():
    expected = three.run(backend=FakeBackend()).text()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = 0 if three.run_batch([{}], backend=FakeBackend())[0].text() == expected else 2
        finally:
            os._exit(status)
    deadline = time.monotonic() + PATIENCE_S
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, 9)
        time.sleep(0.01)
    assert ended[1] == 0
