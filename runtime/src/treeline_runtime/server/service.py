"""The work of all generating endpoints: admit the request, start it, turn outputs into an answer or error."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from msgspec import UNSET
from starlette.responses import Response
from treeline_wire import headers as wire_headers
from treeline_wire.chat import NeedsWorkerError
from treeline_wire.json_values import MAX_SLOW, slow_numbers

from treeline_runtime.media.sources import MediaRules
from treeline_runtime.messages import FinishReason, TextOut
from treeline_runtime.models.pooling import Pooling, Task
from treeline_runtime.published import LoadUpdate
from treeline_runtime.server import answers, errors
from treeline_runtime.server.errors import RETRY, ApiError, Header, rate_limited
from treeline_runtime.server.formats import NO_FORMATS, Formats
from treeline_runtime.server.http import DONE, Answer, ApiRequest, EventStream, error_event, in_pieces
from treeline_runtime.server.jobs import Caller, Generations, Kind, size_of
from treeline_runtime.server.jobs import Task as Read
from treeline_runtime.server.limits import (
    GENERATION_BYTES,
    INLINE_BYTES,
    ByteBudget,
    Limits,
    Reservation,
)
from treeline_runtime.server.metrics import Metrics
from treeline_runtime.server.pacing import Pacer
from treeline_runtime.server.prompts import Prompts
from treeline_runtime.server.reader import Reader
from treeline_runtime.server.reader_pool import ReaderPool
from treeline_runtime.server.sampling import SamplingDefaults
from treeline_runtime.tokenizer_manager import (
    InflightRequest,
    TokenizerManager,
    merge,
)

if TYPE_CHECKING:
    from treeline_runtime.media.reading import MediaReader
    from treeline_runtime.server.tracing import Tracing

WEIGHTS_DIFFER = "The ranks have different weights: repeat /update_weights"
BROKEN = ApiError(500, "The server failed to answer; its log says why")
OURSELVES = ""
"""The client of our own requests, which do not wait behind unnamed clients."""
_DOES: Mapping[Task, tuple[str, str]] = {
    "generate": ("makes text", "/v1/chat/completions or /v1/completions"),
    "embed": ("makes embeddings", "/v1/embeddings"),
    "score": ("scores documents", "/v1/rerank or /v1/score"),
    "reward": ("judges texts", "/classify or /pooling"),
}
"""Tasks, and the paths for each."""

logger = logging.getLogger(__name__)


@dataclass
class State:
    """The server's state."""

    ready: bool = False
    draining: bool = False
    """SIGTERM came: /ready is 503; requests are accepted during --pre-stop."""
    refusing: bool = False
    """New generations get 503."""
    failure: str | None = None
    """Why the server is about to exit."""
    heartbeat_at: dict[str, float] = field(default_factory=dict)
    """Child → time of its last heartbeat, in monotonic seconds. Empty until all are ready."""
    heartbeats: int = 0
    loads: list[LoadUpdate] = field(default_factory=lambda: [LoadUpdate()])
    """By data-parallel rank."""
    problem: str | None = None
    """Why requests do not work (`health`); None if they do, as far as known."""
    failing_since: float = 0.0
    """Time at which a problem was first found, in monotonic seconds."""
    sleeping: dict[int, int] = field(default_factory=dict)
    """Sleep levels of the data-parallel ranks that sleep: all or none, unless an operation failed."""
    operation: str | None = None
    """The running administration operation."""
    pausing: bool = False
    """New generations get 503 because of it."""
    _resumed: asyncio.Event = field(default_factory=asyncio.Event, init=False, repr=False)
    """Follows `holding`, and must be defined before it."""
    holding: bool = False
    """New generations wait for its end: new weights are being loaded."""
    unheard: bool = False
    """The scheduler is busy; missing heartbeats are no failure."""
    adapters: dict[str, str] = field(default_factory=dict)
    """Of LoRA: name → digest, "" while it is being unloaded; replaced as a whole."""
    model_path: str | None = None
    """The directory of the served weights, if they have changed since the start."""
    weight_version: str = "default"
    weights_differ: bool = False
    """An update succeeded at some data-parallel ranks only."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "holding":
            (self._resumed.clear if value else self._resumed.set)()

    @property
    def asleep(self) -> int:
        """Sleep level; 0 = awake. Requests need all ranks awake."""
        return max(self.sleeping.values(), default=0)

    @property
    def cache_sources_off(self) -> list[str]:
        """Sources of cached tokens that are not used at some rank, because an audit found wrong ones."""
        return sorted({source for load in self.loads for source, counts in load.audits.items() if counts.off})

    async def resumed(self) -> None:
        """Waits while new generations are held back."""
        while self.holding:
            await self._resumed.wait()

    def most_stale_child(self, now: float) -> tuple[str, float]:
        """The child with the oldest heartbeat, and its age in seconds."""
        if self.unheard:
            return "", 0.0
        process = min(self.heartbeat_at, key=self.heartbeat_at.__getitem__)
        return process, now - self.heartbeat_at[process]


class AnswerMaker(ABC):
    """Turns a request's outputs into an answer of its API."""

    media_type: ClassVar[str] = "text/event-stream"
    """Of a stream."""

    @abstractmethod
    async def whole(self, outs: list[TextOut]) -> Answer:
        """The answer of all generations, in order."""

    @abstractmethod
    def headers(self, first: TextOut) -> list[Header]:
        """The headers of a stream that begins with this output."""

    @abstractmethod
    async def frames(self, index: int, out: TextOut, pacer: Pacer) -> list[bytes]:
        """The events of one generation's output; raises ApiError."""

    def opening(self) -> bytes:
        return b""

    def closing(self) -> bytes:
        return DONE

    def failed(self, error: ApiError) -> bytes:
        return error_event(error)


