"""Probes and information about the server.

`EngineHealth` answers whether a request would work: by /health_generate, and for /ready and /live between its checks.

A failed request proves nothing: its prompt may overflow, and a client with a few of those must not take the server out
of rotation. After `FAILURES` in a row without an answer, the engine must answer a test prompt. While it cannot,
`problem` says why; any answer ends that. All this counts by data-parallel rank: one that fails is not hidden by others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response, Security

from treeline_runtime.args import ServerArgs
from treeline_runtime.download import repository
from treeline_runtime.messages import BatchTextOut, GenerateReq, SamplingParams
from treeline_runtime.models.pooling import Pooling
from treeline_runtime.published import LoadUpdate
from treeline_runtime.server import answers, schema
from treeline_runtime.server.dependencies import Checking, Guarded
from treeline_runtime.server.errors import RETRY, ApiError, wrong
from treeline_runtime.server.http import Answer, json_answer
from treeline_runtime.server.jobs import Generations
from treeline_runtime.server.limits import TooMuchInFlight
from treeline_runtime.server.metrics import CONTENT_TYPE
from treeline_runtime.server.openai import new_rid
from treeline_runtime.server.service import WEIGHTS_DIFFER, Service
from treeline_runtime.tokenizer_manager import NoReply

logger = logging.getLogger(__name__)

FAILURES = 3
"""Consecutive failed requests before the engine is checked."""
RETRY_S = 5.0
"""Seconds between two checks of a failing engine."""
TIMEOUT_S = 30.0
"""Seconds for the answer to a check, which waits for its turn."""
CACHE_OFF = (
    "An audit found that cached tokens changed an answer, so they are no longer used (source: {}). The log names the "
    "request; POST /flush_cache switches the cache on again"
)
TOKENS = 4
"""More than one: the first comes from the prompt alone, the others read the cache back."""


class EngineHealth:
    """`on_batch` sees every output; `watch` runs as a task; `check` may be called at any time."""

    def __init__(self, service: Service, clock: Callable[[], float] = time.monotonic) -> None:
        self._service = service
        self._clock = clock
        self._failures = Counter[int]()
        """In a row, by rank."""
        self._problems: dict[int, str] = {}
        """By rank; `problem` is the first."""
        self._suspected = asyncio.Event()

    @property
    def problem(self) -> str | None:
        """Why requests do not work; None if they do, as far as known."""
        return self._service.state.problem

    @property
    def failing_s(self) -> float:
        """Seconds since the first failed check; 0 without a problem."""
        return 0.0 if self.problem is None else self._clock() - self._service.state.failing_since

    def on_batch(self, batch: BatchTextOut, rank: int = 0) -> None:
        for out in batch.outs:
            if out.finish is None:
                continue
            if out.finish.type in ("stop", "length"):
                self._recover(rank)
            elif out.finish.type == "error" and out.finish.status == 500:
                self._failures[rank] += 1
                if self._failures[rank] >= FAILURES:
                    self._suspected.set()

    async def watch(self) -> None:
        """Checks after failures until one succeeds."""
        while True:
            await self._suspected.wait()
            try:
                await self.check()
            except ApiError as error:
                logger.error("%d requests in a row failed, and the check did: %s", max(self._failures.values()), error)
                await asyncio.sleep(RETRY_S)

    async def check(self) -> None:
        """Has each rank make a few tokens, or a vector. Raises ApiError 503 if requests fail or none is accepted."""
        self._service.admit()
        refusals = await asyncio.gather(*map(self._check, range(self._ranks)))
        if self.problem is not None:
            raise ApiError(503, self.problem)
        for refusal in filter(None, refusals):
            raise refusal

    async def _check(self, rank: int) -> Exception | None:
        """Sets or ends the rank's problem; returns the error if it does not take the request, which proves nothing."""
        pools = self._service.pooling is not None
        few = SamplingParams(max_new_tokens=0 if pools else TOKENS, temperature=0.0, ignore_eos=True)
        job = Generations(rid=new_rid("health"), prompts=[GenerateReq("", [0], few, pools=pools)], rank=rank)
        try:
            inflight = await self._service.open(job)
        except (ApiError, TooMuchInFlight) as error:
            return error
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._service.collect(inflight)
        except TimeoutError:
            self._failed(rank, f"no answer within {TIMEOUT_S:g} s")
        except ApiError as error:
            if error.status in (503, 504):  # a full queue, a limit of time, or the server is stopping
                return error
            self._failed(rank, str(error))
        else:
            self._recover(rank)
        finally:
            inflight.close()
        return None

    def _failed(self, rank: int, why: str) -> None:
        if self.problem is None:
            self._service.state.failing_since = self._clock()
        self._problems[rank] = f"The engine{self._of(rank)} cannot answer: {why}"
        self._tell()

    def _recover(self, rank: int) -> None:
        if self._problems.pop(rank, None) is not None:
            logger.info("the engine%s answers again", self._of(rank))
            self._tell()
        self._failures[rank] = 0
        if max(self._failures.values()) < FAILURES:
            self._suspected.clear()

    def _tell(self) -> None:
        self._service.state.problem = next(iter(self._problems.values()), None)

    @property
    def _ranks(self) -> int:
        return len(self._service.state.loads)

    def _of(self, rank: int) -> str:
        return "" if self._ranks == 1 else f" of rank {rank}"


