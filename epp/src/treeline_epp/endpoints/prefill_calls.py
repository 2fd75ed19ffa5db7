"""Requests to prefill endpoints: each computes a prompt there, and one small answer comes back."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
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


class PrefillCall:
    """One request. `done`: its holder need not wait any longer, because the answer is there, or because the request has
    been sent, if that is enough (`until_sent`). `limit_s`: the longest that it takes.
    """

    def __init__(self, limit_s: float, *, until_sent: bool) -> None:
        self.limit_s = limit_s
        self.answer: Answer | None = None
        self.problem = ""
        """Why there is no answer."""
        self.done = False
        self.task: asyncio.Task[None] | None = None
        self._until_sent = until_sent
        self._callback: Callable[[], object] | None = None

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call this once, when the call is done, or at once if it is. A later callback replaces an earlier one."""
        if self.done:
            callback()
        else:
            self._callback = callback

    def cancel(self) -> None:
        """Break off the request: the engine sees that its client has gone."""
        if self.task is not None:
            self.task.cancel()

    def on_sent(self) -> None:
        """The request is on its way."""
        if self._until_sent:
            self.finish()

    def finish(self) -> None:
        """Let its holder go on."""
        callback, self._callback, self.done = self._callback, None, True
        if callback is not None:
            callback()


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
        limit_s: float,
        until_sent: bool,
        ended: Callable[[PrefillCall], None],
    ) -> PrefillCall | None:
        """Send a request of a client; `ended` is called when it has its answer or its problem, not after `cancel`. The
        list `body` is emptied. None if too many are in flight, or the server has gone.
        """
        http, free = self._client_of(server), MOST_CALLS - len(self)
        if http is None or free <= (0 if client is None else self._held[client]):
            return None
        call = PrefillCall(limit_s, until_sent=until_sent)

        async def run() -> None:
            try:
                call.answer = await http.post(
                    address, path, headers, body, within_s=limit_s, most=MOST_BYTES, sent=call.on_sent
                )
            except HttpError as error:
                call.problem = str(error)
            try:
                ended(call)
            finally:
                call.finish()

        def over(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            self._held[client] -= 1
            if not self._held[client]:
                del self._held[client]

        self._held[client] += 1
        call.task = asyncio.create_task(run(), name=f"prefill at {server}")
        self._tasks.add(call.task)
        call.task.add_done_callback(over)
        return call

    def abort(self, server: str, address: str, body: bytes) -> None:
        """Tell a server to abort a request that is on its way there, or has arrived."""
        if (http := self._client_of(server)) is None:
            return

        async def run() -> None:
            await asyncio.sleep(_UNDER_WAY_S)
            with contextlib.suppress(HttpError):
                await http.post(address, "/abort_request", {}, [body], within_s=_ABORT_S, most=MOST_BYTES)

        task = asyncio.create_task(run(), name=f"abort at {server}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
