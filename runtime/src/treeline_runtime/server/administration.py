"""Administration of the whole engine: sleep, new weights, profiles. On the admin listener only.

One operation at a time. The caller chooses what happens to running requests: `sleep` ends them or waits, and refuses
new ones (as in vLLM); `update_weights` waits or ends them, and holds new ones back until the new weights are loaded (as
in SGLang). Once the scheduler has begun, an operation continues even if the caller disconnects.

The scheduler is asked only after requests are refused or held back. Each data-parallel rank has one: all are asked at
once, and an operation has succeeded when all have. If one fails, the error says which, and which have done it: asked
again, sleep concerns those that are awake, and wake_up those that sleep.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from fastapi import APIRouter, Response
from msgspec import Meta, Struct

from treeline_runtime import messages
from treeline_runtime.args import ServerArgs
from treeline_runtime.server.dependencies import Controlling
from treeline_runtime.server.errors import ApiError, wrong
from treeline_runtime.server.fields import as_api_error, check_unknown, convert
from treeline_runtime.server.http import Answer, ApiRequest, json_answer
from treeline_runtime.server.service import Service
from treeline_runtime.tokenizer_manager import DpRank, NoReply

T = TypeVar("T")

NO_WEIGHTS = 2
POLL_S = 0.05
"""Seconds between two checks whether requests still run."""
SILENT = {"silent": True}
"""Data of a reply that did not come."""
_NAME_CHARS = 256
AdapterName = Annotated[str, Meta(min_length=1, max_length=2 * _NAME_CHARS)]  # room for a model's name and a version


class SleepQuery(Struct, frozen=True):
    level: Literal[1, 2] = 1
    mode: Literal["abort", "wait"] = "abort"


class NoFields(Struct, frozen=True):
    """Neither query nor body has fields."""


class FlushQuery(Struct, frozen=True):
    timeout: Annotated[float, Meta(ge=0, le=3600)] = 0.0
    """Seconds."""


class AbortBody(Struct, frozen=True):
    rid: str = ""
    abort_all: bool = False


class UpdateBody(Struct, frozen=True):
    model_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    weight_version: Annotated[str, Meta(min_length=1, max_length=_NAME_CHARS)] | None = None
    abort_all_requests: bool = False


class AdapterBody(Struct, frozen=True):
    lora_name: AdapterName
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    digest: Annotated[str, Meta(max_length=64)] = ""
    """The beginning of its files' digest: others are refused."""


class AdapterNameBody(Struct, frozen=True):
    lora_name: AdapterName


class ProfileBody(Struct, frozen=True):
    num_steps: Annotated[int, Meta(ge=1, le=messages.MAX_PROFILE_STEPS)] = 100