@dataclass
class Service:
    """Shared by all endpoints."""

    model_name: str
    prompts: Prompts
    defaults: SamplingDefaults
    manager: TokenizerManager
    metrics: Metrics
    state: State
    budget: ByteBudget
    """Bytes of bodies and prompts in flight."""
    pooling: Pooling | None = None
    """How the model makes vectors; None if it makes text."""
    formats: Formats = NO_FORMATS
    """The model's formats of reasoning and tool calls."""
    pool: ReaderPool | None = None
    """Reads large bodies; None: they are read in the event loop."""
    rules: MediaRules | None = None
    """Of images in requests; None: the model reads text alone."""
    media: MediaReader | None = None
    """Reads images; None: requests have none."""
    tracing: Tracing | None = None
    """Makes spans of requests; None: no tracing."""
    limits: Limits | None = None
    """Known once the scheduler is ready."""
    uses_priority: bool = False
    """Whether a request's priority has an effect."""
    hidden_size: int | None = None
    """Size of the hidden states that requests may ask for; None if they may not."""
    active: int = 0
    """HTTP requests that generate, from their headers to the last byte of their answer."""
    reading: int = 0
    """Of these, those whose bodies have not come: a client may send one for long."""
    came: int = 0
    """How many of them have come so far."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.idle.set()
        self.reader = Reader(self.model_name, self.prompts, self.defaults, self.pooling, self.formats, self.rules)

    @property
    def task(self) -> Task:
        return "generate" if self.pooling is None else self.pooling.task

    def name_of(self, task: Generations) -> str:
        """What an answer calls its model: the adapter that the request asks for, or the model itself."""
        return task.model or self.model_name

    def pools(self) -> Pooling:
        """The model's pooling, for endpoints that exist only if it has one."""
        assert self.pooling is not None
        return self.pooling

    def admit_for(self, asked: ApiRequest, *tasks: Task) -> None:
        """Raises ApiError 400 for a path that needs another model, with what to do; otherwise as `admit`."""
        if self.task in tasks:
            self.admit()
            return
        does, instead = _DOES[self.task]
        raise ApiError(
            400,
            f"{asked.path} is not for this model: {self.model_name!r} {does}. Use {instead}, or a server with "
            f"--task {' or '.join(tasks)}",
            code="unsupported_task",
        )

    def count_generating(self, change: int, *, reading: int = 0) -> None:
        """Counts generating HTTP requests, and those being read: 1 begins, -1 ends one. `idle` is set while there are
        no others than these."""
        self.active += change
        self.reading += reading
        self.came += change > 0
        self.metrics.set("http_requests_active", self.active)
        if self.active > self.reading:
            self.idle.clear()
        else:
            self.idle.set()

    def admit(self) -> Limits:
        """Raises ApiError 503 while nothing new is accepted."""
        if self.state.failure is not None:
            raise ApiError(503, f"The server is stopping: {self.state.failure}")
        if self.limits is None or not self.state.ready:
            raise ApiError(503, "The model is still loading", headers=RETRY)
        if self.state.refusing:
            raise self.overloaded("The server is shutting down")
        if self.state.asleep or self.state.pausing:
            raise self.overloaded(f"The engine is {self.state.operation or 'asleep'}")
        if self.state.weights_differ and not self.state.holding:
            raise self.overloaded(WEIGHTS_DIFFER)
        return self.limits

    def overloaded(self, message: str) -> ApiError:
        self.metrics.rejected.inc()
        return errors.overloaded(message)

    async def read(self, asked: ApiRequest, kind: Kind, inline_bytes: int = INLINE_BYTES) -> Read:
        """Reads the body into a task: here if it is small, else in another process. Raises ApiError."""
        caller = Caller(asked.tenant, asked.shares_cache, self.state.adapters, picked=asked.picked)
        task: Read | None = None
        small = asked.size <= inline_bytes and slow_numbers(asked.content) <= MAX_SLOW
        if self.pool is None or small:
            try:
                task = self.reader.read(kind, asked.content, self.limits, caller)
            except NeedsWorkerError:  # the chat template is not a plain one: rendering it may take long
                if self.pool is None:
                    task = await asyncio.to_thread(self.reader.read, kind, asked.content, self.limits, caller)
        if task is None:
            assert self.pool is not None
            parts, reservation = asked.hand_over()
            reading = self.pool.read(kind, parts, asked.size, self.limits, caller, reservation, asked.client)
            del parts
            task = await reading
        asked.ignored += task.ignored
        if isinstance(task, Generations) and task.media:
            assert self.media is not None
            assert self.limits is not None
            task = await self.media.read(task, asked, self.limits, self.budget)
        return task

    async def open(
        self, job: Generations, asked: ApiRequest | None = None, *, answer_bytes: int = 0
    ) -> InflightRequest:
        """Starts the job's generations. They end with their request; without one (None) the caller closes them.
        `answer_bytes`: the answer's size besides prompts. Raises ApiError, TooMuchInFlight."""
        limits = self.admit()
        rank = job.rank if asked is None else asked.rank(limits, job.rank)
        if job.prompts[0].priority and not self.uses_priority and asked is not None:
            asked.ignored += ("priority",)
        client = OURSELVES if asked is None else asked.client
        pages_from = None if asked is None else asked.pages_from
        requests = job.requests(client, pages_from, uses_priority=self.uses_priority)
        size, pacer = answer_bytes, Pacer()
        for first in requests[:: job.n]:
            size += job.n * size_of(first)
            await pacer.rest()
        if self.state.holding:
            await self.state.resumed()
        self.admit()  # again: others had their turns
        reservation = Reservation(self.budget, client, INLINE_BYTES + GENERATION_BYTES)
        reservation.grow(size)
        try:
            span = None if asked is None else asked.span
            if span is not None:
                span.began(job)
            inflight = self.manager.open(
                requests,
                name=job.rid,
                on_close=reservation.release,
                tenant=None if asked is None else asked.tenant,
                on_output=None if span is None else span.came,
                rank=rank,
            )
        except BaseException:
            reservation.release()
            raise
        if asked is not None:
            asked.inflight = inflight
        return inflight

    def check_finish(self, finish: FinishReason | None) -> None:
        """Raises ApiError for an end that is not an answer."""
        if finish is None or (finish.type != "error" and finish.status is None):
            return
        status = finish.status or 500
        message = finish.message or "The request failed"
        if status == 503 and self.state.failure is None:
            raise self.overloaded(message)
        if status < 500 and finish.param is not None:
            said = f"Invalid value for {finish.param!r}: {message}"
            raise ApiError(status, said, param=finish.param, code="invalid_value")
        raise rate_limited(message) if status == 429 else ApiError(status, message)

    async def collect(self, inflight: InflightRequest) -> list[TextOut]:
        """Waits for all generations: one whole output each. Raises ApiError."""
        parts: list[list[TextOut]] = [[] for _ in inflight.ids]
        while ready := await inflight.next(whole=True):
            for index, out in ready:
                self.check_finish(out.finish)
                parts[index].append(out)
        pacer, whole = Pacer(), list[TextOut]()
        for index in range(len(parts)):
            whole.append(merge(parts[index]))
            parts[index] = []
            await pacer.rest()
        return whole

    async def answer(
        self, asked: ApiRequest, task: Generations, made: AnswerMaker, *, answer_bytes: int = 0
    ) -> Response:
        """The answer, whole or streamed. Raises ApiError, TooMuchInFlight."""
        inflight = await self.open(task, asked, answer_bytes=answer_bytes)
        if task.stream:
            return await self.stream(asked, inflight, made)
        return await made.whole(await self.collect(inflight))

    async def stream(self, asked: ApiRequest, inflight: InflightRequest, made: AnswerMaker) -> EventStream:
        """Streams outputs. Headers are sent with the first token; an earlier error is an ordinary error answer
        (ApiError), a later one an event that ends the stream."""
        pacer = Pacer()

        async def frames(outs: list[tuple[int, TextOut]]) -> list[bytes]:
            written = list[bytes]()
            for index, out in outs:
                self.check_finish(out.finish)
                written += await made.frames(index, out, pacer)
                await pacer.rest()
            return written

        first = await inflight.next()
        begun = [made.opening(), *await frames(first)]
        asked.streaming = True

        async def content() -> AsyncIterator[bytes]:
            try:
                for piece in in_pieces(begun):
                    yield piece
                begun.clear()
                while outs := await inflight.next():
                    for piece in in_pieces(await frames(outs)):
                        yield piece
                inflight.close()  # the client may use its rid again once it has the end
                yield made.closing()
            except ApiError as error:
                yield made.failed(error)
            except Exception as error:
                logger.exception("%s failed", asked.path)
                if asked.span is not None:
                    asked.span.failed(error)
                yield made.failed(BROKEN)

        headers = {name.decode(): value.decode() for name, value in made.headers(first[0][1])}
        headers["cache-control"] = "no-cache"
        return EventStream(content(), headers=headers, media_type=made.media_type)


