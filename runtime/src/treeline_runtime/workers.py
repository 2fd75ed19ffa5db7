"""The parent's side of HTTP workers (`http_worker`): it tells them what it knows, and asks what they do.

It alone hears of the other processes, of signals and of administration. What of that decides about requests is in its
`State`, which goes to all workers whenever it has changed; so readiness, health and draining are the same everywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import msgspec
import zmq

from treeline_runtime.ipc import Addresses, Begin, EndAll, Outbox, Process, StateUpdate
from treeline_runtime.messages import FinishReason
from treeline_runtime.server.metrics import Samples
from treeline_runtime.server.service import State
from treeline_runtime.tokenizer_manager import NoReply, TokenizerManager

ROUTINE = ("heartbeats", "load")
"""What changes all the time and decides nothing."""
ROUTINE_S = 0.25
SAMPLES_S = 1.0
"""For a worker's metrics; those that it sent last are taken then."""
TOLD_S = 10.0
"""For a worker to take what it is sent: it may be busy with something else."""


class HttpWorkers:
    """All workers of a server; there may be none. Made and used in a running event loop."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], addresses: Addresses, processes: Sequence[Process], state: State
    ) -> None:
        """`state`: the server's, of which they hear from now on."""
        self.outboxes = {process.name: Outbox(context, addresses.of(process)) for process in processes}
        self._state = state
        self._telling: asyncio.Handle | None = None
        self._busy: set[str] = set()
        self._all_idle = asyncio.Event()
        self._all_idle.set()
        self._samples: dict[str, Samples] = {}
        if self.outboxes:
            state.on_change = self._on_change

    def begin(self, begin: Begin) -> None:
        """Have them serve; each answers with Ready."""
        self._tell()
        self._send(begin)
        self._busy = set(self.outboxes)
        if self._busy:
            self._all_idle.clear()

    def end_all(self, finish: FinishReason) -> None:
        """End what is in flight there."""
        self._tell()  # nothing may begin behind it
        self._send(EndAll(finish))

    async def idle(self) -> None:
        """Waits until none of them answers a request any more; they say so once the server stops."""
        await self._all_idle.wait()

    def on_idle(self, process: str) -> None:
        """It has said so, or has ended. Other processes may be named, too."""
        self._busy.discard(process)
        if not self._busy:
            self._all_idle.set()

    async def samples(self, manager: TokenizerManager) -> Sequence[Samples]:
        """What each has counted until now; or until it was asked last, if it does not answer."""

        async def ask(name: str, outbox: Outbox) -> None:
            with contextlib.suppress(NoReply):
                self._samples[name] = msgspec.convert(await manager.samples(outbox, SAMPLES_S), Samples)

        await asyncio.gather(*(ask(name, outbox) for name, outbox in self.outboxes.items()))
        return list(self._samples.values())

    async def told(self, manager: TokenizerManager) -> None:
        """Returns when all of them know the state as it is now. Raises NoReply. Not waited for once the server has
        failed: then some may have ended."""
        if self._state.failure is None:
            self._tell()
            await asyncio.gather(*(manager.heard(outbox, TOLD_S) for outbox in self.outboxes.values()))

    def _on_change(self, name: str) -> None:
        """Tells of all changes of this turn of the loop at once; of signs of life after a while."""
        if self._telling is not None:
            if name in ROUTINE:
                return
            self._telling.cancel()
        loop = asyncio.get_running_loop()
        self._telling = loop.call_later(ROUTINE_S, self._tell) if name in ROUTINE else loop.call_soon(self._tell)

    def _tell(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        told = {name: getattr(self._state, name) for name in StateUpdate.__struct_fields__}
        self._send(StateUpdate(**told))

    def _send(self, message: msgspec.Struct) -> None:
        for outbox in self.outboxes.values():
            outbox.send(message)