class Administration:
    """The handlers; they change `service.state`."""

    def __init__(self, service: Service, args: ServerArgs) -> None:
        self._service = service
        self._args = args
        self._changing = set[str]()
        """Adapters that are being loaded or unloaded."""

    @property
    def router(self) -> APIRouter:
        """The routes. All that change the server are POSTs, so that following a link cannot change it."""
        made = APIRouter()
        for paths, endpoint in (
            (("/flush_cache", "/reset_prefix_cache"), self.flush_cache),
            (("/abort_request",), self.abort_request),
            (("/sleep",), self.sleep),
            (("/wake_up",), self.wake_up),
            (("/update_weights", "/update_weights_from_disk"), self.update_weights),
            (("/v1/load_lora_adapter", "/load_lora_adapter"), self.load_adapter),
            (("/v1/unload_lora_adapter", "/unload_lora_adapter"), self.unload_adapter),
            (("/start_profile",), self.start_profile),
            (("/stop_profile",), self.stop_profile),
        ):
            for path in paths:
                made.add_api_route(path, endpoint, methods=["POST"])
        made.add_api_route("/is_sleeping", self.is_sleeping)
        return made

    # ---- endpoints ------------------------------------------------------------------------------------------

    async def sleep(self, asked: Controlling) -> Response:
        """Frees weights and KV cache. `?level=1` keeps the weights in host memory, `2` reads them again later;
        `?mode=abort` ends running requests, `wait` waits for them."""
        query = _query(asked, SleepQuery)
        sleeping, every = self._service.state.sleeping, range(self._args.dp_size)

        def asleep(rank: int) -> None:
            sleeping[rank] = query.level

        async with self._operation("going to sleep", refuses=True):
            other = next((rank for rank, level in sleeping.items() if level != query.level), None)
            if other is not None and len(sleeping) < len(every):
                some = f"Rank {other} sleeps at level {sleeping[other]}"
                raise wrong("level", f"{some}: ask for that level, or /wake_up first", code="refused")
            awake = [rank for rank in every if rank not in sleeping] or every
            await self._carry_out(
                lambda id: messages.SleepReq(id, query.level), asleep, awake, abort=query.mode == "abort"
            )
        return json_answer({"asleep": query.level})

    async def wake_up(self, asked: Controlling) -> Response:
        """Wakes up with an empty cache."""
        _query(asked)
        sleeping = self._service.state.sleeping
        async with self._operation("waking up", refuses=True):
            asleep = sorted(sleeping) or range(self._args.dp_size)
            await self._carry_out(messages.WakeReq, sleeping.pop, asleep)
        return json_answer({"asleep": 0})

    async def is_sleeping(self, asked: Controlling) -> Response:
        """vLLM's."""
        _parameters(asked, NoFields)
        return json_answer({"is_sleeping": bool(self._service.state.asleep)})

    async def update_weights(self, asked: Controlling) -> Response:
        """Loads another checkpoint of the same architecture; after a failure the old weights stay."""
        body = _body(asked, UpdateBody)
        state = self._service.state

        every = range(self._args.dp_size)
        updated = set[int]()

        def on_ok(rank: int) -> None:
            updated.add(rank)
            if rank in state.sleeping:
                state.sleeping[rank] = NO_WEIGHTS  # what the host kept were the old ones
            state.weights_differ = len(updated) < len(every)
            if not state.weights_differ:
                state.model_path = body.model_path
                state.weight_version = body.weight_version or body.model_path[-_NAME_CHARS:]

        started = time.monotonic()
        async with self._operation("loading new weights", refuses=False):
            await self._carry_out(
                lambda id: messages.UpdateWeightsReq(id, body.model_path), on_ok, every, abort=body.abort_all_requests
            )
        seconds = time.monotonic() - started
        return json_answer({"success": True, "weight_version": state.weight_version, "seconds": seconds})

    async def load_adapter(self, asked: Controlling) -> Response:
        """Loads a LoRA adapter from a folder below --lora-root: requests select it by `model: lora_name`."""
        body = _body(asked, AdapterBody)
        service, name = self._service, body.lora_name
        state, manager = service.state, service.manager
        if not state.ready:
            raise ApiError(503, "The model is still loading")
        if name == service.model_name or not name.isprintable():
            raise wrong("lora_name", "'lora_name' must be printable, and not the name of the model")

        async def load() -> dict[int, messages.Reply]:
            limit_s = self._args.start_timeout
            # A volume that does not answer holds up this load, and not the scheduler, which looks there next.
            await asyncio.to_thread(os.path.exists, os.path.join(self._args.lora_root or "", body.lora_path))
            replies = await self._replies(
                lambda rank: manager.ask(
                    rank, lambda id: messages.LoadAdapterReq(id, name, body.lora_path, body.digest), timeout_s=limit_s
                )
            )
            if all(reply.ok for reply in replies.values()):
                state.adapters = state.adapters | {name: (replies[0].data or {})["digest"]}
            elif name not in state.adapters:  # no rank is to have what others have not, nor one that is late
                await self._unload(name, [r for r, reply in replies.items() if reply.ok or reply.data == SILENT])
            return replies

        with self._change_of(name):
            _check(await _to_its_end(load()))
        return self._adapters()

    async def unload_adapter(self, asked: Controlling) -> Response:
        """Unloads an adapter once its requests have ended; new ones are refused at once."""
        name = _body(asked, AdapterNameBody).lora_name
        state = self._service.state
        digest = state.adapters.get(name)
        if digest is None:
            raise ApiError(404, f"No adapter is loaded as `{name}`", param="lora_name", code="model_not_found")

        async def unload() -> dict[int, messages.Reply]:
            state.adapters = state.adapters | {name: ""}
            replies = await self._unload(name, range(self._args.dp_size))
            left = {other: known for other, known in state.adapters.items() if other != name}
            state.adapters = left if all(reply.ok for reply in replies.values()) else left | {name: digest}
            return replies

        with self._change_of(name):
            _check(await _to_its_end(unload()))
        return self._adapters()

    @contextmanager
    def _change_of(self, name: str) -> Iterator[None]:
        """The only change of this adapter: ranks might carry out two in different order. Raises ApiError 409."""
        if name in self._changing:
            raise ApiError(409, f"The adapter `{name}` is being loaded or unloaded", code="conflict")
        self._changing.add(name)
        try:
            yield
        finally:
            self._changing.remove(name)

    async def _unload(self, name: str, ranks: Sequence[int]) -> dict[int, messages.Reply]:
        """Asks these ranks until no request there uses the adapter."""
        manager, replies, left = self._service.manager, dict[int, messages.Reply](), list(ranks)
        while left:
            replies |= await self._replies(
                lambda rank: manager.ask(rank, lambda id: messages.UnloadAdapterReq(id, name)), left
            )
            left = [rank for rank, reply in replies.items() if _is_busy(reply)]
            if left:
                await asyncio.sleep(POLL_S)
        return replies

    def _adapters(self) -> Response:
        loaded = {name: digest for name, digest in self._service.state.adapters.items() if digest}
        return json_answer({"success": True, "loaded_adapters": loaded})

    async def start_profile(self, asked: Controlling) -> Response:
        """Traces the scheduler's next `num_steps` steps into a file in a new folder under TMPDIR."""
        body = _body(asked, ProfileBody)
        try:
            folder = tempfile.mkdtemp(prefix="treeline-profile-")
        except OSError as error:
            raise ApiError(503, f"There is no folder for a profile (TMPDIR): {error}") from None
        # A scheduler that does not answer may begin yet: then the folder stays.
        manager = self._service.manager
        replies = await self._replies(
            lambda rank: manager.ask(rank, lambda id: messages.StartProfileReq(id, folder, body.num_steps))
        )
        began = [rank for rank, reply in replies.items() if reply.ok]
        if not began and SILENT not in (reply.data for reply in replies.values()):
            os.rmdir(folder)
        if len(began) < len(replies):
            stopped = await self._replies(lambda rank: manager.ask(rank, messages.StopProfileReq), began)
            ended = [rank for rank, reply in stopped.items() if reply.ok]
            _check({rank: reply for rank, reply in replies.items() if rank not in ended}, len(replies))
        return json_answer({"num_steps": body.num_steps, "folder": folder})

    async def stop_profile(self, asked: Controlling) -> Response:
        """Ends the profile early; answers with the trace's file, or those of the ranks that still traced."""
        _query(asked)
        manager = self._service.manager
        replies = await self._replies(lambda rank: manager.ask(rank, messages.StopProfileReq))
        done = {rank: reply for rank, reply in replies.items() if reply.ok}
        paths = [(reply.data or {})["path"] for reply in _check(done or replies)]
        return json_answer({"path": paths[0]} if len(replies) == 1 else {"paths": paths})

    async def flush_cache(self, asked: Controlling) -> Response:
        """Empties the prefix cache; 400 while requests run. `?timeout=S` waits up to S seconds for them."""
        deadline = time.monotonic() + _query(asked, FlushQuery).timeout
        replies, left = dict[int, messages.Reply](), list(range(self._args.dp_size))
        while True:
            replies |= await self._replies(self._service.manager.flush, left)
            left = [rank for rank, reply in replies.items() if _is_busy(reply)]
            if not left or time.monotonic() >= deadline:
                _check(replies)
                return Answer(b"Cache flushed.\n", content_type=b"text/plain; charset=utf-8")
            await asyncio.sleep(POLL_S)

    async def abort_request(self, asked: Controlling) -> Response:
        """Ends one request (`rid`) or all (`abort_all`). Answers 200 even if there was none."""
        body = _body(asked, AbortBody)
        if body.abort_all == bool(body.rid):
            raise wrong("rid", "Give either 'rid' or 'abort_all': true")
        self._service.manager.abort(body.rid)
        return json_answer({"aborted": body.rid or "all"})

    # ---- pieces ---------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _operation(self, what: str, *, refuses: bool) -> AsyncIterator[None]:
        """The only operation. New requests are refused or held back. Raises ApiError: 409 if another runs, 503."""
        state = self._service.state
        if state.operation is not None:
            raise ApiError(409, f"Another operation is running: {state.operation}", code="conflict")
        if not state.ready:
            raise ApiError(503, "The model is still loading")
        state.operation, state.pausing, state.holding = what, refuses, not refuses
        try:
            yield
        finally:
            state.operation, state.pausing, state.holding = None, False, False

    async def _carry_out(
        self,
        question: Callable[[str], messages.AdminReq],
        on_ok: Callable[[int], object],
        ranks: Sequence[int],
        *,
        abort: bool = False,
    ) -> None:
        """Asks these ranks until no request runs there; calls `on_ok` for each that has done it. Raises ApiError."""
        manager, replies, left = self._service.manager, dict[int, messages.Reply](), list(ranks)
        while True:
            if abort:
                manager.abort("")
            if len(left) > 1 and any(rank.running for rank in manager.ranks):  # all begin together, or none yet
                await asyncio.sleep(POLL_S)
                continue
            replies |= await _to_its_end(self._attempt(question, on_ok, left))
            left = [rank for rank, reply in replies.items() if _is_busy(reply)]
            _check({rank: reply for rank, reply in replies.items() if rank not in left}, len(ranks))
            if not left:
                return
            await asyncio.sleep(POLL_S)

    async def _attempt(
        self, question: Callable[[str], messages.AdminReq], on_ok: Callable[[int], object], ranks: Sequence[int]
    ) -> dict[int, messages.Reply]:
        """The schedulers are silent while loading, and count as alive for the loading timeout."""
        state, manager, limit_s = self._service.state, self._service.manager, self._args.start_timeout
        state.unheard = True
        try:
            replies = await self._replies(lambda rank: manager.ask(rank, question, timeout_s=limit_s), ranks)
        finally:
            state.unheard = False
            state.heartbeat_at = dict.fromkeys(state.heartbeat_at, time.monotonic())
        for rank, reply in replies.items():
            if reply.ok:
                on_ok(rank)
        return replies

    async def _replies(
        self, asking: Callable[[DpRank], Awaitable[messages.Reply]], ranks: Sequence[int] | None = None
    ) -> dict[int, messages.Reply]:
        """The answers of these ranks, or of all; a failure where none came."""
        all_ranks = self._service.manager.ranks

        async def answer(rank: int) -> messages.Reply:
            try:
                return await asking(all_ranks[rank])
            except NoReply as error:
                return messages.Reply("", ok=False, message=str(error), data=SILENT)

        asked = range(len(all_ranks)) if ranks is None else ranks
        return dict(zip(asked, await asyncio.gather(*map(answer, asked)), strict=True))


