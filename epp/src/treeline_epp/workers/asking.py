"""Asks the workers for a page: all at once, for as long as the page may take, and none that is known to be silent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlencode

import aiohttp

from treeline_epp.admin import Page
from treeline_epp.workers.link import Status
from treeline_epp.workers.team import Place

log = logging.getLogger(__name__)

PATIENCE_S = 2.0
_MOST_BYTES = 64 << 20

Query = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Told:
    """What a worker says: its page, or `why` there is none."""

    place: Place
    page: Page | None
    why: str = ""

    @property
    def well(self) -> bool:
        """It is the page that was asked for."""
        return self.page is not None and self.page.status == 200


def unanswered(told: Sequence[Told]) -> list[dict[str, object]]:
    """Of those without a page, for a page: which, and why."""
    return [{"worker": one.place.index, "why": one.why} for one in told if one.page is None]


def admin_port(status: Status) -> int:
    """Of probes, endpoints and debug pages."""
    return status.admin_port


def metrics_port(status: Status) -> int:
    """Of metrics."""
    return status.metrics_port


class Asking:
    """See the module. `places` are those of all workers, as they are when it is called."""

    def __init__(self, places: Callable[[], Sequence[Place]]) -> None:
        self._places = places

    async def all(
        self,
        path: str,
        query: Query | Callable[[Place], Query] | None = None,
        *,
        body: bytes | None = None,
        port: Callable[[Status], int] = admin_port,
        patience_s: float | None = None,
    ) -> list[Told]:
        """One answer of each, in their order. `query` may differ from worker to worker; with a `body` it is a POST."""
        patience_s = PATIENCE_S if patience_s is None else patience_s
        timeout = aiohttp.ClientTimeout(total=patience_s)
        async with aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as http:

            async def ask(place: Place) -> Told:
                if not place.pid:
                    return Told(place, None, "it has ended, and another starts")
                if not port(place.status):
                    return Told(place, None, "it starts")
                if place.silent_s:
                    return Told(place, None, f"it says nothing for {place.silent_s:.1f} s")
                words = query(place) if callable(query) else query
                url = f"http://127.0.0.1:{port(place.status)}{path}"
                try:
                    page = await _page(http, f"{url}?{urlencode(words)}" if words else url, body)
                except TimeoutError:
                    why = f"it has not answered within {patience_s:g} s"
                except (aiohttp.ClientError, OSError) as error:
                    why = f"it does not answer: {error}"
                else:
                    return Told(place, page)
                log.warning("worker %d, asked for %s: %s", place.index, path, why)
                return Told(place, None, why)

            return await asyncio.gather(*map(ask, self._places()))


async def _page(http: aiohttp.ClientSession, url: str, body: bytes | None) -> Page:
    async with http.request("GET" if body is None else "POST", url, data=body) as answer:
        found = bytearray()
        async for chunk in answer.content.iter_any():
            found += chunk
            if len(found) > _MOST_BYTES:
                raise aiohttp.ClientPayloadError(f"more than {_MOST_BYTES >> 20} MB")
        return Page(bytes(found), answer.status, answer.headers.get("content-type", ""))
