"""The scheduler: one loop that admits, chooses a batch, launches it, and processes results.

`launch` returns before results are read, and up to `overlap_depth` launched batches stay unprocessed while the next is
chosen: one on CUDA, none on a CPU. What makes depth 1 safe:

- a request counts the launched batches that hold it (`in_flight`); whatever ends it queues its final message at once,
  but pages, row and lock are released only when that count is zero;
- a batch that still holds a finished request computes for it too, and the result is dropped;
- rows with a constraint or a logit processor are launched with the rest, and sampled once all earlier results are
  processed (`_sample_delayed`), before the next launch;
- if a step gives a request several tokens or none, or a grammar forces text (`jumps`), results of the batch launched
  meanwhile are discarded from there on (`Req.overtaken`);
- memory is taken back from running requests (retraction) only when nothing is in flight.

A `Transport` carries messages; a `Reporter` collects a step's output and sends it at the end.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from treeline_runtime.config import SchedulerConfig
from treeline_runtime.core import Batch, Phase, Req
from treeline_runtime.messages import (
    AbortReq,
    DrainReq,
    FinishReason,
    GenerateReq,
    HeardReq,
    Reply,
    StateReq,
    StopReq,
    TokenOut,
    ToScheduler,
)
from treeline_runtime.models.decoder import Decoder
from treeline_runtime.published import LoadUpdate
from treeline_runtime.scheduler.adapters import Adapters
from treeline_runtime.scheduler.administration import AWAKE, Administration, Profiler, Residence
from treeline_runtime.scheduler.arrivals import Arrivals
from treeline_runtime.scheduler.audit import CacheAudits, limit_for
from treeline_runtime.scheduler.cache import CacheManager
from treeline_runtime.scheduler.decode import DecodeManager, NewTokenRatio, retraction_order
from treeline_runtime.scheduler.drafting import speculation
from treeline_runtime.scheduler.executor import Executor
from treeline_runtime.scheduler.grammars import Grammars, Jumps
from treeline_runtime.scheduler.launched import Launched, Sampled
from treeline_runtime.scheduler.peers import Peers
from treeline_runtime.scheduler.prefill import PrefillManager
from treeline_runtime.scheduler.processors import NO_PROCESSORS, Processors, choices_of
from treeline_runtime.scheduler.ranks.group import Followers
from treeline_runtime.scheduler.reports import Reporter, SchedulerStats, Transport, token_out
from treeline_runtime.scheduler.resolve import resolve
from treeline_runtime.scheduler.table import TableManager, plan_of
from treeline_runtime.scheduler.tiers import open_tiers
from treeline_runtime.scheduler.waiting import TimeLimits

logger = logging.getLogger(__name__)


class Scheduler:
    """Runs requests on one model. Every accepted rid ends in exactly one TokenOut with `finish`."""

    def __init__(
        self,
        config: SchedulerConfig,
        model: Decoder,
        transport: Transport,
        *,
        clock: Callable[[], float] = time.monotonic,
        processors: Processors = NO_PROCESSORS,
        group: Followers | None = None,
        peers: Peers | None = None,
    ) -> None:
        """clock: seconds, for waiting times. group: the other ranks that compute the model. peers: those that share its
        experts, and take every step together."""
        self.config = config
        limits = self.limits = resolve(config, model, group)
        self.table = TableManager(limits.max_running_requests, limits.context_length, config.page_size)
        self.cache = CacheManager(config, limits.num_pages, self.table, takes_items=model.media is not None)
        self.prefill = PrefillManager(config, limits, self.cache, clock, lambda one: self.executor.has_embeddings(one))
        self.stats = stats = SchedulerStats()
        # with a launch under way, the first forced token is as late as if it were sampled
        least_gain = 1 + limits.overlap_depth if config.jump_forward else None
        self._jumps = Jumps(lambda: self.grammars.jump_forward, self.table, self.stats, least_gain)
        self._speculation = speculation(config, self.stats, self._jumps, overlaps=limits.overlap_depth > 0)
        self.decode = DecodeManager(self.cache, limits.chunked_prefill_size, self._speculation)
        self.residence = Residence(config, limits, model, group, peers)
        chunk, limit = limits.chunked_prefill_size, limit_for(config, model.config, limits)
        self.audits = CacheAudits(config, limit, chunk, self.cache, self._compute)
        self.ratio = NewTokenRatio(config.schedule_conservativeness)
        self._clock = clock
        self._time_limits = TimeLimits(config.waiting_timeout, config.request_timeout)
        self.draining = False
        self._pooler = model.pooler
        self.grammars = Grammars(config, model.config, transport.wake, used=model.pooler is None)
        self._arrivals = Arrivals(config, limits.longest_request, model, processors)
        self._pending: deque[tuple[Batch, Launched, float]] = deque()
        self._leaving: dict[Req, bool] = {}  # finished, but in flight → whether its pages may be cached
        self._processed_at, self._prefills_in_a_row = 0.0, 0
        self._transport, self._group, self._peers = transport, group, peers
        self.reporter = Reporter(transport, self.cache)
        self.profiler = Profiler(limits.device)
        parts = self.residence, self.cache, self.audits, self.profiler, self._speculation
        administration = Administration(*parts, is_idle=lambda: self.is_idle, reply=self.reporter.reply)
        around = *parts[:3], self._everything, self._finish, self.reporter.reply, transport.wake
        self.adapters = Adapters(config, limits.adapter_bytes, *around)
        self._handlers: dict[type, Callable[[Any], None]] = {
            GenerateReq: self._on_generate,
            AbortReq: self._on_abort,
            StopReq: self._on_stop,
            HeardReq: lambda message: self.reporter.reply(Reply(message.id)),
            StateReq: self.reporter.ask,
            DrainReq: self._on_drain,
            **administration.handlers,
            **self.adapters.handlers,
        }
        # at last: what fails before has nothing to give back
        self.cache.tiers = open_tiers(config, limits, self.cache, self.residence, stats, transport.wake, clock, group)

    @property
    def executor(self) -> Executor:
        return self.residence.executor

    def close(self) -> None:
        self.grammars.close()
        self.adapters.close()
        if self.cache.tiers is not None:
            self.cache.tiers.close()
        if self._group is not None:
            self._group.close()

    # ---- the loop -----------------------------------------------------------------------------------------

    def run_forever(self, stop: Callable[[], bool]) -> None:
        while not stop():
            if not self.step():
                self.reporter.catch_up()
                self._transport.wait()

    def step(self) -> bool:
        """One turn of the loop. Returns whether anything was done; False means that only a message can change that."""
        messages = (self._peers or self._transport).receive()
        for message in messages:
            self._handle(message)
        copied = self.cache.tiers is not None and self.cache.tiers.take()
        loaded = self.adapters.max_loras and self.adapters.step()
        ready = self.grammars.take_ready()
        for req, refused in ready:
            if (finish := refused or self._find_place(req) or self._jumps.after(req)) is not None:
                self._finish(req, finish)
            else:
                self.prefill.queue(req)
        for req, finish in self._time_limits.exceeded(self._clock()):
            self._finish(req, finish)
        if self.audits.req is not None and not self.is_idle:
            self.audits.pause()
        if waited := self._speculation is not None and self._speculation.waits(self.decode.runnable()):
            self._process_all_but(0)
        batch = self._next_batch()
        if batch is not None:
            self._launch(batch)
            self._sample_delayed()
            self.profiler.step()
        is_called = batch is None and self._peers is not None and self._peers.is_called
        if is_called:
            self.executor.idle()
        worked = any((messages, copied, loaded, ready, waited, self._pending, is_called)) or self.reporter.has_tokens
        self._process_all_but(self.limits.overlap_depth if batch is not None else 0)
        if not worked and self.is_idle and (self.cache.tiers is None or not self.cache.tiers.is_copying):
            worked = self.audits.step()
        if worked:
            self._end_step()
        return worked

    def _handle(self, message: ToScheduler) -> None:
        try:
            self._handlers[type(message)](message)
        except Exception as error:
            logger.exception("a %s failed", type(message).__name__)
            if isinstance(message, GenerateReq) and self._find(message.rid) is None:
                finish = FinishReason("error", message=f"internal error: {error!r}", status=500)
                self.reporter.tell(TokenOut(message.rid, [], finish))

    def _next_batch(self) -> Batch | None:
        """Prefill first; but a decode step comes after every few prefills, or is part of each (`mixed_chunk`)."""
        config, runnable = self.config, self.decode.runnable()
        short = self.decode.missing_pages(runnable) > self.cache.available_pages
        riding = self.decode.next_batch(runnable) if config.mixed_chunk and runnable and not short else None
        may_wait = not config.mixed_chunk and self._prefills_in_a_row < config.prefills_in_a_row
        if riding is not None or may_wait or not runnable:
            batch = self.prefill.next_batch(
                self.decode.running.values(),
                self.table.num_free,
                self.ratio.value,
                riding=riding.num_tokens if riding is not None else 0,
            )
            if batch is not None:
                self._prefills_in_a_row += 1
                if riding is not None:
                    self.ratio.on_decode()
                    batch.take_along(riding)
                return batch
        if short:
            if self._pending or (self.cache.tiers is not None and self.cache.tiers.is_expecting):
                return None  # results in flight may end requests; retract only when all are known
            runnable = self._make_room(runnable)
        if not runnable:
            return None
        self._prefills_in_a_row = 0
        self.ratio.on_decode()
        return riding if riding is not None else self.decode.next_batch(runnable)

    def _launch(self, batch: Batch) -> None:
        """Launches; if that fails, launches each request alone, so that only the faulty one ends."""
        started = time.perf_counter()
        try:
            self._pending.append((batch, self._compute(batch), started))
        except Exception as error:
            logger.exception("a batch of %d requests failed", len(batch.reqs))
            if len(batch.reqs) == 1:
                self._fail(batch.reqs[0], f"internal error: {error!r}")
                return
            for one in batch.apart():
                # sampling the one before takes results, with which this one may end, or jump
                req, outdated = one.reqs[0], one.samples[0] and one.ends[0] < len(one.reqs[0].tokens)
                if req.finish is None and not outdated:
                    self._launch(one)
                    self._sample_delayed()
            return
        for req, end, samples in zip(batch.reqs, batch.ends, batch.samples, strict=True):
            req.in_flight += 1
            req.device_len = end
            req.launched_tokens += samples and 1 + len(req.draft)
            if samples or end == len(req.tokens):
                self.decode.running[req.rid] = req

    def _compute(self, batch: Batch) -> Launched:
        chain = 0 if self._speculation is None else self._speculation.wanted(batch.reqs)
        plan = plan_of(batch, self.table.news(), self.cache.slots.news, pools=self._pooler is not None, chain=chain)
        if self.config.cache_audit:
            plan.logprobs.update(self.audits.watched(batch))
        launched = self.executor.launch(plan)
        self.cache.told()  # only now: a failed launch gets the same writes again
        return launched

    def _sample_delayed(self) -> None:
        """Samples the newest batch's rows with a constraint or processor, whose earlier tokens are now known."""
        if self._pending and self._pending[-1][1].delayed is not None:
            self._process_all_but(1)
            batch, launched, _ = self._pending[0]
            try:
                self.executor.sample_delayed(launched, choices_of(batch, self.executor.fill_masks))
            except Exception as error:  # a device in trouble
                launched.delayed, launched.error = None, error

    def _process_all_but(self, count: int) -> None:
        while len(self._pending) > count:
            self._process(*self._pending.popleft())

    def _process(self, batch: Batch, launched: Launched, started: float) -> None:
        if batch.phase is Phase.PREFILL and self.cache.tiers is not None:
            self.cache.tiers.take_until(launched)
        try:
            results = launched.result()
        except Exception as error:
            logger.exception("processing a batch of %d requests failed", len(batch.reqs))
            results = [Sampled(failed=f"internal error: {error!r}") for _ in batch.reqs]
        now = time.perf_counter()
        seconds = now - max(started, self._processed_at)  # a step launched behind another begins when that one ends
        self._processed_at = now
        if batch.phase is Phase.PREFILL:
            self.stats.on_prefill(batch.prompt_tokens, seconds, launched.encoded)
        else:
            self.stats.on_decode(sum(batch.ends) - sum(batch.starts), results, seconds)
        for i, (req, end, result) in enumerate(zip(batch.reqs, batch.ends, results, strict=True)):
            req.in_flight -= 1
            if req.deferred:
                self.cache.batch_done(req)
            if req.finish is not None:
                self._leaving[req] &= result.failed is None
                self._release_if_idle(req)
            elif result.failed is not None:
                self._fail(req, result.failed)
            else:
                try:
                    self._advance(req, end, batch.phase_of(i), result, samples=batch.samples[i])
                except Exception as error:
                    logger.exception("a result could not be applied: %r", req)
                    self._fail(req, f"internal error: {error!r}")

    def _advance(self, req: Req, end: int, phase: Phase, result: Sampled, *, samples: bool) -> None:
        """Applies a step's result: the request is computed up to `end`, and gets tokens or a jump."""
        if req.overtaken >= 0:
            req.kv_len, req.overtaken = min(end, req.overtaken), -1
            return
        end -= result.wrong
        req.kv_len = end
        if result.hidden_states is not None:
            req.take_hidden(result.hidden_states, end)
        if phase is Phase.PREFILL:
            self.cache.cache_unfinished(req)
            if req.wants_input_logprobs:
                req.input_logprobs += result.input_logprobs
                req.input_top_logprobs += result.input_top_logprobs
            if result.pooled is not None:
                req.pooled = result.pooled if req.pooled is None else req.pooled + result.pooled
            if not result.tokens:
                if req.kv_len == len(req.tokens):  # nothing to produce: max_new_tokens is 0
                    if self._pooler is not None:
                        req.vector = self._pooler.finish(req.pooled, len(req.tokens))
                    self._finish(req, FinishReason("length"))
                return
        if not samples:  # not yet all of a long jump
            return
        if self.config.cache_audit:
            self.audits.take(req, end, result)
        finish = req.take_tokens(result.tokens)
        if result.wrong or len(req.tokens) != end + 1:
            # tokens that were not accepted are computed again; accepted ones beyond `end` are computed like a jump
            req.roll_back(min(end, len(req.tokens) - 1))
            self.table.write_tokens(req.row, req.kv_len, req.tokens[req.kv_len :])
        finish = finish or self._jumps.after(req)
        if self._speculation is not None:
            self._speculation.learn(req, result.tokens, result.guesses)
        if finish is not None:
            self._finish(req, finish, result)
        else:
            self.reporter.tell(token_out(req, result))

    # ---- memory -------------------------------------------------------------------------------------------

    def _make_room(self, runnable: list[Req]) -> list[Req]:
        """Retracts requests until the others can decode; returns these."""
        order = retraction_order(list(self.decode.running.values()))
        retracted = 0
        while self.decode.missing_pages(runnable) > self.cache.available_pages:
            if len(order) > 1:
                victim = order.pop(0)
            elif self.prefill.chunked is not None:
                victim = self.prefill.chunked
            else:
                last = order.pop()
                why = f"out of memory: the KV cache cannot hold more than {len(last.tokens)} tokens of this request"
                self._finish(last, FinishReason("abort", message=why, status=500))
                return []
            self._retract(victim)
            retracted += 1
            runnable = [req for req in runnable if req is not victim]
        self.ratio.on_retract(self.decode.running.values())
        logger.info("retracted %d requests, new token ratio %.2f", retracted, self.ratio.value)
        return runnable

    def _retract(self, req: Req) -> None:
        """Releases it without caching, and puts it at the front of the queue."""
        self.decode.running.pop(req.rid, None)
        self.prefill.leave(req)
        self.cache.release(req, insert=False)
        req.launched_tokens = req.output_len
        req.input_logprobs.clear()
        req.input_top_logprobs.clear()
        req.pooled = None
        req.retractions += 1
        self.prefill.requeue(req)

    # ---- endings ------------------------------------------------------------------------------------------

    def _finish(self, req: Req, finish: FinishReason, result: Sampled | None = None, *, trusted: bool = True) -> None:
        """Ends an admitted or waiting request: the final message now, resources when no batch holds them.

        `trusted`: its results may stay cached; otherwise its pages are zeroed.
        """
        assert req.finish is None, f"ended twice: {req}"
        req.finish = finish
        self.prefill.leave(req)
        self.grammars.leave(req)
        self.decode.running.pop(req.rid, None)
        self._time_limits.end(req)
        self.cache.end_filling(req)
        self.reporter.tell(token_out(req, result))
        if self._speculation is not None and trusted:
            self._speculation.end(req)
        if req.row >= 0:
            self._leaving[req] = trusted
            self._release_if_idle(req)

    def _release_if_idle(self, req: Req) -> None:
        if req.in_flight > 0:
            return
        trusted = self._leaving.pop(req)
        freed = self.cache.release(req, insert=trusted)
        if not trusted:
            try:
                self.executor.clear(freed)
            except Exception:  # a device in trouble; attention does not rely on clean pages
                logger.exception("could not zero %d pages", len(freed))

    def _fail(self, req: Req, message: str) -> None:
        """Ends `req` after a fault of its grammar or ours; its results are not trusted."""
        if req.finish is None:
            self._finish(req, self.grammars.fault(req, message), trusted=False)

    # ---- messages -----------------------------------------------------------------------------------------

    def _on_generate(self, message: GenerateReq) -> None:
        if self._find(message.rid) is not None:
            # a reply would end the request that owns the name
            logger.error("request id %r is in use; dropped the second request", message.rid)
            return
        req = self._admit(message)
        if isinstance(req, FinishReason):
            self.reporter.tell(TokenOut(message.rid, [], req, prompt_tokens=len(message.input_ids)))
            return
        if not self.grammars.enter(req):
            self.prefill.queue(req)
        self._time_limits.begin(req, self._clock())

    def _admit(self, message: GenerateReq) -> Req | FinishReason:
        if self.residence.level != AWAKE:
            return FinishReason("error", message="the engine is asleep", status=503)
        req = self._arrivals.new_req(message)
        return req if isinstance(req, FinishReason) else self.adapters.refused(req) or self._find_place(req) or req

    def _find_place(self, req: Req) -> FinishReason | None:
        """Returns a 503 if the queue is full and no request gives way."""
        most, ahead = self.config.max_queued_requests, self.grammars.ahead(req)
        # requests that find a free row in this step do not really wait
        if most is None or len(self.prefill.waiting) + ahead < most + self.table.num_free:
            return None
        full = FinishReason("error", message=f"the queue is full: {most} requests wait", status=503)
        replaced = self.prefill.replaced_by(req, self.decode.running.values(), ahead)
        if replaced is None:
            return full
        self._finish(replaced, full)
        return None

    def _find(self, rid: str) -> Req | None:
        return self.decode.running.get(rid) or self.prefill.find(rid) or self.grammars.find(rid)

    def _everything(self) -> list[Req]:
        return list(dict.fromkeys((*self.decode.running.values(), *self.prefill.reqs(), *self.grammars.reqs())))

    def _on_abort(self, message: AbortReq) -> None:
        rids = [message.rid] if isinstance(message.rid, str) else message.rid
        for req in map(self._find, rids) if message.rid else self._everything():
            if req is not None:
                self._finish(req, FinishReason("abort", message="aborted"))
        if not message.rid:
            self.audits.drop()

    def _on_stop(self, message: StopReq) -> None:
        req = self._find(message.rid)
        if req is not None:
            self._finish(req, FinishReason("stop", matched=message.matched))

    def _on_drain(self, _: DrainReq) -> None:
        self.draining = True
        self.audits.drain()

    # ---- reports ------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        waiting = self.prefill.waiting or self.grammars.waiting or self.prefill.chunked
        return not (self.decode.running or waiting or self._pending or self._leaving)

    def load(self) -> LoadUpdate:
        return LoadUpdate(
            running=len(self.decode.running) + (self.prefill.chunked is not None),
            waiting=len(self.prefill.waiting) + len(self.grammars.waiting),
            waiting_uncached_tokens=self.prefill.uncached_tokens(),
            draining=self.draining,
            max_running=self.limits.max_running_requests,
            asleep=self.residence.level,
            audits=self.audits.counts,
            **(self.adapters.load_fields() if self.adapters.max_loras else {}),
            **self.stats.load_fields(),
            **self.cache.load_fields(self.audits.held_pages),
        )

    def _end_step(self) -> None:
        self.reporter.flush(self.load())
        if self.is_idle:
            self.ratio.on_idle()
            if not self.cache.is_balanced(self.audits.held_pages):
                free, cached, all = self.cache.pool.num_free, self.cache.tree.num_pages, self.cache.pool.num_pages
                logger.error("pages are lost: %d free, %d cached of %d", free, cached, all)

    def check_integrity(self) -> None:
        """Asserts that every page, row and lock has an owner."""
        reqs = [req for req in self._everything() if req.row >= 0] + list(self._leaving)
        assert len(set(reqs)) == len(reqs)
        reqs += [] if self.audits.req is None else [self.audits.req]
        self.cache.check_integrity(reqs)
        self.prefill.check_integrity()
