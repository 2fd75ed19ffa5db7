"""A discrete-event model of one engine: queue, chunked prefill, decode in one batch, retraction, events, load. Pure.

Theory of operation. Time passes in *steps*. A step computes chunks of waiting prompts, at most `chunk_tokens` in all,
and one token of each running request. It ends at `ends_at`; requests that come meanwhile wait for the next. While no
request waits, all steps that only change lengths are taken at once (a *jump*): until a request is done, or memory ends.
A new request shortens a jump to the step it falls into, so jumps are never visible from outside. Memory is counted in
blocks, also of running requests: the length of a prompt decides which steps take a block for it, so a jump's need is a
sum over remainders and not a walk over requests.

Scheduling is that of our runtime, SGLang's and vLLM's with chunked prefill: first come, first served; a prompt whose
next block is being computed for another waits for it (our `kvcache/radix.py`, SGLang's in-batch prefix caching); a
prompt is admitted if it fits besides a share of the output that running requests may still write (`reserve`); if memory
ends all the same, the last admitted request goes back to the front of the queue (*retraction*), and its computed blocks
stay cached until evicted. The blocks of a prompt are cached when computed, those of an output when it is done.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from dataclasses import dataclass
from itertools import islice

from treeline_wire.load import TreelineLoad

from treeline_sim.model.cache import PagedCache
from treeline_sim.model.journal import Journal
from treeline_sim.model.measures import PrefillRate, shared_blocks
from treeline_sim.model.speed import LLAMA_8B_H200, Speed
from treeline_sim.model.text import Prompt
from treeline_sim.model.work import Happened, Phase, Work

FOREVER = float("inf")
_ALPHA = 0.2
"""Weight of a new measurement in the reported duration of a decode step."""
_ESTIMATED = 64
"""Waiting requests that a load report looks up again, as our runtime does: their shared prefixes are computed once, and
count once."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The size of an engine: `kv_tokens` of memory in blocks of `block_size`; `max_running` requests at once;
    `max_waiting` more are queued (None: any number). `mixed`: steps with prompts decode, too. `reserve`: the share of
    running requests' remaining output that admission keeps free. `max_steps` bounds a jump.
    """

    speed: Speed = LLAMA_8B_H200
    kv_tokens: int = 900_000
    block_size: int = 64
    chunk_tokens: int = 8192
    max_running: int = 256
    max_waiting: int | None = None
    mixed: bool = True
    reserve: float = 0.5
    max_steps: int = 1 << 30

    def __post_init__(self) -> None:
        if min(self.block_size, self.chunk_tokens, self.max_running, self.max_steps) < 1:
            raise ValueError("block size, chunk, running requests and steps of an engine are at least 1")
        if self.kv_tokens < 2 * self.block_size:
            raise ValueError(f"{self.kv_tokens} tokens of memory are not two blocks of {self.block_size}")


class Engine:
    """The model of one engine; see the module. Complexity: a step is O(prompts in it + requests that end); a request
    O(its blocks).
    """

    def __init__(self, config: EngineConfig, epoch: int = 1) -> None:
        self.config = config
        self.cache = PagedCache(config.block_size, config.kv_tokens // config.block_size)
        self.journal = Journal(config.block_size, epoch)
        self.ends_at = FOREVER
        """The end of the current step; `FOREVER` while idle."""
        self.retractions = 0
        self.computed_tokens = 0
        self.computed_prompts = 0
        self.output_tokens = 0
        self.gaps: Counter[int] = Counter()
        """Tokens of running requests, by the time since the one before, in units of 10 µs."""
        self._waiting: deque[Work] = deque()
        self._waiting_uncached = 0
        self._chunks: list[tuple[Work, int]] = []  # of the current step: requests and their tokens
        self._prefilling: Work | None = None  # the request whose prompt is longer than the step
        self._refused: list[Work] = []  # refused since the last step
        self._full = False  # the first waiting request did not fit, and no memory has been freed since
        self._running: dict[Work, None] = {}
        self._ends: list[tuple[int, int, Work]] = []
        self._pages_at = [0] * config.block_size  # by step modulo block size: requests that take a block then
        self._step = 0
        self._steps = 0  # in the current jump; 0: the step does not decode
        self._began = 0.0
        self._context = 0
        self._remaining = 0  # sum of the steps until each running request is done, counted from step 0
        self._count = 0
        self._seq = 0
        self._prefill_rate = PrefillRate()
        self._decode_s = 0.0
        self._stalled_s = 0.0  # since running requests last got a token, by steps without decodes

    # Calls from outside

    @property
    def waiting(self) -> int:
        """The number of requests that wait for their prefill."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """The number of requests that are being computed."""
        return len(self._running) + len(self._chunks)

    def submit(self, work: Work, now: float) -> bool:
        """Take a request; return False if the queue is full."""
        config = self.config
        if config.max_waiting is not None and len(self._waiting) >= config.max_waiting:
            return False
        work.target = work.prompt.tokens
        self._estimate(work)
        self._waiting.append(work)
        if self.ends_at == FOREVER:
            self._plan(now)
        elif self._steps > 1 and len(self._running) < config.max_running:
            self._steps = min(
                self._steps, self.config.speed.steps_in(len(self._running), self._context, now - self._began)
            )
            self.ends_at = self._began + self.config.speed.decode_s(len(self._running), self._context, self._steps)
        return True

    def advance(self, now: float) -> Happened:
        """End the current step, at `ends_at`, and plan the next; return its results."""
        assert now >= self.ends_at, (now, self.ends_at)
        happened = Happened()
        duration = self.ends_at - self._began
        if self._steps:
            self._decoded(duration, happened)
        if self._chunks:
            self._prefilled(duration, happened)
        self._plan(now)
        happened.refused, self._refused = self._refused, []
        happened.batch = self.journal.flush(now)
        return happened

    def written(self, work: Work) -> int:
        """Return how many tokens of its output are written."""
        return work.written + (self._step - work.began_step if work.phase is Phase.RUNNING else 0)

    def abort(self, work: Work) -> None:
        """Cancel a request, in any phase; if its prompt is being computed, it ends after that."""
        if work.phase is Phase.WAITING:
            self._waiting.remove(work)
            self._waiting_uncached -= work.uncached
            self._full = False
            work.phase = Phase.DONE
        elif work.phase is Phase.PREFILL:
            work.output_tokens = work.written + 1
        elif work.phase is Phase.RUNNING:
            self._finish(work)

    def hold(self, prompt: Prompt, most: int) -> None:
        """Put a prompt's first blocks into the cache, as many as have room, as if it had been served. The journal does
        not flush them.
        """
        cache, blocks = self.cache, prompt.blocks[:most]
        held = cache.matched(blocks)
        cache.use(blocks[:held])
        blocks = blocks[: held + cache.room]
        self.journal.removed(cache.take(len(blocks) - held))
        self.journal.stored(prompt, held, len(blocks), cache.name(blocks[held:]))
        cache.give(blocks)

    def load(self) -> TreelineLoad:
        """Return its load report."""
        cache, seq = self.cache, self._seq
        self._seq += 1
        before: dict[int, Prompt] = {}
        if self._prefilling is not None and self._prefilling.prompt.blocks:
            before[self._prefilling.prompt.blocks[0]] = self._prefilling.prompt
        for work in islice(self._waiting, _ESTIMATED):
            self._estimate(work, before)
        return TreelineLoad(
            epoch=self.journal.epoch,
            seq=seq,
            running=self.running,
            waiting=self.waiting,
            waiting_uncached_tokens=self.queued_tokens,
            pages_used=cache.private + cache.cached - cache.evictable,
            pages_total=cache.capacity,
            page_size=cache.block_size,
            prefill_tokens_per_s=self._prefill_rate.tokens_per_s,
            decode_step_ms=1000 * self._decode_s,
            in_flight=self.running + self.waiting,
            max_running=self.config.max_running,
            pages_cached=cache.evictable,
        )

    @property
    def queued_tokens(self) -> int:
        """The prompt tokens to compute before a new request, without those of the current step."""
        chunked = self._prefilling
        left = chunked.target - chunked.computed if chunked is not None else 0
        return self._waiting_uncached + left

    def ttft_s(self, prompt: Prompt, now: float) -> float:
        """Return when a new request would have its first token, by the engine's own state: exact except for the decodes
        of later requests. O(blocks of the prompt and of waiting requests).
        """
        speed, batch, begin = self.config.speed, len(self._running), self.step_left_s(now)
        computed: set[int] = set()
        queued = 0
        if self._chunks:
            for work, _ in self._chunks:
                computed.update(work.prompt.blocks)
            last, count = self._chunks[-1]
            queued = last.target - last.computed - count
        for work in self._waiting:
            queued += self._missing(work.prompt, computed)
            computed.update(work.prompt.blocks)
        own = self._missing(prompt, computed)
        steps = -(-(queued + own) // self.config.chunk_tokens)
        decoding = speed.step_s(batch, self._context) - speed.weights_s if self.config.mixed else speed.fixed_s
        attention = speed.attention_s * own * (2 * (prompt.tokens - own) + own)
        full = 0.0
        if batch and self.running + self.waiting >= self.config.max_running:
            full = max(0, self._ends[0][0] - self._step) * speed.step_s(batch, self._context)
        return begin + full + steps * decoding + speed.token_s * (queued + own) + attention

    def step_left_s(self, now: float) -> float:
        """Return the seconds until its current step ends, 0 while idle. O(1)."""
        if self._steps > 1:
            speed, batch, begun = self.config.speed, len(self._running), now - self._began
            return speed.decode_s(batch, self._context, speed.steps_in(batch, self._context, begun)) - begun
        return 0.0 if self.ends_at == FOREVER else max(0.0, self.ends_at - now)

    def missing_tokens(self, prompt: Prompt) -> int:
        """Return the tokens of a prompt that are neither cached nor about to be computed for others."""
        coming: set[int] = set()
        for work in (*(work for work, _ in self._chunks), *self._waiting):
            coming.update(work.prompt.blocks)
        return self._missing(prompt, coming)

    def _missing(self, prompt: Prompt, others: set[int]) -> int:
        """Return the tokens of a prompt that neither the cache nor these blocks have; at least one."""
        held, found = self.cache, 0
        for block in prompt.blocks:
            if block not in held and block not in others:
                break
            found += 1
        return max(1, prompt.tokens - found * self.config.block_size)

    # The end of a step

    def _decoded(self, duration: float, happened: Happened) -> None:
        batch, steps = len(self._running), self._steps
        self._allocate(self._pages(steps))
        self._step += steps
        self._context += batch * steps
        self.output_tokens += batch * steps
        self.gaps[round(1e5 * (self._stalled_s + duration) / steps)] += batch * steps
        self._stalled_s = 0.0
        if not self._chunks:
            each = duration / steps
            self._decode_s = each if not self._decode_s else self._decode_s + _ALPHA * (each - self._decode_s)
        while self._ends and self._ends[0][0] <= self._step:
            work = heapq.heappop(self._ends)[2]
            if work in self._running and work.ends_step <= self._step:
                self._finish(work)
                happened.done.append(work)

    def _prefilled(self, duration: float, happened: Happened) -> None:
        tokens = sum(count for _, count in self._chunks)
        self.computed_tokens += tokens
        if not self._steps and self._running:
            self._stalled_s += duration
        self._prefill_rate.add(tokens, duration)
        chunks, self._chunks, self._full = self._chunks, [], False
        for work, count in chunks:
            work.computed += count
            self._name(work, work.prompt if work.written == 0 else work.whole, work.computed)
            if work.computed < work.target:
                continue
            if work is self._prefilling:
                self._prefilling = None
            if not work.written:
                happened.first.append(work)
            work.written += 1
            self.computed_prompts += 1
            self.output_tokens += 1
            self._run(work)
            if work.written >= work.output_tokens:
                self._finish(work)
                happened.done.append(work)

    def _name(self, work: Work, text: Prompt, tokens: int) -> None:
        last = min(tokens // self.config.block_size, len(text.blocks))
        if last > work.named:
            first, work.named = work.named, last
            new = self.cache.name(text.blocks[first:last])
            if new:
                self.journal.stored(text, first, last, new)

    # Running requests

    def _run(self, work: Work) -> None:
        """Begin to decode, since the prompt is computed: each step computes the last token and writes one more."""
        size = self.config.block_size
        work.phase, work.began_step = Phase.RUNNING, self._step
        work.ends_step = self._step + work.output_tokens - work.written
        self._running[work] = None
        self._context += work.computed + 1
        self._pages_at[(self._step + 1 - work.computed) % size] += 1
        self._count += 1
        heapq.heappush(self._ends, (work.ends_step, self._count, work))
        self._remaining += work.ends_step

    def _leave(self, work: Work) -> int:
        """Stop running; return its computed tokens."""
        size = self.config.block_size
        steps = self._step - work.began_step
        del self._running[work]
        self._context -= work.computed + 1 + steps
        self._pages_at[(work.began_step + 1 - work.computed) % size] -= 1
        self._remaining -= work.ends_step
        self._full = False
        work.written += steps
        return work.computed + steps

    def _pages(self, steps: int) -> int:
        """Return the blocks that the running requests take in the next steps. O(block size)."""
        size, at = self.config.block_size, self._pages_at
        rounds, rest = divmod(steps, size)
        step = self._step + 1
        return rounds * len(self._running) + sum(at[(step + i) % size] for i in range(rest))

    def _finish(self, work: Work) -> None:
        tokens = self._leave(work)
        work.phase = Phase.DONE
        blocks = -(-tokens // self.config.block_size)
        self._name(work, work.whole, tokens)
        self.cache.give(work.whole.blocks[: work.named], blocks - work.named)

    def _retract(self) -> None:
        """Retract the request that was admitted last: it releases its memory."""
        work = next(reversed(self._running))
        tokens = self._leave(work)
        self._name(work, work.whole, tokens)
        blocks = -(-tokens // self.config.block_size)
        self.cache.give(work.whole.blocks[: work.named], blocks - work.named)
        work.phase, work.computed, work.named, work.target = Phase.WAITING, 0, 0, tokens + 1
        self._waiting.appendleft(work)
        self._estimate(work)
        self.retractions += 1

    def _allocate(self, blocks: int) -> None:
        if blocks:
            self.journal.removed(self.cache.take(blocks))

    # The next step

    def _plan(self, now: float) -> None:
        self._began = now
        while self._running and self._pages(1) > self.cache.room:
            self._retract()
        pairs = self._admit()
        batch = len(self._running)
        prefill = sum(count for _, count in self._chunks)
        if prefill:
            decodes = self.config.mixed and batch
            self._steps = 1 if decodes else 0
            at = (batch, self._context) if decodes else (0, 0)
            self.ends_at = now + self.config.speed.step_s(*at, prefill, pairs)
        elif batch:
            self._steps = self._jump()
            self.ends_at = now + self.config.speed.decode_s(batch, self._context, self._steps)
        else:
            self._steps, self.ends_at = 0, now if self._refused else FOREVER  # the caller must get its answer

    def _jump(self) -> int:
        """Return the steps until a request is done, or until memory ends."""
        while self._ends[0][2].phase is not Phase.RUNNING or self._ends[0][2].ends_step != self._ends[0][0]:
            heapq.heappop(self._ends)  # was retracted meanwhile
        most = min(self._ends[0][0] - self._step, self.config.max_steps)
        room = self.cache.room
        if self._pages(most) <= room:
            return most
        low, high = 1, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._pages(middle) <= room else (low, middle)
        return low

    def _admit(self) -> int:
        """Choose the prompts of the next step; return their pairs of tokens."""
        config = self.config
        left, pairs = config.chunk_tokens, 0
        if config.mixed:
            left = max(config.block_size, left - len(self._running))
        computing: set[int] = set()
        kept = self._kept()
        if self._prefilling is not None:
            work = self._prefilling
            count = min(left, work.target - work.computed)
            pairs += self._chunk(work, count, computing)
            left -= count
        passed: list[Work] = []
        while (
            self._waiting
            and not self._full
            and left > 0
            and len(self._running) + len(self._chunks) < config.max_running
        ):
            work = self._waiting[0]
            text = work.whole if work.written else work.prompt
            matched = min(self.cache.matched(text.blocks), (work.target - 1) // config.block_size)
            if matched < len(text.blocks) and text.blocks[matched] in computing:
                passed.append(self._waiting.popleft())
                continue
            if not self._fits(work, text, matched, kept):
                if not self._running and not self._chunks and self._prefilling is None:
                    self._next()  # too long even alone
                    work.phase = Phase.DONE
                    self._refused.append(work)
                    continue
                self._full = True
                break
            self._begin(self._next(), text, matched)
            count = min(left, work.target - work.computed)
            if count < work.target - work.computed:
                self._prefilling = work
            pairs += self._chunk(work, count, computing)
            left -= count
            kept += int(config.reserve * max(0, work.output_tokens - work.written)) // config.block_size
        self._waiting.extendleft(reversed(passed))
        return pairs

    def _next(self) -> Work:
        work = self._waiting.popleft()
        self._waiting_uncached -= work.uncached
        work.uncached = 0
        return work

    def _kept(self) -> int:
        """Return the blocks that admission keeps free for the rest of running requests' outputs."""
        left = self._remaining - self._step * len(self._running)
        return int(self.config.reserve * left) // self.config.block_size + self._pages(1)

    def _fits(self, work: Work, text: Prompt, matched: int, kept: int) -> bool:
        size = self.config.block_size
        wanted = -(-work.target // size) - matched + 1
        alone = not self._running and not self._chunks
        return wanted + self.cache.unused(text.blocks[:matched]) + (0 if alone else kept) <= self.cache.room

    def _begin(self, work: Work, text: Prompt, matched: int) -> None:
        size = self.config.block_size
        self.cache.use(text.blocks[:matched])
        self._allocate(-(-work.target // size) - matched)
        work.phase = Phase.PREFILL
        work.named, work.computed = matched, matched * size
        if work.cached_tokens is None:
            work.cached_tokens = work.computed

    def _chunk(self, work: Work, count: int, computing: set[int]) -> int:
        size = self.config.block_size
        text = work.whole if work.written else work.prompt
        self._chunks.append((work, count))
        computing.update(text.blocks[work.named : -(-work.target // size)])
        return 2 * count * work.computed + count * count

    def _estimate(self, work: Work, before: dict[int, Prompt] | None = None) -> None:
        """Estimate the uncached tokens of a waiting request. `before`: by their first blocks, the last prompts that
        will be computed before it.
        """
        text = work.whole if work.written else work.prompt
        known, size = work.uncached, self.config.block_size
        last = (work.target - 1) // size
        found = min(self.cache.matched(text.blocks), last)
        if before is not None and text.blocks:
            other = before.get(text.blocks[0])
            if other is not None:
                found = max(found, min(shared_blocks(other, text), last))
            before[text.blocks[0]] = text
        work.uncached = work.target - found * size
        self._waiting_uncached += work.uncached - known

    def check(self) -> None:
        """Assert the invariants."""
        self.cache.check()
        assert self._context == sum(w.computed + 1 + self._step - w.began_step for w in self._running)
        assert sum(self._pages_at) == len(self._running)
        assert self._waiting_uncached == sum(work.uncached for work in self._waiting)
        size = self.config.block_size
        held = sum(-(-(w.computed + self._step - w.began_step) // size) - w.named for w in self._running)
        held += sum(-(-work.target // size) - work.named for work, _ in self._chunks)
        assert held == self.cache.private, (held, self.cache.private)
