"""Requests to prefill endpoints: each computes a prompt there, and one small answer comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from treeline_epp.endpoints.http_answer import Answer, HttpError
from treeline_epp.endpoints.http_client import Buffer, HttpClient

MOST_CALLS: Final = 1024
"""Most requests in flight. Their bodies are those of requests that wait in the picker, and count there."""
MOST_BYTES: Final = 1 << 20
"""Largest answer: it names the blocks of the prompt, some 8 bytes for each, and repeats one token."""


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
        self._calls: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._calls)

    def post(
        self,
        server: str,
        address: str,
        path: str,
        headers: Mapping[str, str],
        body: Sequence[Buffer],
        *,
        limit_s: float,
        after_s: float = 0.0,
        until_sent: bool = False,
        ended: Callable[[PrefillCall], None] = lambda _call: None,
    ) -> PrefillCall | None:
        """Send a request in `after_s`; `ended` is called when it has its answer or its problem, not after `cancel`.
        None if too many are in flight, or the server has gone.
        """
        http = self._client_of(server)
        if http is None or len(self._calls) >= MOST_CALLS:
            return None
        call = PrefillCall(limit_s, until_sent=until_sent)

        async def run() -> None:
            await asyncio.sleep(after_s)
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

        call.task = asyncio.create_task(run(), name=f"prefill at {server}")
        self._calls.add(call.task)
        call.task.add_done_callback(self._calls.discard)
        return call
