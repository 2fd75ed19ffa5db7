"""What every generating endpoint does: let the request in, start it, turn its outputs into an answer or an error."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
from treeline_wire import headers as wire_headers

from treeline_runtime.messages import FinishReason, GenerateReq, LoadUpdate, SamplingParams, TextOut
from treeline_runtime.server.http import ApiError, Header, Request, event
from treeline_runtime.server.metrics import Metrics
from treeline_runtime.server.prompts import Prompts
from treeline_runtime.server.sampling import SamplingDefaults
from treeline_runtime.tokenizer_manager import DuplicateRid, Flight, TokenizerManager, merge

RETRY_AFTER_S = b"1"
MAX_GENERATIONS = 1024
"""Generations that one HTTP request may start (prompts x n)."""


@dataclass
class State:
    """Where the server is in its life. Only `serve` changes it."""

    ready: bool = False
    draining: bool = False
    """SIGTERM came: /ready says 503, requests are still accepted during --pre-stop."""
    refusing: bool = False
    """New generations get 503."""
    failure: str | None = None
    """Why the server is about to exit."""
    heartbeat_at: dict[str, float] = field(default_factory=dict)
    """When each child last moved, monotonic seconds. Empty until all are ready."""
    heartbeats: int = 0
    load: LoadUpdate = field(default_factory=LoadUpdate)

    def stillest(self, now: float) -> tuple[str, float]:
        """The child that has not moved for longest, and for how many seconds."""
        process = min(self.heartbeat_at, key=self.heartbeat_at.__getitem__)
        return process, now - self.heartbeat_at[process]


@dataclass(frozen=True)
class Limits:
    """Token counts that decide whether a prompt fits."""

    context_length: int
    """Prompt + output."""
    max_request_tokens: int
    """What the KV pool can hold of one request; at most `context_length`."""


@dataclass(frozen=True)
class Ask:
    """One prompt and what is wanted for it."""

    ids: list[int]
    sampling: SamplingParams
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0


@dataclass(frozen=True)
class Job:
    """One generation request, whichever API it came through: every prompt is answered `n` times."""

    rid: str
    """Names all of it: `/abort_request` takes it."""
    asks: list[Ask]
    n: int = 1
    namespace: str | None = None
    rids: list[str] | None = None
    """Ids of the generations, where the client chose them."""

    @property
    def prompt_tokens(self) -> int:
        return sum(len(ask.ids) for ask in self.asks)

    @property
    def generations(self) -> int:
        return len(self.asks) * self.n

    def requests(self) -> list[GenerateReq]:
        """One per choice, prompt by prompt. A seed gives each of a prompt's choices its own, reproducible one."""
        single = self.generations == 1
        rids = self.rids or [
            self.rid if single else f"{self.rid}:{index}" for index in range(self.generations)
        ]
        choices = [(ask, choice) for ask in self.asks for choice in range(self.n)]
        return [
            GenerateReq(
                rid=rid,
                input_ids=ask.ids,
                sampling=_for_choice(ask.sampling, choice),
                namespace=self.namespace,
                return_logprob=ask.return_logprob,
                logprob_start_len=ask.logprob_start_len,
                top_logprobs_num=ask.top_logprobs_num,
            )
            for rid, (ask, choice) in zip(rids, choices, strict=True)
        ]


def _for_choice(sampling: SamplingParams, choice: int) -> SamplingParams:
    if not choice or sampling.seed is None:
        return sampling
    seed = (sampling.seed + choice) & ((1 << 63) - 1)
    return msgspec.structs.replace(sampling, seed=seed)


class UnknownModel(ApiError):
    """404: nobody gets another model than the one that he named."""

    def __init__(self, name: object) -> None:
        message = f"The model `{name}` does not exist or you do not have access to it."
        super().__init__(404, message, param="model", code="model_not_found")
        self._name = name

    def without_picker(self) -> ApiError:
        """The same where no picker was asked: it may be the name of an InferenceModel, or of another pool's model."""
        return ApiError(
            503,
            f"The model `{self._name}` cannot be found while the endpoint picker is away: only the names that pools "
            "themselves serve are known then. Try again soon.",
            type="service_unavailable",
            param="model",
            code="picker_unavailable",
            headers=ELSEWHERE,
        )


