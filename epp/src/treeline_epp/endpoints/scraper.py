"""Looks at the metrics of engines that push no load, each of them seldom, and of many each more seldom.

A look is one GET on a connection that stays open, uncompressed, bounded in time and size. The next one waits for the
end of the one before: an engine whose metrics stall is not asked twice. What comes of a look is a load report and
nothing else: an engine without metrics, or with strange ones, is as ready as before, and its last report grows old.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence

from treeline_epp.endpoints.http_answer import Answer, BadAnswer, HttpError, HttpTimeout
from treeline_epp.endpoints.http_client import HttpClient
from treeline_epp.endpoints.model_server_metrics import MetricNames, PageReader
from treeline_epp.endpoints.scraped import ScrapedLoad
from treeline_epp.endpoints.spec import split_address

log = logging.getLogger(__name__)

INTERVAL_S = 0.5
"""Between the end of a look and the next one, at least."""
MOST_EACH_SECOND = 120.0
"""Looks at all engines together: more engines are looked at less often each."""
TIMEOUT_S = 10.0
"""Of a look. After three seconds its report would be stale; but who asks again adds to what an engine has to do."""
MOST_BYTES = 4 << 20
"""Of a page. vLLM's has 50 to 200 KB for each rank."""
MOST_SHARE = 0.02
"""Of a core, for reading one engine's page: one that takes long to read is looked at less often."""
_HERE_BYTES = 256 << 10
"""A page that is longer is read in a thread: one with many labels takes milliseconds for each ten kilobytes."""
_FIRST_RETRY_S, _LAST_RETRY_S = 1.0, 15.0
_NO_METRICS_RETRY_S = 60.0
"""An engine that has no metrics may be another one later, behind the same address."""
_UNKNOWN = (
    "running nor waiting requests by a name that is known "
    "(give it: --total-running-requests-metric, --total-queued-requests-metric)"
)
_NOT_THERE = frozenset({401, 403, 404, 405, 410, 501})
_TEXT = "text/plain;version=0.0.4"


class Failure(enum.StrEnum):
    """Why a look gave no report. Values are metric labels."""

    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"
    NO_METRICS = "no_metrics"
    """It has no such page, or does not let us see it."""
    STATUS = "status"
    BAD_ANSWER = "bad_answer"
    """A page that is longer than `MOST_BYTES`, or compressed."""
    NO_LOAD = "no_load"
    """A page that names neither running nor waiting requests, under any name that is known."""


