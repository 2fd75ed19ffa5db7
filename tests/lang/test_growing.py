"""Growing texts: a follower sees all of the text in any pieces, and how it ended."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.lang_backend import PATIENCE_S
from treeline_lang import ProgramError, Unreachable
from treeline_lang.growing import Growing, Variable

PIECES = st.lists(st.tuples(st.booleans(), st.text(max_size=5)), max_size=12)


@given(PIECES, st.lists(st.integers(0, 12), max_size=12))
def test_followers_see_every_character_once(pieces: list[tuple[bool, str]], looks: list[int]) -> None:
    """A piece is settled, or it follows the settled text and may still grow or settle."""
    growing, settled, coming = Growing(), "", ""
    follower, seen, whole = growing.follow(), "", ""
    for number, (settles, piece) in enumerate(pieces):
        coming += piece
        if settles:
            settled, coming = settled + coming, ""
        growing.grow(settled, coming)
        whole = settled + coming
        if number in looks and seen != whole:
            seen += next(follower)
            assert seen == whole
    growing.end()
    assert seen + "".join(follower) == whole
    assert "".join(growing.follow()) == whole
    growing.grow("something else")
    assert "".join(growing.follow()) == whole, "what has ended stands"


@pytest.mark.parametrize("count", [1, 8])
def test_many_followers_in_threads_and_loops_see_the_same(count: int) -> None:
    growing, began = Growing(), threading.Barrier(2 * count + 1)

    def follow() -> str:
        began.wait(PATIENCE_S)
        return "".join(growing.follow())

    async def follow_async() -> str:
        await asyncio.to_thread(began.wait, PATIENCE_S)
        return "".join([piece async for piece in growing.follow_async()])

    with ThreadPoolExecutor(2 * count) as pool:
        results = [pool.submit(follow) for _ in range(count)]
        results += [pool.submit(lambda: asyncio.run(follow_async())) for _ in range(count)]
        began.wait(PATIENCE_S)
        for settled in range(200):
            growing.grow("x" * settled, "x")
        growing.grow("x" * 200, "y")
        growing.end()
        assert {result.result(PATIENCE_S) for result in results} == {"x" * 200 + "y"}


def test_each_reader_gets_the_text_and_then_the_failure() -> None:
    variable = Variable("a")
    variable.grow("so far")
    variable.fail(Unreachable("gone"))
    variable.fail(ProgramError("later"))
    variable.set("too late")
    seen: list[str] = []
    with pytest.raises(Unreachable) as first:
        seen.extend(variable.follow())
    assert seen == ["so far"]
    with pytest.raises(Unreachable) as second:
        variable.read()
    assert first.value is not second.value, "a traceback belongs to one thread"
    with pytest.raises(Unreachable):
        asyncio.run(variable.read_async())


def test_a_reader_may_wait_with_a_limit_and_sees_new_text() -> None:
    variable = Variable("a")
    with pytest.raises(TimeoutError, match=r"nothing new for 0\.01 s"):
        variable.read(0.01)
    variable.say("half", {"tokens": 1})
    assert variable.meta_so_far == {"tokens": 1}
    variable.set(7, "half of it", {"tokens": 2})
    assert (variable.read(0), variable.meta(0), "".join(variable.follow())) == (7, {"tokens": 2}, "half of it")