@dataclass(frozen=True)
class ServerInfo:
    """The facts that do not change while the server runs."""

    args: ServerArgs
    version: str
    epoch: int
    model_config: Mapping[str, Any]
    started_at: float
    """Unix seconds."""


def _add(
    router: APIRouter,
    paths: tuple[str, ...],
    endpoint: Callable[..., Any],
    summary: str,
    answer: Any = dict,
    tag: str = schema.STATE,
) -> None:
    for path in paths:
        router.add_api_route(path, endpoint, **schema.operation(tag=tag, summary=summary, answer=answer))


class Probes:
    def __init__(self, service: Service, info: ServerInfo) -> None:
        self._service = service
        self._info = info
        self.health = EngineHealth(service)
        self.scheduler_info: Mapping[str, Any] = {}
        """The facts that the scheduler reported about itself when it was ready."""
        self.kv_events: Mapping[str, Any] | None = None
        """Where events are published, once that is known; None: they are not."""

    @property
    def router(self) -> APIRouter:
        """Open to everybody."""
        made = APIRouter()
        _add(made, ("/live",), self.live, "503 when a restart would help", answers.Status)
        _add(made, ("/ready", "/health", "/ping"), self.ready, "200 while new requests are accepted", answers.Status)
        _add(made, ("/model_info", "/get_model_info"), self.model_info, "Describes the model")
        about = "The server's state and arguments, without secrets"
        _add(made, ("/server_info", "/get_server_info"), self.server_info, about)
        _add(made, ("/version",), self.version, "The server's version", answers.Version)
        tokenizer = "The tokenizer and chat template, for a router that renders prompts"
        _add(made, ("/treeline/tokenizer",), self.tokenizer, tokenizer)
        return made

    @property
    def keyed_router(self) -> APIRouter:
        """Needs the API key."""
        made = APIRouter(dependencies=[Security(Guarded())])
        _add(made, ("/health_generate",), self.health_generate, "Generates a few tokens", answers.Status)
        models = "A list with the served model and its adapters"
        _add(made, ("/v1/models",), self.models, models, answers.Models, schema.OPENAI)
        _add(made, ("/v1/models/{model:path}",), self.model, "The model, or an adapter", answers.Model, schema.OPENAI)
        _add(made, ("/v1/loads",), self.loads, "The scheduler's current load")
        _add(made, ("/load",), self.load, "Requests in flight, in vLLM's format", answers.Load)
        return made

    # ---- probes ---------------------------------------------------------------------------------------------

    async def live(self) -> Response:
        """503 only if a restart would help: a process hangs or has died, or no request works."""
        state, limit_s = self._service.state, self._info.args.watchdog_timeout
        if state.failure is not None:
            raise ApiError(503, state.failure)
        if state.ready and limit_s:
            process, still_s = state.most_stale_child(time.monotonic())
            if still_s > limit_s:
                raise ApiError(503, f"The {process} has not moved for {still_s:.0f} s")
            if self.health.problem is not None and self.health.failing_s > limit_s:
                raise ApiError(503, self.health.problem)
        return json_answer(answers.Status("live", state.heartbeats))

    async def ready(self) -> Response:
        """200 while the server takes new work and, as far as is known, can do it. Free: the scheduler is not asked."""
        state = self._service.state
        if state.failure is not None:
            raise ApiError(503, state.failure)
        if not state.ready:
            raise ApiError(503, "The model is still loading", headers=RETRY)
        if state.draining:
            raise ApiError(503, "The server is draining")
        if state.asleep or state.operation is not None:
            what = f"The engine is {state.operation or 'asleep'}"
            raise ApiError(503, what, code="asleep" if state.asleep else None, headers=RETRY)
        problem = WEIGHTS_DIFFER if state.weights_differ else self.health.problem
        if problem is not None:
            raise ApiError(503, problem)
        off = ", ".join(state.cache_sources_off)
        return json_answer(answers.Status("ready", warning=CACHE_OFF.format(off) if off else msgspec.UNSET))

    async def health_generate(self, _asked: Checking) -> Response:
        """Generates a few tokens, which proves the whole path; too slow for a probe under load."""
        await self.health.check()
        return json_answer(answers.Status("healthy"))

    # ---- information ----------------------------------------------------------------------------------------

    @property
    def served(self) -> list[answers.Model]:
        """The model, and the adapters that may be asked for."""
        state = self._service.state
        lost = {name for load in state.loads for name in load.lost_adapters}
        adapters = (name for name, digest in state.adapters.items() if digest and name not in lost)
        return [self._model(), *map(self._model, adapters)]

    def _reads(self, kind: str) -> bool:
        service = self._service
        return service.media is not None and service.rules is not None and kind in service.rules.kinds

    @property
    def model_type(self) -> str:
        """The architecture's name in the checkpoint; "" if it has none."""
        return str(self._info.model_config.get("model_type") or "")

    async def models(self) -> Response:
        return json_answer(answers.Models("list", self.served))

    async def model(self, model: str) -> Response:
        if self._service.state.adapters.get(model):
            return json_answer(self._model(model))
        self._service.reader.check_model(model)
        return json_answer(self._model())

    def _model(self, adapter: str | None = None) -> answers.Model:
        limits, name = self._service.limits, self._service.model_name
        return answers.Model(
            id=adapter or name,
            object="model",
            created=int(self._info.started_at),
            owned_by="treeline",
            root=name,
            parent=None if adapter is None else name,
            max_model_len=None if limits is None else limits.context_length,
            digest=msgspec.UNSET if adapter is None else self._service.state.adapters[adapter],
        )

    async def model_info(self) -> Response:
        info = self._info
        return json_answer(
            {
                "model_path": self._service.state.model_path or info.args.model,
                "served_model_name": self._service.model_name,
                "tokenizer_path": repository(info.args.model),
                "is_generation": self._service.pooling is None,
                "task": self._service.task,
                "preferred_sampling_params": msgspec.to_builtins(self._service.defaults),
                "weight_version": self._service.state.weight_version,
                "load_format": info.args.load_format,
                "reasoning_parser": self._service.formats.reasoning,
                "tool_call_parser": self._service.formats.tools,
                "disaggregation_mode": "null",
                "has_image_understanding": self._reads("image"),
                "has_video_understanding": self._reads("video"),
                "has_audio_understanding": self._reads("audio"),
                "placeholders": {
                    kind: text for kind, text in self._service.prompts.in_texts.items() if self._reads(kind)
                },
                "model_type": info.model_config.get("model_type"),
                "architectures": info.model_config.get("architectures"),
            }
        )

    async def server_info(self) -> Response:
        info, service = self._info, self._service
        status = "loading" if not service.state.ready else "asleep" if service.state.asleep else "ready"
        return json_answer(
            {
                **info.args.public(),
                **self.scheduler_info,
                "served_model_name": service.model_name,
                "task": service.task,
                "reasoning_parser": service.formats.reasoning,
                "tool_call_parser": service.formats.tools,
                "pooling": None if service.pooling is None else _pooling(service.pooling),
                "tokenizer_path": repository(info.args.model),
                "disable_radix_cache": info.args.prefix_cache == "off",  # SGLang's kits ask
                "version": info.version,
                "status": "draining" if service.state.draining else status,
                "draining": service.state.draining,
                "asleep": service.state.asleep,
                "operation": service.state.operation,
                "model_path": service.state.model_path or info.args.model,
                "weight_version": service.state.weight_version,
                "weights_differ": service.state.weights_differ,
                "cache_sources_off": service.state.cache_sources_off,
                "started_at": info.started_at,
                "epoch": info.epoch,
                "tokenizer_fingerprint": service.prompts.bundle.fingerprint,
                "kv_events": self.kv_events,
                # A picker need not write a client's salt into bodies: the edge's header separates the caches here.
                "isolates_clients": True,
                "internal_states": [_load_entry(load, rank) for rank, load in enumerate(service.state.loads)],
            }
        )

    async def tokenizer(self, request: Request) -> Response:
        """The tokenizer and chat template, for routers that render prompts."""
        bundle = self._service.prompts.bundle
        etag = f'"{bundle.fingerprint}"'
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers={"etag": etag})
        return Answer(bundle.to_json(), headers=((b"etag", etag.encode()),))

    async def loads(self, request: Request) -> Response:
        """The schedulers' current loads, by data-parallel rank."""
        if request.query_params.get("format", "json") != "json":
            raise wrong("format", "'format' must be json; metrics have a listener of their own (--metrics-port)")
        manager = self._service.manager
        try:
            found = await asyncio.gather(*(manager.state(rank, "load") for rank in manager.ranks))
        except NoReply as error:
            raise ApiError(503, f"The scheduler does not answer: {error}") from None
        draining = {"draining": self._service.state.draining}
        entries = [_load_entry(msgspec.convert(data, LoadUpdate), rank) | draining for rank, data in enumerate(found)]
        return json_answer({"timestamp": time.time(), "dp_rank_count": len(entries), "loads": entries})

    async def load(self) -> Response:
        """Requests in flight, as last reported: vLLM's."""
        return json_answer(answers.Load(sum(load.running + load.waiting for load in self._service.state.loads)))

    async def version(self) -> Response:
        """Our version, at vLLM's and SGLang's path."""
        return json_answer(answers.Version(self._info.version))

    async def metrics(self) -> Response:
        metrics, state = self._service.metrics, self._service.state
        for rank, load in enumerate(state.loads):
            metrics.on_load(load, rank)
        metrics.set("draining", state.draining)
        return Answer(metrics.render(), content_type=CONTENT_TYPE.encode())

    async def debug_radix(self, request: Request) -> Response:
        """The cached blocks, from the scheduler's tree, and whether the publisher announced them to routers.
        `?dp_rank=R`: of that data-parallel rank."""
        if not self._info.args.enable_debug_endpoints:
            raise ApiError(404, "Start the server with --enable-debug-endpoints to see the cache", code="disabled")
        limits, manager = self._service.limits, self._service.manager
        if limits is None:
            raise ApiError(503, "The model is still loading", headers=RETRY)
        rank = manager.ranks[limits.rank_in(request.query_params.get("dp_rank", "0"), "dp_rank")]
        try:
            tree = await manager.state(rank, "radix", timeout_s=30.0)
            told = await manager.announced(rank, int(tree["updates"]), timeout_s=30.0)
        except NoReply as error:
            raise ApiError(503, f"No answer: {error}") from None
        announced = set(map(str, told["hashes"]))
        blocks = [block | {"announced": block["hash"] in announced} for block in tree["blocks"]]
        return json_answer({"epoch": self._info.epoch, "seq": told["seq"], "blocks": blocks})


def _pooling(pooling: Pooling) -> dict[str, Any]:
    """The vectors' method, size and form; `dimensions`: shorter sizes that clients may ask for, None = any."""
    return {
        "method": pooling.method,
        "normalize": pooling.normalize,
        "size": pooling.size,
        "labels": pooling.labels,
        "activation": pooling.activation,
        "dimensions": pooling.shorter,
    }


_PUBLISHERS = ("epoch", "seq", "in_flight", "adapters")
"""Members of a load report set by the publisher, or not yet."""


def _load_entry(load: LoadUpdate, rank: int) -> dict[str, Any]:
    """An element of `/v1/loads`: SGLang's names, then ours."""
    return {
        "dp_rank": rank,
        "num_running_reqs": load.running,
        "num_waiting_reqs": load.waiting,
        "num_total_reqs": load.running + load.waiting,
        "num_used_tokens": load.tokens_used,
        "max_total_num_tokens": load.tokens_total,
        "token_usage": load.used_share,
        "max_running_requests": load.max_running,
        "num_waiting_uncached_tokens": load.waiting_uncached_tokens,
        **{name: value for name, value in msgspec.structs.asdict(load).items() if name not in _PUBLISHERS},
    }
