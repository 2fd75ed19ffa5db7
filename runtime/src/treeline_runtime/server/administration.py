"""Administration of the whole engine: sleep, new weights, profiles. On the admin listener only.

One operation at a time. The caller chooses what happens to running requests: `sleep` ends them or waits, and refuses
new ones (as in vLLM); `update_weights` waits or ends them, and holds new ones back until the new weights are loaded (as
in SGLang). Once the scheduler has begun, an operation continues even if the caller disconnects.

The scheduler is asked only after requests are refused or held back.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Response
from msgspec import Meta, Struct

from treeline_runtime.args import ServerArgs
from treeline_runtime.messages import (
    MAX_PROFILE_STEPS,
    AdminReq,
    Reply,
    SleepReq,
    StartProfileReq,
    StopProfileReq,
    UpdateWeightsReq,
    WakeReq,
)
from treeline_runtime.server.dependencies import Controlling
from treeline_runtime.server.errors import ApiError
from treeline_runtime.server.fields import as_api_error, check_unknown, convert
from treeline_runtime.server.http import Answer, ApiRequest, json_answer
from treeline_runtime.server.service import Service
from treeline_runtime.tokenizer_manager import NoReply

NO_WEIGHTS = 2
"""A level of sleep."""
POLL_S = 0.05
"""Seconds between two checks whether requests still run."""
_NAME_CHARS = 256


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


class ProfileBody(Struct, frozen=True):
    num_steps: Annotated[int, Meta(ge=1, le=MAX_PROFILE_STEPS)] = 100


class Administration:
    """The handlers; they change `service.state`."""

    def __init__(self, service: Service, args: ServerArgs) -> None:
        self._service = service
        self._args = args

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
        _no_body(asked)
        state = self._service.state

        def asleep(_: Reply) -> None:
            state.asleep = query.level

        async with self._operation("going to sleep", refuses=True):
            await self._carry_out(lambda id: SleepReq(id, query.level), asleep, abort=query.mode == "abort")
        return json_answer({"asleep": query.level})

    async def wake_up(self, asked: Controlling) -> Response:
        """Wakes up with an empty cache."""
        _query(asked, NoFields)
        _no_body(asked)
        state = self._service.state

        def awake(_: Reply) -> None:
            state.asleep = 0

        async with self._operation("waking up", refuses=True):
            await self._carry_out(WakeReq, awake)
        return json_answer({"asleep": 0})

    async def is_sleeping(self, asked: Controlling) -> Response:
        """vLLM's."""
        _query(asked, NoFields)
        return json_answer({"is_sleeping": bool(self._service.state.asleep)})

    async def update_weights(self, asked: Controlling) -> Response:
        """Loads another checkpoint of the same architecture; after a failure the old weights stay."""
        _query(asked, NoFields)
        body = _body(asked, UpdateBody)
        state = self._service.state

        def updated(_: Reply) -> None:
            state.model_path = body.model_path
            state.asleep = state.asleep and NO_WEIGHTS  # what the host kept were the old ones
            state.weight_version = body.weight_version or body.model_path[-_NAME_CHARS:]

        started = time.monotonic()
        async with self._operation("loading new weights", refuses=False):
            await self._carry_out(
                lambda id: UpdateWeightsReq(id, body.model_path), updated, abort=body.abort_all_requests
            )
        seconds = time.monotonic() - started
        return json_answer({"success": True, "weight_version": state.weight_version, "seconds": seconds})

    async def start_profile(self, asked: Controlling) -> Response:
        """Traces the scheduler's next `num_steps` steps into a file in a new folder under TMPDIR."""
        _query(asked, NoFields)
        body = _body(asked, ProfileBody)
        try:
            folder = tempfile.mkdtemp(prefix="treeline-profile-")
        except OSError as error:
            raise ApiError(503, f"There is no folder for a profile (TMPDIR): {error}", type="server_error") from None
        # A scheduler that does not answer may begin yet: then the folder stays.
        reply = await self._reply(self._service.manager.ask(lambda id: StartProfileReq(id, folder, body.num_steps)))
        if not reply.ok:
            os.rmdir(folder)
            raise _refused(reply)
        return json_answer({"num_steps": body.num_steps, "folder": folder})

    async def stop_profile(self, asked: Controlling) -> Response:
        """Ends the profile before its last step; answers with the trace's file."""
        _query(asked, NoFields)
        _no_body(asked)
        reply = await self._reply(self._service.manager.ask(StopProfileReq))
        if not reply.ok:
            raise _refused(reply)
        return json_answer(reply.data)

    async def flush_cache(self, asked: Controlling) -> Response:
        """Empties the prefix cache; 400 while requests run. `?timeout=S` waits up to S seconds for them."""
        deadline = time.monotonic() + _query(asked, FlushQuery).timeout
        _no_body(asked)
        while True:
            reply = await self._reply(self._service.manager.flush())
            if reply.ok:
                return Answer(b"Cache flushed.\n", content_type=b"text/plain; charset=utf-8")
            if time.monotonic() >= deadline:
                raise ApiError(400, reply.message or "The cache is in use", code="cache_busy")
            await asyncio.sleep(POLL_S)

    async def abort_request(self, asked: Controlling) -> Response:
        """Ends one request (`rid`) or all (`abort_all`). Answers 200 even if there was none."""
        _query(asked, NoFields)
        body = _body(asked, AbortBody)
        if body.abort_all == bool(body.rid):
            raise ApiError(400, "Give either 'rid' or 'abort_all': true", param="rid")
        self._service.manager.abort(body.rid)
        return json_answer({"aborted": body.rid or "all"})

    # ---- pieces ---------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _operation(self, what: str, *, refuses: bool) -> AsyncIterator[None]:
        """The only running operation. New requests are refused or held back meanwhile. Raises ApiError: 409 if another
        runs, 503."""
        state = self._service.state
        if state.operation is not None:
            raise ApiError(409, f"Another operation is running: {state.operation}", code="conflict")
        if not state.ready:
            raise ApiError(503, "The model is still loading", type="server_error")
        state.operation, state.pausing, state.holding = what, refuses, not refuses
        try:
            yield
        finally:
            state.operation, state.pausing, state.holding = None, False, False

    async def _carry_out(
        self, question: Callable[[str], AdminReq], on_ok: Callable[[Reply], None], *, abort: bool = False
    ) -> None:
        """Asks until no request runs. Raises ApiError if the scheduler refuses."""
        while True:
            if abort:
                self._service.manager.abort("")
            reply = await _to_its_end(self._attempt(question, on_ok))
            if reply.ok:
                return
            if not (reply.data or {}).get("busy"):
                raise _refused(reply)
            await asyncio.sleep(POLL_S)

    async def _attempt(self, question: Callable[[str], AdminReq], on_ok: Callable[[Reply], None]) -> Reply:
        """The scheduler is silent while loading, and counts as alive for the loading timeout."""
        state = self._service.state
        state.unheard = True
        try:
            reply = await self._reply(self._service.manager.ask(question, timeout_s=self._args.start_timeout))
        finally:
            state.unheard = False
            state.heartbeat_at = dict.fromkeys(state.heartbeat_at, time.monotonic())
        if reply.ok:
            on_ok(reply)
        return reply

    @staticmethod
    async def _reply(asking: Awaitable[Reply]) -> Reply:
        try:
            return await asking
        except NoReply as error:
            raise ApiError(503, f"The scheduler does not answer: {error}", type="server_error") from None


async def _to_its_end(work: Awaitable[Reply]) -> Reply:
    """Waits for `work` even when cancelled: the end of what the scheduler has begun must be known."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


def _refused(reply: Reply) -> ApiError:
    return ApiError(400, f"Refused: {reply.message}", code="refused")


def _query(asked: ApiRequest, type: type[Any]) -> Any:
    """Typed URL parameters. Raises ApiError 400."""
    check_unknown(asked.query_params, frozenset(type.__struct_fields__))
    try:
        return msgspec.convert(dict(asked.query_params), type, strict=False)
    except msgspec.ValidationError as error:
        raise as_api_error(error) from None


def _body(asked: ApiRequest, type: type[Any]) -> Any:
    raw = asked.json_object()
    check_unknown(raw, frozenset(type.__struct_fields__))
    return convert(raw, type)


def _no_body(asked: ApiRequest) -> None:
    _body(asked, NoFields)