@dataclass
class Service:
    """What the endpoints share."""

    model_name: str
    prompts: Prompts
    defaults: SamplingDefaults
    manager: TokenizerManager
    metrics: Metrics
    state: State
    limits: Limits | None = None
    """Known once the scheduler is ready."""
    active: int = 0
    """HTTP requests that generate, from admission to their last byte."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.idle.set()

    @contextlib.contextmanager
    def generating(self) -> Iterator[None]:
        """Counts one HTTP request that generates. `idle` is set while there is none."""
        self.active += 1
        self.idle.clear()
        self.metrics.set("http_requests_active", self.active)
        try:
            yield
        finally:
            self.active -= 1
            self.metrics.set("http_requests_active", self.active)
            if not self.active:
                self.idle.set()

    def admit(self) -> Limits:
        """Raises ApiError 503 while nothing new is accepted."""
        if self.state.failure is not None:
            raise ApiError(503, f"The server is stopping: {self.state.failure}", type="server_error")
        if self.limits is None or not self.state.ready:
            raise ApiError(503, "The model is still loading", type="server_error", headers=RETRY)
        if self.state.refusing:
            raise self.overloaded("The server is shutting down")
        return self.limits

    def overloaded(self, message: str) -> ApiError:
        self.metrics.rejected.inc()
        return ApiError(503, message, type="overloaded_error", code="overloaded", headers=OVERLOADED)

    def check_model(self, name: object) -> None:
        """Raises UnknownModel for another model than the one served; none at all is this one."""
        if name is not None and name != self.model_name:
            raise UnknownModel(name)

    def max_new_tokens(self, prompt_len: int, asked: int | None, default: int | None, param: str) -> int:
        """Output tokens for a prompt: what was asked, `default`, or the rest of the context (None).

        Raises ApiError 400 for an empty prompt, and `context_length_exceeded` when it cannot fit.
        """
        limits = self.admit()
        if prompt_len == 0:
            raise ApiError(400, "The prompt is empty", param=param)
        room = limits.max_request_tokens - prompt_len
        longest = limits.max_request_tokens
        if room < (0 if asked == 0 else 1):
            raise ApiError(
                400,
                f"This model's maximum context length is {longest} tokens. However, your prompt has {prompt_len} "
                "tokens. Please shorten it.",
                param=param,
                code="context_length_exceeded",
            )
        if asked is not None and asked > room:
            raise ApiError(
                400,
                f"This model's maximum context length is {longest} tokens. However, you requested "
                f"{prompt_len + asked} tokens ({prompt_len} in the prompt, {asked} for the output).",
                param=param,
                code="context_length_exceeded",
            )
        if asked is not None:
            return asked
        return room if default is None else min(default, room)

    def open(self, job: Job) -> Flight:
        """Starts the job's generations; the caller closes the flight."""
        self.admit()
        if job.generations > MAX_GENERATIONS:
            raise ApiError(400, f"More than {MAX_GENERATIONS} generations in one request", param="n")
        try:
            return self.manager.open(job.requests(), name=job.rid)
        except DuplicateRid as error:
            raise ApiError(
                400, f"A request with rid {str(error)!r} is already in flight", param="rid"
            ) from None

    def check_finish(self, finish: FinishReason | None) -> None:
        """Raises ApiError for an end that is no answer."""
        if finish is None or (finish.type != "error" and finish.status is None):
            return
        status = finish.status or 500
        message = finish.message or "The request failed"
        if status == 503:
            raise self.overloaded(message)
        if status < 500:
            raise ApiError(status, message)
        raise ApiError(status, message, type="server_error")

    async def collect(self, flight: Flight) -> list[TextOut]:
        """Waits for all generations: one whole output each. Raises ApiError."""
        parts: list[list[TextOut]] = [[] for _ in flight.rids]
        while ready := await flight.next(whole=True):
            for index, out in ready:
                self.check_finish(out.finish)
                parts[index].append(out)
        return [merge(outs) for outs in parts]

    async def stream(
        self,
        request: Request,
        flight: Flight,
        frames_of: Callable[[int, TextOut], bytes],
        *,
        headers_of: Callable[[TextOut], Sequence[Header]],
        opening: bytes,
        closing: Callable[[], bytes],
    ) -> None:
        """Sends outputs as they come. Headers leave with the first token; an error before it is an ordinary error
        answer (ApiError), one after it an error object that ends the stream."""
        try:
            async for outs in _outputs(flight):
                frames = b""
                for index, out in outs:
                    self.check_finish(out.finish)
                    frames += frames_of(index, out)
                if not request.streaming:
                    await request.start_events(headers_of(outs[0][1]))
                    frames = opening + frames
                if frames:
                    await request.send_events(frames)
            await request.end_events(closing())
        except ApiError as error:
            if not request.streaming:
                raise
            await request.end_events(event(error.body))


async def _outputs(flight: Flight) -> AsyncIterator[list[tuple[int, TextOut]]]:
    while outs := await flight.next():
        yield outs


def new_rid(kind: str) -> str:
    """A request id that no other request has, as clients see it."""
    return f"{kind}-{uuid.uuid4().hex}"


def usage(job: Job, outs: Sequence[TextOut]) -> dict[str, object]:
    """OpenAI's usage object. A prompt counts once, however many choices it has; so do its cached tokens (those of its
    first choice: the others always find what the first computed)."""
    completion_tokens = sum(out.completion_tokens for out in outs)
    return {
        "prompt_tokens": job.prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": job.prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(out.cached_tokens for out in outs[:: job.n])},
    }


def token_headers(prompt_tokens: int, cached_tokens: int) -> list[Header]:
    """What a router learns from the headers alone: the prompt's size and how much of it was cached."""
    return [
        (wire_headers.PROMPT_TOKENS.encode(), b"%d" % prompt_tokens),
        (wire_headers.CACHED_TOKENS.encode(), b"%d" % cached_tokens),
    ]


RETRY: tuple[Header, ...] = ((b"retry-after", RETRY_AFTER_S),)
ELSEWHERE: tuple[Header, ...] = (*RETRY, (wire_headers.ELSEWHERE.encode(), b"true"))
OVERLOADED: tuple[Header, ...] = (*RETRY, (wire_headers.OVERLOADED.encode(), b"true"))
