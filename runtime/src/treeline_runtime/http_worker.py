"""An HTTP worker: serves inference as the first HTTP process does, on a socket of the same port (`--http-workers`).

What it knows of the server comes from its parent (`workers`): that the engine is ready, that the server drains, how the
engine is, that everything has to end. It tells the parent that it moves, what it sees of the engine, and that it has
nothing in flight any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import sys
from pathlib import Path

import uvloop
import zmq

from treeline_runtime.child import ChildSpec, StartError, call_at_end, run_child, tell_when_asked
from treeline_runtime.frontend import (
    FAREWELL_S,
    STOPPED,
    Frontend,
    HttpServer,
    ServedModel,
    ServeError,
    give_back_large_blocks,
    stop_all,
)
from treeline_runtime.ipc import (
    HEARTBEAT_S,
    AbortNamed,
    AsyncInbox,
    Begin,
    EndAll,
    Heartbeat,
    Idle,
    Outbox,
    Process,
    Ready,
    SamplesReq,
    StateUpdate,
    ToWorker,
    decode_to_worker,
)
from treeline_runtime.messages import BatchTextOut, HeardReq, Reply
from treeline_runtime.server.service import State

logger = logging.getLogger("treeline")


class Worker:
    """Made in a running event loop; `run` once."""

    def __init__(self, spec: ChildSpec, model: ServedModel, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._spec = spec
        self._context = context
        self._process = Process("http", spec.rank)
        self._parent = Outbox(context, spec.addresses.http)
        self._state = State()
        self._front = Frontend(spec, model, context, self._state, report=self._parent.send)
        self._parting: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Serves until the parent closes standard input, or is gone."""
        loop, told_to_stop = asyncio.get_running_loop(), asyncio.Event()

        def end() -> None:
            with contextlib.suppress(RuntimeError):  # it has ended already
                loop.call_soon_threadsafe(told_to_stop.set)

        call_at_end(end)
        tell_when_asked(lambda: f"{self._front.service.active} requests are being answered")
        inbox = AsyncInbox(self._context, self._spec.addresses.of(self._process), decode_to_worker, self._on_message)
        assert self._spec.listener is not None, "the parent has handed it over"
        server = HttpServer(self._front.inference(), socket.socket(fileno=self._spec.listener))
        serving, beating = server.start(), asyncio.create_task(self._beat())
        stopping = asyncio.create_task(told_to_stop.wait())
        await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
        ended_by_itself = serving.done()
        self._front.service.manager.fail_all(STOPPED)  # where the parent was killed
        beating.cancel()
        await stop_all([server], [serving])
        await self._front.close()
        inbox.close()
        if ended_by_itself:
            serving.result()
            raise RuntimeError("the HTTP server ended by itself")

    async def _beat(self) -> None:
        while True:
            self._parent.send(Heartbeat(self._process.name))
            await asyncio.sleep(HEARTBEAT_S)

    def _on_message(self, message: ToWorker) -> None:
        manager = self._front.service.manager
        match message:
            case BatchTextOut():
                self._front.on_batch(message)
            case Reply():
                manager.on_reply(message)
            case StateUpdate():
                self._on_state(message)
            case Begin():
                self._front.begin(message)
                self._state.ready = True
                self._parent.send(Ready(self._process.name, {}))
            case EndAll():
                if cut := manager.fail_all(message.finish):
                    logger.warning("%d requests in flight were ended", cut)
            case AbortNamed():
                manager.abort(message.name)
            case HeardReq():
                manager.when_all_sent(functools.partial(self._parent.send, Reply(message.id)))
            case SamplesReq():
                self._parent.send(Reply(message.id, data={"samples": self._front.metrics.samples()}))

    def _on_state(self, message: StateUpdate) -> None:
        state, service = self._state, self._front.service
        if message.draining and not state.draining:
            logger.info("draining, %d requests in flight", service.active)
        for name in StateUpdate.__struct_fields__:
            setattr(state, name, getattr(message, name))
        if self._parting is None and (state.refusing or state.failure is not None):
            self._parting = asyncio.create_task(self._say_when_idle())

    async def _say_when_idle(self) -> None:
        await self._front.service.idle.wait()
        self._parent.send(Idle(self._process.name))


def run(spec: ChildSpec, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    give_back_large_blocks()
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    try:
        model = ServedModel.read(spec.args, Path(spec.model_dir))
    except ServeError as error:
        raise StartError(str(error)) from None

    async def serve() -> None:
        await Worker(spec, model, context).run()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


if __name__ == "__main__":
    sys.exit(run_child("http", run, farewell_s=2 * FAREWELL_S))