class _Failed(Exception):
    def __init__(self, reason: Failure, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Scraping:
    """What the scrapers of a fleet share: the connections, the pace, and what they count."""

    def __init__(self) -> None:
        self.scrapes = 0
        self.failures: Counter[Failure] = Counter()
        self._active = 0
        self._http = HttpClient()

    def count(self, more: int) -> None:
        """So many engines more (less: negative) are looked at."""
        self._active += more

    def pause(self) -> float:
        """From the end of a look to the next one, for an engine that answers."""
        stretched = max(INTERVAL_S, self._active / MOST_EACH_SECOND)
        return stretched * random.uniform(1.0, 1.3)  # so that a hundred engines are not looked at in one moment

    async def get(self, address: str, path: str) -> Answer:
        """A page. Raises `HttpError`."""
        return await self._http.get(address, path, within_s=TIMEOUT_S, most=MOST_BYTES, accept=_TEXT)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()


def urls(address: str, names: Sequence[MetricNames]) -> list[str]:
    """Where the page may be, the likeliest first."""
    host, port = split_address(address)
    host = f"[{host}]" if ":" in host else host
    return [f"http://{host}:{port}{path}" for path in dict.fromkeys(each.path for each in names)]


class Scraper:
    """Looks at one engine for as long as it is to be followed. `on_load` hears what it said, and when it was asked."""

    def __init__(
        self,
        name: str,
        address: str,
        scraping: Scraping,
        on_load: Callable[[ScrapedLoad, float], None],
    ) -> None:
        self.failing: Failure | None = None
        self.scraped_at: float | None = None
        self._name = name
        self._address = address
        self._scraping = scraping
        self._on_load = on_load
        self._known: tuple[MetricNames, ...] = ()
        self._followed = 0  # how often `follow` has changed the names
        self._reader = PageReader(())
        self._urls: list[str] = []
        self._changed = asyncio.Event()
        self._retry_s = _FIRST_RETRY_S
        self._read_s = 0.0

    @property
    def following(self) -> bool:
        """Whether the engine is looked at."""
        return bool(self._known)

    def follow(self, known: tuple[MetricNames, ...]) -> None:
        """Look at it from now on, for these names; for none, no more."""
        if known == self._known:
            return
        self._known = known
        self._followed += 1
        self._reader = PageReader(known)
        self._urls = urls(self._address, known)
        self._retry_s = _FIRST_RETRY_S
        self.failing = self.scraped_at = None
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            if not self._known:
                await self._changed.wait()
                self._changed.clear()
                continue
            self._scraping.count(+1)
            try:
                # Not all at once, when a picker starts and knows a hundred engines in one moment.
                await self._sleep(random.uniform(0.0, self._scraping.pause()))
                while self._known:
                    await self._sleep(await self._look())
            finally:
                self._scraping.count(-1)

    async def _sleep(self, seconds: float) -> None:
        """So long, or until it is to be followed in another way."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()
                self._changed.clear()

    async def _look(self) -> float:
        """Once; returns the pause after it."""
        asked_at, since = time.monotonic(), self._followed
        self._scraping.scrapes += 1
        try:
            load = await self._load()
        except _Failed as failed:
            return self._failed(failed) if self._followed == since else 0.0
        if self._followed != since:
            return 0.0  # it went away while it was asked, or is another now
        if self.failing is not None:
            log.info("endpoint %s: its metrics can be read again", self._name)
        self.failing, self._retry_s, self.scraped_at = None, _FIRST_RETRY_S, asked_at
        self._on_load(load, asked_at)
        return max(self._scraping.pause(), self._read_s / MOST_SHARE)

    def _failed(self, failed: _Failed) -> float:
        self._scraping.failures[failed.reason] += 1
        if failed.reason is not self.failing:  # once, though it is asked again and again
            self.failing = failed.reason
            log.warning(
                "endpoint %s: its load cannot be read: %s; what is routed to it is all that is known of it",
                self._name,
                failed,
            )
        if failed.reason is Failure.NO_METRICS:
            return _NO_METRICS_RETRY_S * random.uniform(0.8, 1.2)
        pause, self._retry_s = self._retry_s, min(_LAST_RETRY_S, 2 * self._retry_s)
        return max(pause, self._scraping.pause(), self._read_s / MOST_SHARE) * random.uniform(1.0, 1.3)

    async def _load(self) -> ScrapedLoad:
        """What the first of its pages says that says anything. Raises `_Failed`."""
        reader, since = self._reader, self._followed
        said: list[_Failed] = []
        for url in self._urls:
            try:
                page = await self._page(url)
                if len(page) <= _HERE_BYTES:
                    load = self._read(page, reader)
                else:
                    load = await asyncio.to_thread(self._read, page, reader)
            except _Failed as failed:
                if failed.reason is not Failure.NO_METRICS:
                    raise
                said.append(failed)
                continue
            if load is not None:
                if self._followed == since:
                    self._urls = [url]
                return load
            said.insert(0, _Failed(Failure.NO_LOAD, f"{url} names neither {_UNKNOWN}"))
        raise said[0]

    def _read(self, page: bytes, reader: PageReader) -> ScrapedLoad | None:
        began = time.thread_time()
        load = reader.read(page)
        self._read_s = time.thread_time() - began
        return load

    async def _page(self, url: str) -> bytes:
        """The page. Raises `_Failed`."""
        address, slash, path = url.removeprefix("http://").partition("/")
        try:
            answer = await self._scraping.get(address, slash + path)
        except HttpTimeout:
            raise _Failed(Failure.TIMEOUT, f"{url} is not answered within {TIMEOUT_S:g} s") from None
        except BadAnswer as error:
            raise _Failed(Failure.BAD_ANSWER, f"{url}: {error}") from None
        except HttpError as error:
            raise _Failed(Failure.UNREACHABLE, f"{url}: {error!r:.200}") from error
        if answer.status in _NOT_THERE:
            raise _Failed(Failure.NO_METRICS, f"{url} is answered {answer.status}")
        if answer.status != 200:
            raise _Failed(Failure.STATUS, f"{url} is answered {answer.status}")
        return answer.body