def usage(job: Generations, outs: Mapping[int, TextOut], reasoning_tokens: int | None = None) -> answers.Usage:
    """OpenAI's usage object, from outputs so far by generation. `reasoning_tokens`: of completion tokens; None =
    unknown. A prompt counts once for all its choices. So do its cached tokens: the first choice's, since the others
    always find the pages that it computed. Hidden counts are left out.
    """
    completion_tokens = sum(out.completion_tokens for out in outs.values())
    prompt_tokens = job.prompt_tokens
    cached_tokens = sum(out.cached_tokens for index, out in outs.items() if index % job.n == 0)
    details = answers.CompletionTokensDetails(UNSET if reasoning_tokens is None else reasoning_tokens)
    if guessed := [out.speculated for out in outs.values() if out.speculated is not None]:
        details.accepted_prediction_tokens = sum(one.right for one in guessed)
        details.rejected_prediction_tokens = sum(one.guesses - one.right for one in guessed)
    return answers.Usage(
        prompt_tokens,
        completion_tokens,
        prompt_tokens + completion_tokens,
        UNSET if job.hides_cache else answers.PromptTokensDetails(cached_tokens),
        details if guessed or reasoning_tokens is not None else UNSET,
    )


def token_headers(prompt_tokens: int, cached_tokens: int) -> list[Header]:
    """Headers for routers: the prompt's size and how much was cached."""
    return [
        (wire_headers.PROMPT_TOKENS.encode(), b"%d" % prompt_tokens),
        (wire_headers.CACHED_TOKENS.encode(), b"%d" % cached_tokens),
    ]
