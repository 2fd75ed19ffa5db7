"""Scrapes the metrics of engines that push no load: each one seldom, and less often the more there are.

A scrape is one GET on a connection that stays open, uncompressed, bounded in time and size. The next one waits for the
end of the one before: an engine whose metrics stall is not asked twice. A scrape only makes a load report: an engine
without metrics, or with strange ones, is as ready as before, and its last report grows old.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from treeline_epp.endpoints.http_answer import BadAnswer, HttpError, HttpTimeout
from treeline_epp.endpoints.http_client import HttpClient
from treeline_epp.endpoints.model_server_metrics import MetricNames, PageReader
from treeline_epp.endpoints.scraped import ScrapedLoad

log = logging.getLogger(__name__)

INTERVAL_S = 0.5
"""Least seconds between the end of a scrape and the next one."""
MOST_EACH_SECOND = 120.0
"""Scrapes of all engines together: with more engines, each is scraped less often."""
TIMEOUT_S = 10.0
"""Longest scrape. Its report is stale after three seconds, but another request would add to the engine's load."""
MOST_BYTES = 4 << 20
"""Largest page. vLLM's has 50 to 200 KB for each rank."""
MOST_SHARE = 0.02
"""Largest share of a core for parsing one engine's page: a slow page is scraped less often."""
_HERE_BYTES = 256 << 10
"""Largest page that is parsed in the event loop: with many labels, ten kilobytes take milliseconds."""
_FIRST_RETRY_S, _LAST_RETRY_S = 1.0, 15.0
_NO_METRICS_RETRY_S = 60.0
"""Pause for an engine without metrics: another one may appear behind its address."""
_UNKNOWN = (
    "running nor waiting requests by a name that is known "
    "(give it: --total-running-requests-metric, --total-queued-requests-metric)"
)
_NOT_THERE = frozenset({401, 403, 404, 405, 410, 501})
_TEXT = "text/plain;version=0.0.4"


class Failure(enum.StrEnum):
    """The reason why a scrape gave no report. Values are metric labels."""

    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"
    NO_METRICS = "no_metrics"
    """The page does not exist, or is forbidden."""
    STATUS = "status"
    BAD_ANSWER = "bad_answer"
    """The page is longer than `MOST_BYTES`, or compressed."""
    NO_LOAD = "no_load"
    """The page has neither running nor waiting requests, under any known name."""


