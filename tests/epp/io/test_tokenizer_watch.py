"""Tokenizers are fetched in the background: retried, without delaying requests, one for each model."""

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
    """An origin with scripted answers; the last one stays. `held` delays its answers."""

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
    """A running source, and its notifications."""

    def __init__(self, one: TokenizerSource) -> None:
        self.seen: list[tuple[str | None, str | None]] = []
        self.task = asyncio.create_task(one.run(self.note))

    def note(self, one: TokenizerSource) -> None:
        self.seen.append((one.bundle.chat_template if one.bundle else None, one.problem))

    async def until(self, true: Callable[[], bool]) -> None:
        await until(true, "the source has sent the expected notifications", state=lambda: self.seen)
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@pytest.mark.usefixtures("quick")
async def test_each_change_is_reported_once_and_the_old_tokenizer_stays_in_use(
    caplog: pytest.LogCaptureFixture,
) -> None:
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
async def test_a_cached_tokenizer_is_available_at_once_however_slow_the_origin_is() -> None:
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
async def test_an_error_affects_only_its_own_tokenizer(caplog: pytest.LogCaptureFixture) -> None:
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


def test_the_first_model_named_by_a_flag_decides() -> None:
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
