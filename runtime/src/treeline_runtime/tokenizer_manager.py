"""Requests in flight, as the HTTP process sees them: text → ids → scheduler, and texts back to whoever waits.

A `Flight` is one HTTP request's generations (several for `n` or a batch) and the owner of their lifetime: whoever opens
it closes it in a `finally`, and closing aborts what has not ended. So a generation lives exactly as long as the HTTP
request that asked for it. Closing is legal in every state and any number of times.

Names belong to clients, who may use one again as soon as its request is over for them. Other processes may not be done
with it then, so they see ids of ours that are never used twice.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from treeline_runtime.ipc import AnnouncedReq
from treeline_runtime.messages import (
    AbortReq,
    BatchTextOut,
    DetokenizeInit,
    FinishReason,
    FlushReq,
    GenerateReq,
    Reply,
    StateReq,
    TextOut,
)
from treeline_runtime.server.metrics import Metrics

T = TypeVar("T")


class Sender(Protocol):
    """Where messages to another process go; never blocks."""

    def send(self, message: msgspec.Struct) -> bool: ...


class DuplicateRid(Exception):
    """The caller's request id is already in flight."""


class NoReply(Exception):
    """The other process did not answer in time, or died."""


class _Generation:
    """One request at the scheduler: its output that nobody has taken yet, and its times (monotonic seconds)."""

    __slots__ = ("first_at", "flight", "index", "last_at", "pending", "started_at", "tokens")

    def __init__(self, flight: Flight, index: int, now: float) -> None:
        self.flight = flight
        self.index = index
        self.pending: list[TextOut] = []
        self.started_at = now
        self.first_at: float | None = None
        self.last_at = now
        self.tokens = 0


class Flight:
    """Generations of one HTTP request. `next` until it returns nothing; `close` in a `finally`."""

    def __init__(
        self, manager: TokenizerManager, rids: Sequence[str], ids: Sequence[str], now: float
    ) -> None:
        """`rids`: what clients call the generations; `ids`: what the other processes call them."""
        self.rids = list(rids)
        self.names: list[str] = []
        """What the manager keeps for `abort` while this is open."""
        self._manager = manager
        self._generations = {id: _Generation(self, index, now) for index, id in enumerate(ids)}
        self._open = len(ids)
        self._woken = asyncio.Event()
        self._whole = False

    @property
    def ids(self) -> list[str]:
        return list(self._generations)

    async def next(self, *, whole: bool = False) -> list[tuple[int, TextOut]]:
        """What came since the last call, at most one merged output per generation; [] once all have ended and
        everything has been taken. `whole`: wait until a generation has ended before looking."""
        self._whole = whole
        while True:
            ready = [(g.index, merge(g.pending)) for g in self._generations.values() if g.pending]
            if ready:
                for generation in self._generations.values():
                    generation.pending = []
                return ready
            if not self._open:
                return []
            self._woken.clear()
            await self._woken.wait()

    def close(self) -> None:
        """Forgets the generations; aborts those that have not ended. Idempotent."""
        self._open = 0
        for generation in self._generations.values():
            generation.pending = []
        self._manager.forget(self)
        self._woken.set()

    def _deliver(self, generation: _Generation, out: TextOut) -> None:
        generation.pending.append(out)
        if out.finish is not None:
            self._open -= 1
        if out.finish is not None or not self._whole:
            self._woken.set()


def merge(outs: Sequence[TextOut]) -> TextOut:
    """Consecutive outputs of one request → one: texts and lists joined, counts of the last."""
    if len(outs) == 1:
        return outs[0]
    last = outs[-1]
    return msgspec.structs.replace(
        last,
        text="".join(out.text for out in outs),
        token_ids=[token for out in outs for token in out.token_ids],
        output_token_logprobs=_joined([out.output_token_logprobs for out in outs]),
        output_top_logprobs=_joined([out.output_top_logprobs for out in outs]),
        input_token_logprobs=outs[0].input_token_logprobs,
        input_top_logprobs=outs[0].input_top_logprobs,
    )


def _joined(parts: list[list[T] | None]) -> list[T] | None:
    if all(part is None for part in parts):
        return None
    return [item for part in parts if part is not None for item in part]


