"""Requests to prefill endpoints: each computes a prompt there, and one small answer comes back."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Final

from treeline_epp.endpoints.http_answer import Answer, HttpError
from treeline_epp.endpoints.http_client import Buffer, HttpClient

MOST_CALLS: Final = 1024
"""Most requests in flight; and each client may have as many as are free, so that none can keep the others out. Their
bodies are those of requests that wait in the picker, and count there."""
MOST_BYTES: Final = 1 << 20
"""Largest answer: it names the blocks of the prompt, some 8 bytes for each, and repeats one token."""
_ABORT_S, _UNDER_WAY_S = 5.0, 1.0
"""Longest that an abort may take; and how long after a failure it is sent: the request may still be on its way."""


class PrefillCalls:
    """Sends the requests. `client_of` returns the client for the server of that name, None if it has gone."""

    def __init__(self, client_of: Callable[[str], HttpClient | None]) -> None:
        self._client_of = client_of
        self._held: Counter[str | None] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return self._held.total()

    def post(
        self,
        server: str,
        address: str,
        path: str,
        headers: Mapping[str, str],
        body: list[Buffer],
        *,
        client: str | None,
        within_s: float,
        sent: Callable[[], None],
        ended: Callable[[Answer | None, str], None],
    ) -> Callable[[], object] | None:
        """Send a request of a client; return a function that breaks it off. `sent` is called when it is on its way, and
        `ended` when it has an answer or a problem, but not if it is broken off. The list `body` is emptied. None if too
        many are in flight, or the server has gone.
        """
        http, free = self._client_of(server), MOST_CALLS - len(self)
        if http is None or free <= (0 if client is None else self._held[client]):
            return None

        async def run() -> None:
            try:
                answer = await http.post(address, path, headers, body, within_s=within_s, most=MOST_BYTES, sent=sent)
            except HttpError as error:
                ended(None, str(error))
            else:
                ended(answer, "")

        def over(_: object) -> None:
            self._held[client] -= 1
            if not self._held[client]:
                del self._held[client]

        self._held[client] += 1
        task = self._begin(run(), f"prefill at {server}")
        task.add_done_callback(over)
        return task.cancel

    def abort(self, server: str, address: str, body: bytes) -> None:
        """Tell a server to abort a request that is on its way there, or has arrived."""
        if (http := self._client_of(server)) is None:
            return

        async def run() -> None:
            await asyncio.sleep(_UNDER_WAY_S)
            with contextlib.suppress(HttpError):
                await http.post(address, "/abort_request", {}, [body], within_s=_ABORT_S, most=MOST_BYTES)

        self._begin(run(), f"abort at {server}")

    def _begin(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
