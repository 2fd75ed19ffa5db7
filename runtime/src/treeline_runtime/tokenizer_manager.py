"""Requests in flight in the HTTP process: text → ids → scheduler, and texts back to the waiting caller.

An `InflightRequest` is one HTTP request's generations (several for `n` or a batch) and owns their lifetime: its opener
closes it in a `finally`, which aborts unfinished ones. So a generation lives as long as its HTTP request. Closing is
allowed in every state and repeatedly.

Clients may reuse a name as soon as their request is over, while other processes may still work on it. So other
processes see unique ids of ours: name, `#`, count. Each tenant has its own names; none learns or takes another's.

Clients take turns in sending to the scheduler (`gate`).

All generations of a request run at one data-parallel rank: the one it names, else that with the fewest in flight.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from treeline_runtime import messages
from treeline_runtime.gate import Gate
from treeline_runtime.ipc import AnnouncedReq, Outbox
from treeline_runtime.server.errors import ApiError, wrong
from treeline_runtime.server.jobs import size_of
from treeline_runtime.server.metrics import Metrics
from treeline_runtime.server.pacing import Pacer

MERGED_AT_ONCE = 16
"""Outputs of a generation that may wait for their reader before they are merged."""
ABORTED = messages.FinishReason("abort", message="aborted")


class DpRank:
    """A data-parallel rank: its processes, and its generations in flight."""

    def __init__(self, scheduler: Outbox, detokenizer: Outbox, publisher: Outbox | None = None) -> None:
        self.scheduler = scheduler
        self.detokenizer = detokenizer
        self.publisher = publisher
        self.gate = Gate[messages.GenerateReq](size_of)
        self.running = 0
        """Generations in flight, waiting ones included."""
        self.chosen_at = 0
        """Count of the last choice: of equally busy ranks, the one chosen longest ago is next."""
        self.all_sent = asyncio.Event()
        """No generation waits for its turn."""


class NoReply(Exception):
    """The other process did not answer in time, or died."""


class _Generation:
    """A request at the scheduler: its unread output, and its times (monotonic seconds)."""

    __slots__ = ("first_at", "index", "inflight", "last_at", "pending", "started_at", "tokens")

    def __init__(self, inflight: InflightRequest, index: int, now: float) -> None:
        self.inflight = inflight
        self.index = index
        self.pending: list[messages.TextOut] = []
        self.started_at = now
        self.first_at: float | None = None
        self.last_at = now
        self.tokens = 0


class InflightRequest:
    """The generations of an HTTP request. `next` until it returns nothing; `close` in a `finally`."""

    def __init__(
        self,
        manager: TokenizerManager,
        ids: Sequence[str],
        names: Iterable[tuple[str | None, str]],
        client: str | None,
        rank: DpRank,
    ) -> None:
        self.names = list(names)
        """(tenant, name) by which `abort` finds this request while it is open."""
        self.client = client
        """The client of the generations; clients take turns."""
        self.rank = rank
        self._manager = manager
        now = time.monotonic()
        self._generations = {id: _Generation(self, index, now) for index, id in enumerate(ids)}
        self.on_close: Callable[[], None] | None = None
        """Called once, when this is closed."""
        self.on_output: Callable[[int, messages.TextOut], None] | None = None
        """Called with each output as it comes, and the index of its generation."""
        self._open = len(ids)
        self._woken = asyncio.Event()
        self._whole = False

    @property
    def ids(self) -> list[str]:
        return list(self._generations)

    async def next(self, *, whole: bool = False) -> list[tuple[int, messages.TextOut]]:
        """Outputs since the last call, at most one merged per generation; [] at the end. `whole`: waits until a
        generation has ended."""
        self._whole = whole
        pacer = Pacer()
        while True:
            ready: list[tuple[int, messages.TextOut]] = []
            for generation in self._generations.values():
                if generation.pending:
                    outs, generation.pending = generation.pending, []
                    ready.append((generation.index, merge(outs)))
                    await pacer.rest()
            if ready:
                return ready
            if not self._open:
                return []
            self._woken.clear()
            await self._woken.wait()

    def close(self) -> None:
        """Forgets the generations; aborts unfinished ones. Idempotent."""
        self._open = 0
        for generation in self._generations.values():
            generation.pending = []
        self._manager.forget(self)
        self._woken.set()
        if self.on_close is not None:
            self.on_close()
            self.on_close = None

    def _deliver(self, generation: _Generation, out: messages.TextOut) -> None:
        if self.on_output is not None:
            self.on_output(generation.index, out)
        generation.pending.append(out)
        if len(generation.pending) == MERGED_AT_ONCE:
            generation.pending = [merge(generation.pending)]
        if out.finish is not None:
            self._open -= 1
        if out.finish is not None or not self._whole:
            self._woken.set()


def merge(outs: Sequence[messages.TextOut]) -> messages.TextOut:
    """Merges consecutive outputs of a request: texts and lists joined, last counts."""
    if len(outs) == 1:
        return outs[0]
    last = outs[-1]
    token_ids, withdrawn = list[int](), 0
    for out in outs:
        ours = min(out.withdrawn, len(token_ids))
        del token_ids[len(token_ids) - ours :]
        withdrawn += out.withdrawn - ours
        token_ids += out.token_ids
    return msgspec.structs.replace(
        last,
        text="".join(out.text for out in outs),
        token_ids=token_ids,
        withdrawn=withdrawn,
        logprobs=[raw for out in outs for raw in out.logprobs],
    )


def _in_use(rid: str) -> ApiError:
    return wrong("rid", f"A request with rid {rid!r} is already in flight")


class TokenizerManager:
    """Sends generations to the schedulers and routes outputs back. All methods run in the event loop."""

    def __init__(self, metrics: Metrics, ranks: Sequence[DpRank]) -> None:
        self.ranks = ranks
        self._metrics = metrics
        self._running: dict[str, _Generation] = {}
        """Running generations by our own ids."""
        self._named: dict[str, dict[str | None, list[str]]] = {}
        """Name that clients use for a request or a generation → tenant → our ids of the generations."""
        self._marks: dict[str, tuple[DpRank, int]] = {}
        """Open questions to a scheduler whether it has taken all up to a mark, by the question's id."""
        self._asked: dict[str, asyncio.Future[messages.Reply]] = {}
        self._count = itertools.count()

    def open(
        self,
        requests: Sequence[messages.GenerateReq],
        name: str | None = None,
        on_close: Callable[[], None] | None = None,
        *,
        tenant: str | None = None,
        on_output: Callable[[int, messages.TextOut], None] | None = None,
        rank: int | None = None,
    ) -> InflightRequest:
        """Starts requests of one client, whose `rid` is the client's; `abort` takes these, and `name` for all. They
        take turns with other clients' (`gate`). `rank`: where to run them; None = where the fewest are in flight.

        The caller must `close` the result in any case; then `on_close` is called, but not if this raises. Raises
        ApiError: 400 if the tenant has one of the names in flight, 429 for too many generations.
        """
        at = self._least_busy() if rank is None else self.ranks[rank]
        inflight = self._register(requests, name, tenant, at)
        inflight.on_output, inflight.on_close = on_output, on_close
        for id, request in zip(inflight.ids, requests, strict=True):
            at.gate.put(inflight.client, id, request)
        self._pump(at)
        return inflight

    def _least_busy(self) -> DpRank:
        rank = min(self.ranks, key=lambda rank: (rank.running, rank.chosen_at))
        rank.chosen_at = next(self._count)
        return rank

    def _register(
        self, requests: Sequence[messages.GenerateReq], name: str | None, tenant: str | None, rank: DpRank
    ) -> InflightRequest:
        rids = [request.rid for request in requests]
        ids = [self._new_id(rid) for rid in rids]
        names: dict[tuple[str | None, str], list[str]] = {}
        for rid, id in zip(rids, ids, strict=True):
            if (tenant, rid) in names or tenant in self._named.get(rid, ()):
                raise _in_use(rid)
            names[tenant, rid] = [id]
        if name is not None:
            if tenant in self._named.get(name, ()):
                raise _in_use(name)
            names[tenant, name] = ids
        client = requests[0].client
        rank.gate.enter(client, len(ids))
        for (_, known), ids_of_it in names.items():
            self._named.setdefault(known, {})[tenant] = ids_of_it
        inflight = InflightRequest(self, ids, names, client, rank)
        self._running.update(inflight._generations)
        rank.running += len(ids)
        return inflight

    def _pump(self, rank: DpRank) -> None:
        while (found := rank.gate.take()) is not None:
            id, request = found
            self._metrics.requests.inc()
            rank.detokenizer.send(messages.DetokenizeInit.of(request, id))
            rank.scheduler.send(msgspec.structs.replace(request, rid=id))
            if (mark := rank.gate.mark()) is not None:
                question = self._new_id()
                self._marks[question] = rank, mark
                rank.scheduler.send(messages.HeardReq(question))
        (rank.all_sent.clear if len(rank.gate) else rank.all_sent.set)()

    def forget(self, inflight: InflightRequest) -> None:
        """Aborts the unfinished rest of an abandoned request. Idempotent."""
        if not inflight.names:
            return
        for tenant, name in inflight.names:
            tenants = self._named[name]
            del tenants[tenant]
            if not tenants:
                del self._named[name]
        inflight.names = []
        rank = inflight.rank
        rank.gate.leave(inflight.client, len(inflight.ids))
        running = [id for id in inflight.ids if self._take(id) is not None]
        self._metrics.aborted.inc(len(running))
        self._abort(rank, (id for id in running if not rank.gate.remove(inflight.client, id)))

    def _take(self, id: str) -> _Generation | None:
        """Removes a generation from those in flight, if it is."""
        generation = self._running.pop(id, None)
        if generation is not None:
            generation.inflight.rank.running -= 1
        return generation

    def _abort(self, rank: DpRank, ids: Iterable[str]) -> None:
        """Aborts generations that were sent to the scheduler."""
        if gone := list(ids):
            rank.scheduler.send(messages.AbortReq(gone))
        self._pump(rank)

    def _end_waiting(self, id: str, finish: messages.FinishReason) -> bool:
        """Ends a generation that was not sent yet. Returns whether it did."""
        inflight = self._running[id].inflight
        if not inflight.rank.gate.remove(inflight.client, id):
            return False
        self._end(id, finish)
        return True

    def _end(self, id: str, finish: messages.FinishReason) -> None:
        generation = self._take(id)
        assert generation is not None
        generation.inflight._deliver(generation, messages.TextOut(id, "", [], finish))

    def abort(self, name: str, *tenants: str | None) -> bool:
        """Ends requests of a name, in all tenants or in these, or all with "". Callers get the output so far: an
        `abort`. Returns whether there were any."""
        of_name = self._named.get(name, {})
        within = (ids for tenant, ids in of_name.items() if not tenants or tenant in tenants)
        named = itertools.chain.from_iterable(within) if name else self._running
        sent, running = dict[DpRank, list[str]](), [id for id in named if id in self._running]
        for id in running:
            if not self._end_waiting(id, ABORTED):
                sent.setdefault(self._running[id].inflight.rank, []).append(id)
        for rank in self.ranks:
            self._abort(rank, sent.get(rank, ()))
        return bool(running)

    def fail_all(self, finish: messages.FinishReason) -> int:
        """Ends everything in flight at once, without the scheduler; returns how many."""
        running = list(self._running)
        for id in running:
            if not self._end_waiting(id, finish):
                self._end(id, finish)
        for rank in self.ranks:
            self._pump(rank)
        for future in self._asked.values():
            if not future.done():
                future.set_exception(NoReply(finish.message or finish.type))
        return len(running)

    # ---- what comes back ------------------------------------------------------------------------------------

    def on_batch(self, batch: messages.BatchTextOut) -> None:
        now = time.monotonic()
        for out in batch.outs:
            generation = self._running.get(out.rid)
            if generation is None:
                continue  # its client has gone
            self._measure(generation, out, now)
            if out.finish is not None:
                self._take(out.rid)
            generation.inflight._deliver(generation, out)

    def on_reply(self, reply: messages.Reply) -> None:
        if (marked := self._marks.pop(reply.id, None)) is not None:
            rank, mark = marked
            rank.gate.taken(mark)
            self._pump(rank)
            return
        if (future := self._asked.get(reply.id)) is not None and not future.done():
            future.set_result(reply)

    def _measure(self, generation: _Generation, out: messages.TextOut, now: float) -> None:
        metrics, fresh = self._metrics, len(out.token_ids) - out.withdrawn
        if fresh > 0:
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
        if out.vector is not None:
            metrics.vectors.inc()
            metrics.prompt_tokens.inc(out.prompt_tokens)
            metrics.cached_tokens.inc(out.cached_tokens)
        if out.finish is not None:
            metrics.e2e_request_latency.observe(now - generation.started_at)
            metrics.retracted.inc(out.retractions)
            if generation.tokens > 1 and generation.first_at is not None:
                per_token = (generation.last_at - generation.first_at) / (generation.tokens - 1)
                metrics.time_per_output_token.observe(per_token)

    # ---- questions ------------------------------------------------------------------------------------------

    async def flush(self, rank: DpRank, timeout_s: float = 10.0) -> messages.Reply:
        id = self._new_id()
        return await self._ask(rank.scheduler, messages.FlushReq(id), id, timeout_s)

    async def ask(
        self, rank: DpRank, question: Callable[[str], messages.AdminReq], timeout_s: float = 60.0
    ) -> messages.Reply:
        """The scheduler's answer to what `question` makes, after all generations that wait here. Raises NoReply."""
        self._pump(rank)
        id = self._new_id()
        return await self._ask(rank.scheduler, question(id), id, timeout_s, rank.all_sent)

    async def state(self, rank: DpRank, what: str, timeout_s: float = 10.0) -> dict[str, Any]:
        """The scheduler's `radix` or `load`. Raises NoReply."""
        id = self._new_id()
        request = messages.StateReq(id, what)  # type: ignore[arg-type]
        return (await self._ask(rank.scheduler, request, id, timeout_s)).data or {}

    async def announced(self, rank: DpRank, after_updates: int, timeout_s: float = 10.0) -> dict[str, Any]:
        """Asks the publisher for the hashes announced after `after_updates` cache updates. Raises NoReply."""
        if rank.publisher is None:
            return {"seq": None, "hashes": []}
        id = self._new_id()
        return (await self._ask(rank.publisher, AnnouncedReq(id, after_updates), id, timeout_s)).data or {}

    async def _ask(
        self, sender: Outbox, request: msgspec.Struct, id: str, timeout_s: float, after: asyncio.Event | None = None
    ) -> messages.Reply:
        future: asyncio.Future[messages.Reply] = asyncio.get_running_loop().create_future()
        self._asked[id] = future
        try:
            async with asyncio.timeout(timeout_s):
                if after is not None:
                    await after.wait()
                sender.send(request)
                return await future
        except TimeoutError:
            raise NoReply(f"no answer within {timeout_s:g} s") from None
        finally:
            del self._asked[id]

    def _new_id(self, name: str = "q") -> str:
        return f"{name}#{next(self._count)}"