class _Failed(Exception):
    def __init__(self, reason: Failure, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Scraping:
    """The state that all scrapers of a fleet share: connections, pace and counters."""

    def __init__(self) -> None:
        self.scrapes = 0
        self.failures: Counter[Failure] = Counter()
        self._active = 0
        self.http = HttpClient()

    def count(self, more: int) -> None:
        """Change the number of scraped engines by `more`, which may be negative."""
        self._active += more

    def pause(self) -> float:
        """Return the seconds from the end of a scrape to the next one, for an engine that answers."""
        stretched = max(INTERVAL_S, self._active / MOST_EACH_SECOND)
        return stretched * random.uniform(1.0, 1.3)  # so that a hundred engines are not scraped in one moment


class Scraper:
    """The scraper of one engine. `on_load` gets the reports of each page (one, or those of all ranks in order) and the
    time of the request.
    """

    def __init__(
        self,
        name: str,
        address: str,
        scraping: Scraping,
        on_load: Callable[[Sequence[ScrapedLoad], float], None],
    ) -> None:
        self.failing: Failure | None = None
        self.scraped_at: float | None = None
        self._name = name
        self._address = address
        self._scraping = scraping
        self._on_load = on_load
        self._known: tuple[MetricNames, ...] = ()
        self._followed = 0  # number of changes by `follow`
        self._readers: list[PageReader] = []
        self._paths: list[str] = []
        """Where the page may be, the likeliest first."""
        self._changed = asyncio.Event()
        self._retry_s = _FIRST_RETRY_S
        self._read_s = 0.0

    @property
    def following(self) -> bool:
        """Whether the engine is scraped."""
        return bool(self._known)

    def follow(self, known: tuple[MetricNames, ...], ranks: Sequence[int | None] = (None,)) -> None:
        """Scrape the engine for these names from now on; with none, stop. `ranks`: those with reports of their own."""
        if (known, len(ranks)) == (self._known, len(self._readers)):
            return
        self._known = known
        self._followed += 1
        self._readers = [PageReader(known, rank) for rank in ranks]
        self._paths = list(dict.fromkeys(each.path for each in known))
        self._retry_s = _FIRST_RETRY_S
        self.failing = self.scraped_at = None
        self._changed.set()

    async def run(self) -> None:
        """Scrape until cancelled."""
        while True:
            if not self._known:
                await self._changed.wait()
                self._changed.clear()
                continue
            self._scraping.count(+1)
            try:
                # A starting picker learns of a hundred engines in one moment: spread their first scrapes.
                await self._sleep(random.uniform(0.0, self._scraping.pause()))
                while self._known:
                    await self._sleep(await self._look())
            finally:
                self._scraping.count(-1)

    async def _sleep(self, seconds: float) -> None:
        """Wait this long, or until `follow` changes the names."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()
                self._changed.clear()

    async def _look(self) -> float:
        """Scrape once; return the pause after it."""
        asked_at, since = time.monotonic(), self._followed
        self._scraping.scrapes += 1
        try:
            loads = await self._load()
        except _Failed as failed:
            return self._failed(failed) if self._followed == since else 0.0
        if self._followed != since:
            return 0.0  # the engine went away meanwhile, or another one took its place
        if self.failing is not None:
            log.info("endpoint %s: its metrics can be read again", self._name)
        self.failing, self._retry_s, self.scraped_at = None, _FIRST_RETRY_S, asked_at
        self._on_load(loads, asked_at)
        return max(self._scraping.pause(), self._read_s / MOST_SHARE)

    def _failed(self, failed: _Failed) -> float:
        self._scraping.failures[failed.reason] += 1
        if failed.reason is not self.failing:  # log it once, though the engine is asked again and again
            self.failing = failed.reason
            log.warning(
                "endpoint %s: its load cannot be read: %s; only requests routed by this picker count",
                self._name,
                failed,
            )
        if failed.reason is Failure.NO_METRICS:
            return _NO_METRICS_RETRY_S * random.uniform(0.8, 1.2)
        pause, self._retry_s = self._retry_s, min(_LAST_RETRY_S, 2 * self._retry_s)
        return max(pause, self._scraping.pause(), self._read_s / MOST_SHARE) * random.uniform(1.0, 1.3)

    async def _load(self) -> list[ScrapedLoad]:
        """Return the loads on the first of its pages that has all. Raises `_Failed`."""
        readers, since = self._readers, self._followed
        said: list[_Failed] = []
        for path in self._paths:
            try:
                page = await self._page(path)
                if len(page) <= _HERE_BYTES:
                    loads = self._read(page, readers)
                else:
                    loads = await asyncio.to_thread(self._read, page, readers)
            except _Failed as failed:
                if failed.reason is not Failure.NO_METRICS:
                    raise
                said.append(failed)
                continue
            if len(loads) == len(readers):
                if self._followed == since:
                    self._paths = [path]
                return loads
            said.insert(0, _Failed(Failure.NO_LOAD, f"http://{self._address}{path} names neither {_UNKNOWN}"))
        raise said[0]

    def _read(self, page: bytes, readers: Iterable[PageReader]) -> list[ScrapedLoad]:
        began = time.thread_time()
        loads = [load for reader in readers if (load := reader.read(page)) is not None]
        self._read_s = time.thread_time() - began
        return loads

    async def _page(self, path: str) -> bytes:
        """Fetch the page. Raises `_Failed`."""
        url, http = f"http://{self._address}{path}", self._scraping.http
        try:
            answer = await http.get(self._address, path, within_s=TIMEOUT_S, most=MOST_BYTES, accept=_TEXT)
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
