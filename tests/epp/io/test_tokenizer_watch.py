"""Tokenizers in the background: tried again, never in the way, one a model."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support.epp_io import small_bundle, until
from treeline_epp.tokenizers import watch as tokenizer_watch
from treeline_epp.tokenizers.sources import SourceError, TokenizerSpec
from treeline_epp.tokenizers.watch import TokenizerSource, TokenizerSources
from treeline_wire.models import HubModel
from treeline_wire.tokenizer import TokenizerBundle


class Scripted:
    """An origin whose answers are given; the last one stays. `held` keeps it from answering."""

    recheck_s = 0.01

    def __init__(self, *answers: str | Exception, kept: str | None = None) -> None:
        self.answers = list(answers)
        self.asked = 0
        self.held = threading.Event()
        self.held.set()
        self._kept = kept

    def kept(self) -> tuple[str, TokenizerBundle] | None:
        return None if self._kept is None else (self._kept, bundle(self._kept))

    def version(self) -> str:
        self.held.wait(60)
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def read(self, version: str) -> TokenizerBundle:
        return bundle(version)


def bundle(template: str) -> TokenizerBundle:
    return TokenizerBundle.build(small_bundle().tokenizer_json, chat_template=template)


def source(origin: Scripted, model: str = "m") -> TokenizerSource:
    return TokenizerSource(TokenizerSpec(model, HubModel("org/m")), origin)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_watch, "_FIRST_PAUSE_S", 0.01)


class Told:
    """A running source, and what it told."""

    def __init__(self, one: TokenizerSource) -> None:
        self.seen: list[tuple[str | None, str | None]] = []
        self.task = asyncio.create_task(one.run(self.note))

    def note(self, one: TokenizerSource) -> None:
        self.seen.append((one.bundle.chat_template if one.bundle else None, one.problem))

    async def until(self, true: Callable[[], bool]) -> None:
        await until(true, "the source has told enough", state=lambda: self.seen)
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@pytest.mark.usefixtures("quick")
async def test_each_change_is_told_once_and_what_was_had_stays_in_use(caplog: pytest.LogCaptureFixture) -> None:
    gone = SourceError("it is gone: bring it back")
    one = source(origin := Scripted(gone, gone, "one", "one", "two", gone, gone, gone, "two"))
    told = Told(one)
    await told.until(lambda: origin.asked > 12)
    assert told.seen == [
        (None, str(gone)),
        ("one", None),
        ("two", None),
        ("two", str(gone)),
        ("two", None),
    ]
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == [
        f"the tokenizer of m is not there yet: {gone}",
        f"the tokenizer of m stays unchanged: {gone}",
    ]


@pytest.mark.usefixtures("quick")
async def test_what_was_kept_is_there_at_once_however_long_the_origin_takes() -> None:
    origin = Scripted("new", kept="old")
    origin.held.clear()
    one = source(origin)
    told = Told(one)
    found = await one.first()
    assert found is not None
    assert found.chat_template == "old"
    origin.held.set()
    await told.until(lambda: told.seen == [("old", None), ("new", None)])


@pytest.mark.usefixtures("quick")
async def test_a_defect_is_a_problem_of_this_one_tokenizer(caplog: pytest.LogCaptureFixture) -> None:
    one = source(origin := Scripted(ZeroDivisionError("secret"), ZeroDivisionError("secret"), "fine"))
    told = Told(one)
    await told.until(lambda: origin.asked > 3)
    assert [problem for _, problem in told.seen] == [
        "hf://org/m could not be read: ZeroDivisionError; the picker's log has more",
        None,
    ]
    assert sum(record.levelname == "ERROR" for record in caplog.records) == 1


async def test_followers_do_not_wait_long_for_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_watch, "FIRST_WAIT_S", 0.01)
    origin = Scripted("late")
    origin.held.clear()
    one = source(origin)
    told = Told(one)
    assert await one.first() is None
    origin.held.set()
    await told.until(lambda: told.seen == [("late", None)])


def test_the_first_model_that_a_flag_names_has_the_say() -> None:
    named, for_all = source(Scripted("n"), "adapter"), source(Scripted("a"), "")
    sources = TokenizerSources([named, for_all])
    assert sources.of_models(("base", "adapter")) is named
    assert sources.of_models(("base",)) is for_all
    assert sources.of_models(()) is for_all
    assert TokenizerSources([named]).of_models(("", "base")) is None


def test_a_download_that_hangs_does_not_keep_the_process() -> None:
    program = """
import asyncio, threading
from treeline_epp.tokenizers.sources import TokenizerSpec
from treeline_epp.tokenizers.watch import TokenizerSource
from treeline_wire.models import HubModel

began = threading.Event()

class Hangs:
    recheck_s = 1.0
    def kept(self): return None
    def version(self):
        began.set()
        threading.Event().wait()

async def main():
    task = asyncio.create_task(TokenizerSource(TokenizerSpec("m", HubModel("o/m")), Hangs()).run(print))
    await asyncio.to_thread(began.wait)
    task.cancel()

asyncio.run(main())
"""
    folder = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", program], cwd=folder, check=True, timeout=240)