class TokenizerManager:
    """Sends generations to the scheduler and routes what comes back. All methods run in the event loop."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._running: dict[str, _Generation] = {}
        """By our own ids."""
        self._named: dict[str, list[str]] = {}
        """What clients call a flight or one of its generations → our ids of those."""
        self._asked: dict[str, asyncio.Future[Reply]] = {}
        self._ids = itertools.count()

    def connect(
        self, to_scheduler: Sender, to_detokenizer: Sender, to_publisher: Sender | None = None
    ) -> None:
        """Where messages go. Before this nothing can be opened or asked."""
        self._to_scheduler = to_scheduler
        self._to_detokenizer = to_detokenizer
        self._to_publisher = to_publisher

    def open(self, requests: Sequence[GenerateReq], name: str | None = None) -> Flight:
        """Starts the requests, whose `rid` is the client's; `abort` takes these and `name`, which stands for all.

        The caller must `close` the flight, whatever happens. Raises DuplicateRid when one of the names is in flight.
        """
        rids = [request.rid for request in requests]
        ids = [f"{rid}#{next(self._ids)}" for rid in rids]
        names = {rid: [id] for rid, id in zip(rids, ids, strict=True)}
        taken = next((known for known in (*rids, name) if known in self._named), None)
        if taken is not None or len(names) < len(rids):
            raise DuplicateRid(taken or name)
        if name is not None:
            names[name] = ids
        self._named |= names
        flight = Flight(self, rids, ids, time.monotonic())
        flight.names = list(names)
        self._running.update(flight._generations)
        for id, request in zip(ids, requests, strict=True):
            self._metrics.requests.inc()
            self._to_detokenizer.send(
                DetokenizeInit.of(id, request.sampling, return_logprob_text=request.return_logprob)
            )
            self._to_scheduler.send(msgspec.structs.replace(request, rid=id))
        return flight

    def forget(self, flight: Flight) -> None:
        """Aborts what has not ended of a flight that nobody waits for any more."""
        for name in flight.names:
            del self._named[name]
        flight.names = []
        for id in flight.ids:
            if self._running.pop(id, None) is not None:
                self._metrics.aborted.inc()
                self._to_scheduler.send(AbortReq(id))

    def abort(self, name: str) -> None:
        """Ends the requests of one name, or all with "": their waiters get what there is, and reason `abort`."""
        for id in self._named.get(name, ()) if name else ("",):
            self._to_scheduler.send(AbortReq(id))

    def fail_all(self, finish: FinishReason) -> int:
        """Ends everything in flight here and now, without the scheduler; returns how many there were."""
        running = list(self._running.items())
        for id, generation in running:
            del self._running[id]
            generation.flight._deliver(generation, TextOut(id, "", [], finish))
        for future in self._asked.values():
            if not future.done():
                future.set_exception(NoReply(finish.message or finish.type))
        return len(running)

    # ---- what comes back ------------------------------------------------------------------------------------

    def on_batch(self, batch: BatchTextOut) -> None:
        now = time.monotonic()
        for out in batch.outs:
            generation = self._running.get(out.rid)
            if generation is None:
                continue  # its client has gone
            self._measure(generation, out, now)
            if out.finish is not None:
                del self._running[out.rid]
            generation.flight._deliver(generation, out)

    def on_reply(self, reply: Reply) -> None:
        future = self._asked.get(reply.id)
        if future is not None and not future.done():
            future.set_result(reply)

    def _measure(self, generation: _Generation, out: TextOut, now: float) -> None:
        metrics, fresh = self._metrics, len(out.token_ids)
        if fresh:
            if generation.first_at is None:
                generation.first_at = now
                metrics.time_to_first_token.observe(now - generation.started_at)
                metrics.prompt_tokens.inc(out.prompt_tokens)
                metrics.cached_tokens.inc(out.cached_tokens)
            else:
                metrics.inter_token_latency.observe((now - generation.last_at) / fresh)
            generation.last_at = now
            generation.tokens += fresh
            metrics.generation_tokens.inc(fresh)
        if out.finish is not None:
            metrics.e2e_request_latency.observe(now - generation.started_at)
            metrics.retracted.inc(out.retractions)
            if generation.tokens > 1 and generation.first_at is not None:
                per_token = (generation.last_at - generation.first_at) / (generation.tokens - 1)
                metrics.time_per_output_token.observe(per_token)

    # ---- questions ------------------------------------------------------------------------------------------

    async def flush(self, timeout_s: float = 10.0) -> Reply:
        id = self._new_id()
        return await self._ask(self._to_scheduler, FlushReq(id), id, timeout_s)

    async def state(self, what: str, timeout_s: float = 10.0) -> dict[str, Any]:
        """The scheduler's `info`, `radix` or `load`. Raises NoReply."""
        id = self._new_id()
        request = StateReq(id, what)  # type: ignore[arg-type]
        return (await self._ask(self._to_scheduler, request, id, timeout_s)).data or {}

    async def announced(self, after_updates: int, timeout_s: float = 10.0) -> dict[str, Any]:
        """What the publisher has announced once it has seen `after_updates` cache updates. Raises NoReply."""
        if self._to_publisher is None:
            return {"seq": None, "hashes": []}
        id = self._new_id()
        return (
            await self._ask(self._to_publisher, AnnouncedReq(id, after_updates), id, timeout_s)
        ).data or {}

    async def _ask(self, sender: Sender, request: msgspec.Struct, id: str, timeout_s: float) -> Reply:
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._asked[id] = future
        try:
            sender.send(request)
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise NoReply(f"no answer within {timeout_s:g} s") from None
        finally:
            del self._asked[id]

    def _new_id(self) -> str:
        return f"q{next(self._ids)}"
