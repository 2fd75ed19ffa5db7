"""Keeps the tokenizers that the flags name: loaded in the background, kept up to date, found by model.

Requests never wait for one: they are routed by history until it is loaded.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, TypeVar

from treeline_wire.models import HubModel
from treeline_wire.tokenizer import TokenizerBundle

from treeline_epp.tokenizers.hub import HubOrigin, TokenizerCache
from treeline_epp.tokenizers.sources import (
    LOOK_S,
    FolderOrigin,
    Origin,
    SourceError,
    TokenizerLoader,
    TokenizerSpec,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

FIRST_WAIT_S: Final = 2.0
"""Longest that an engine's events wait for its source's first tokenizer; a later one makes them start again."""
_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 300.0


class TokenizerSource:
    """The tokenizer of one spec. `bundle` is the newest that could be loaded, None before the first; `problem` says why
    there is none, or no newer one.
    """

    def __init__(self, spec: TokenizerSpec, origin: Origin) -> None:
        self.spec = spec
        self.bundle: TokenizerBundle | None = None
        self.problem: str | None = None
        self._loader = TokenizerLoader(spec, origin)
        self._tried = asyncio.Event()
        local = isinstance(spec.source, Path) or spec.template is not None
        self._pause_s = LOOK_S if local else self._loader.recheck_s

    async def first(self) -> TokenizerBundle | None:
        """Return the bundle after the first attempt, or after `FIRST_WAIT_S`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_WAIT_S):
                await self._tried.wait()
        return self.bundle

    async def run(self, changed: Callable[[TokenizerSource], None]) -> None:
        """Load it again and again until cancelled. `changed` is called after each change of `bundle` or `problem`."""
        await self._look(self._loader.kept, changed)
        if self.bundle is not None:
            self._tried.set()
        failures = 0
        while True:
            await self._look(self._loader.load, changed)
            self._tried.set()
            failures = failures + 1 if self.problem is not None else 0
            longest = min(self._loader.recheck_s, _LONGEST_PAUSE_S)
            pause = min(_FIRST_PAUSE_S * 2 ** min(failures - 1, 10), longest) if failures else self._pause_s
            await asyncio.sleep(pause * random.uniform(0.8, 1.2))

    async def _look(
        self, load: Callable[[], TokenizerBundle | None], changed: Callable[[TokenizerSource], None]
    ) -> None:
        before = self.bundle, self.problem
        try:
            self.bundle = await _in_thread(load, str(self.spec)) or self.bundle
            self.problem = None
        except SourceError as error:
            self.problem = str(error)
        except Exception as error:  # a defect of ours or of a library: only this tokenizer is missing
            self.problem = f"{self.spec} could not be read: {type(error).__name__}; the picker's log has more"
            if self.problem != before[1]:
                log.exception("tokenizer %s", self.spec)
        if (self.bundle, self.problem) == before:
            return
        if self.problem is not None and self.problem != before[1]:
            what = "stays unchanged" if self.bundle is not None else "is not there yet"
            log.warning("the tokenizer of %s %s: %s", self.spec.model or "all models", what, self.problem)
        changed(self)


class TokenizerSources:
    """The sources of all specs; see the module."""

    def __init__(self, sources: Sequence[TokenizerSource] = ()) -> None:
        self._by_model = {source.spec.model: source for source in sources}

    @classmethod
    def of(cls, specs: Iterable[TokenizerSpec], cache: Path) -> TokenizerSources:
        """Make sources for these specs; those of the Hub are cached in the folder `cache`."""
        kept = TokenizerCache(cache)
        return cls([TokenizerSource(spec, _origin(spec, spec.source, kept)) for spec in specs])

    def of_models(self, models: Iterable[str]) -> TokenizerSource | None:
        """Return the source for an engine that serves these models: of the first that a flag names, or the one for all.
        For an engine whose models are unknown, the only one there is.
        """
        served = [model for model in models if model]
        named = (source for model in served if (source := self._by_model.get(model)) is not None)
        only = next(iter(self._by_model.values())) if not served and len(self._by_model) == 1 else None
        return next(named, None) or self._by_model.get("") or only

    @property
    def named(self) -> tuple[str, ...]:
        """The models that the flags name."""
        return tuple(model for model in self._by_model if model)

    async def run(self, changed: Callable[[TokenizerSource], None]) -> None:
        """Keep all of them up to date, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for source in self._by_model.values():
                tasks.create_task(source.run(changed))


def _origin(spec: TokenizerSpec, source: HubModel | Path, cache: TokenizerCache) -> Origin:
    return FolderOrigin(source) if isinstance(source, Path) else HubOrigin(source, str(spec), cache)


async def _in_thread(call: Callable[[], T], what: str) -> T:
    """Return the result of a slow call. Its thread is a daemon: a download that hangs must not keep the process alive,
    as the loop's own threads would.
    """
    done: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        done.set_running_or_notify_cancel()
        try:
            result = call()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(result)

    threading.Thread(target=run, daemon=True, name=f"tokenizer {what}").start()
    return await asyncio.wrap_future(done)
