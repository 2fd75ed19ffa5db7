"""The engine for event loops and interrupted scripts: cancellation, Ctrl-C, a scheduler that dies, no close at all."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.runtime_engine import prompt
from support.runtime_server import eventually, make_checkpoint
from treeline_runtime import Engine, EngineDead, GenerationError, SamplingParams

pytestmark = pytest.mark.deep

SETTINGS: dict[str, Any] = {"page_size": 4, "max_total_tokens": 2048, "threads": 1}
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_new_tokens=900, temperature=0.0, ignore_eos=True)
PROMPTS = [prompt(seed, 12) for seed in range(5)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(model: Path) -> Iterator[Engine]:
    with Engine(model, **SETTINGS) as engine:
        yield engine


def idle(engine: Engine) -> bool:
    return engine.scheduler.is_idle and engine.scheduler.load().pages_used == 0


def test_async_results_equal_synchronous_ones(engine: Engine) -> None:
    expected = [output.token_ids for output in engine.generate(PROMPTS, GREEDY)]

    async def several() -> None:
        whole = await engine.async_generate(PROMPTS, GREEDY)
        assert [output.token_ids for output in whole] == expected
        one, other = await asyncio.gather(*(engine.async_generate(ids, GREEDY) for ids in PROMPTS[:2]))
        assert [one.token_ids, other.token_ids] == expected[:2]
        pieces = [(text, list(output.token_ids)) async for text, output in engine.async_stream(PROMPTS[2], GREEDY)]
        assert pieces[-1][1] == expected[2]
        assert "".join(text for text, _ in pieces) == whole[2].text
        with pytest.raises(GenerationError, match="at most"):
            await engine.async_generate([1] * 5000, GREEDY)
        # a notebook's cell: a loop runs in this thread, and the call is a plain one
        assert engine.generate(PROMPTS[3], GREEDY).token_ids == expected[3]

    asyncio.run(several())
    assert idle(engine)


def test_leaving_early_ends_the_request(engine: Engine) -> None:
    async def leave() -> None:
        async with aclosing(engine.async_stream(PROMPTS[0], LONG)) as stream:
            async for _ in stream:
                break
        waiting = asyncio.create_task(engine.async_generate(PROMPTS, LONG))
        await asyncio.sleep(0)
        async for _ in engine.async_stream(PROMPTS[0], GREEDY):  # steps have been made
            pass
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(leave())
    eventually(lambda: idle(engine), 60, "everything has ended")


def test_ctrl_c_ends_the_requests_and_the_engine_goes_on(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    take, main = engine._thread._take, threading.main_thread().ident
    assert main is not None
    seen = []

    def interrupting(message: Any) -> None:
        take(message)
        seen.append(message)
        if len(seen) == 5:
            signal.pthread_kill(main, signal.SIGINT)

    monkeypatch.setattr(engine._thread, "_take", interrupting)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # other tests may have replaced it
    try:
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS, LONG)
    finally:
        signal.signal(signal.SIGINT, before)
    assert idle(engine)
    assert len(engine.generate(PROMPTS[0], GREEDY).token_ids) == 8
    engine.scheduler.check_integrity()


def test_a_dead_scheduler_is_an_error_for_every_waiting_request(model: Path) -> None:
    engine = Engine(model, **SETTINGS)
    scheduler = engine.scheduler
    steps = []

    def dying() -> None:
        steps.append(1)
        if len(steps) > 3:
            raise MemoryError("nothing left")

    scheduler.profiler.step = dying  # type: ignore[method-assign]

    async def wait() -> None:
        results = await asyncio.gather(
            engine.async_generate(PROMPTS, LONG), engine.async_generate(PROMPTS[0], LONG), return_exceptions=True
        )
        assert [type(result) for result in results] == [EngineDead, EngineDead], results

    asyncio.run(wait())
    for call in (lambda: engine.generate(PROMPTS, GREEDY), engine.flush_cache, lambda: engine.scheduler):
        with pytest.raises(EngineDead, match="nothing left") as dead:
            call()
        assert isinstance(dead.value.__cause__, MemoryError)
    engine.close()


def test_a_closed_or_forgotten_engine_leaves_nothing(model: Path) -> None:
    process, threads = psutil.Process(), threading.active_count()
    children, connections = process.children(), process.net_connections()  # of tests that share this process
    closed = Engine(model, **SETTINGS)
    told: list[BaseException] = []

    def wait() -> None:
        with pytest.raises(GenerationError, match="aborted") as ended:
            closed.generate(PROMPTS, LONG)
        told.append(ended.value)

    waiting = threading.Thread(target=wait)
    waiting.start()
    eventually(lambda: not closed.scheduler.is_idle, 60, "it runs")
    closed.close()
    waiting.join(60)
    assert told, "every waiting request ends"
    with pytest.raises(EngineDead, match="closed"):
        closed.generate(PROMPTS[0], GREEDY)
    closed.close()
    forgotten = Engine(model, **SETTINGS)
    del forgotten
    gc.collect()
    assert threading.active_count() == threads
    assert set(process.children()) <= set(children)
    assert set(process.net_connections()) <= set(connections)


def test_wrong_options_are_named(engine: Engine) -> None:
    for options, problem in (
        ({"return_logprob": "yes"}, r"Expected `bool`, got `str` - at `\$.return_logprob`"),
        ({"retrun_logprob": True}, "no option 'retrun_logprob'"),
        ({"rid": "mine"}, "no option 'rid'"),
    ):
        with pytest.raises(TypeError, match=problem):
            engine.generate(PROMPTS[0], GREEDY, **options)
    with pytest.raises(TypeError, match="Expected `int`"):
        engine.generate([[1, "two"]], GREEDY)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="a stream has one prompt"):
        next(engine.stream(PROMPTS, GREEDY))  # type: ignore[arg-type]
    assert idle(engine)


SCRIPT = """
import multiprocessing, os, signal, sys
from treeline_runtime import Engine, SamplingParams

def child(model):
    with Engine(model, max_total_tokens=1024, threads=1) as engine:
        print("child", len(engine.generate([1, 2, 3], SamplingParams(max_new_tokens=4, ignore_eos=True)).token_ids))

if __name__ == "__main__":
    spawned = multiprocessing.get_context("spawn").Process(target=child, args=(sys.argv[1],))
    spawned.start()
    spawned.join()
    engine = Engine(sys.argv[1], max_total_tokens=1024, threads=1)
    for text, output in engine.stream([1, 2, 3], SamplingParams(max_new_tokens=900, ignore_eos=True)):
        if len(output.token_ids) == 3:
            os.kill(os.getpid(), signal.SIGINT)
"""


def test_a_script_that_spawns_and_is_interrupted_ends_at_once(model: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, script, model], capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout == "child 4\n", done.stderr
    assert done.returncode == -signal.SIGINT
    assert done.stderr.count("Traceback") == 1, done.stderr
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")