def _is_busy(reply: messages.Reply) -> bool:
    return "busy" in (reply.data or {})


def _check(replies: Mapping[int, messages.Reply], ranks: int | None = None) -> list[messages.Reply]:
    """The answers, all of success. Raises ApiError for the first rank that refused or did not answer, and says which
    ranks have done it. `ranks`: how many were asked, if others are still to answer."""
    failed = next((rank for rank, reply in replies.items() if not reply.ok), None)
    if failed is None:
        return list(replies.values())
    reply, several = replies[failed], (ranks or len(replies)) > 1
    done = ", ".join(str(rank) for rank, reply in replies.items() if reply.ok) or "none"
    told = f" (ranks that have done it: {done})" if several else ""
    if reply.data == SILENT:
        whose = f" of rank {failed}" if several else ""
        raise ApiError(503, f"The scheduler{whose} does not answer: {reply.message}{told}")
    said = f"Refused{f' by rank {failed}' if several else ''}: {reply.message}{told}"
    raise ApiError(400, said, code="cache_busy" if _is_busy(reply) else "refused")


async def _to_its_end(work: Awaitable[T]) -> T:
    """Waits for `work` even when cancelled: the end of what the scheduler has begun must be known."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


def _query(asked: ApiRequest, type: type[Any] = NoFields) -> Any:
    """Typed URL parameters of a request without a body. Raises ApiError 400."""
    found = _parameters(asked, type)
    _fields(asked, NoFields)
    return found


def _body(asked: ApiRequest, type: type[Any]) -> Any:
    """The typed body of a request without URL parameters. Raises ApiError 400."""
    _parameters(asked, NoFields)
    return _fields(asked, type)


def _parameters(asked: ApiRequest, type: type[Any]) -> Any:
    check_unknown(asked.query_params, type.__struct_fields__)
    try:
        return msgspec.convert(dict(asked.query_params), type, strict=False)
    except msgspec.ValidationError as error:
        raise as_api_error(error) from None


def _fields(asked: ApiRequest, type: type[Any]) -> Any:
    raw = asked.json_object()
    check_unknown(raw, type.__struct_fields__)
    return convert(raw, type)
