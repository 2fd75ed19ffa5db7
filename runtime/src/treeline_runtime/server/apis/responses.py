"""`POST /v1/responses`. Nothing is stored: an answer is given once."""

from __future__ import annotations

import time
from typing import Any

from treeline_runtime.server.apis import answering
from treeline_runtime.server.apis.responses_events import ResponseEvents
from treeline_runtime.server.http import ErrorShape, Request, Response
from treeline_runtime.server.jobs import Answered, ResponsesTask
from treeline_runtime.server.service import Service


async def responses(service: Service, request: Request) -> Response | None:
    service.admit()
    task = await service.read(request, "responses", ResponsesTask)
    inflight = await service.open(task.chat.job, request, answer_bytes=3 * len(task.shown))
    try:
        events = ResponseEvents(task.chat.job, _members(service, task), task.shown)
        if not task.chat.streaming.on:
            return await answering.whole(service, task.chat, inflight, events)
        request.errors = ErrorShape(request.errors.body, events.failed)
        await answering.stream(service, request, task.chat, inflight, events)
        return None
    finally:
        inflight.close()


async def input_tokens(service: Service, request: Request) -> Response:
    """How many tokens the prompt of such a request has."""
    return Response((await service.read(request, "input_tokens", Answered)).body)


def _members(service: Service, task: ResponsesTask) -> dict[str, Any]:
    """What of a response does not change."""
    return {
        "id": task.chat.job.rid,
        "object": "response",
        "created_at": int(time.time()),
        "model": service.model_name,
        "background": False,
        "max_tool_calls": None,
        "previous_response_id": None,
        "service_tier": "default",
        "store": False,
    }
