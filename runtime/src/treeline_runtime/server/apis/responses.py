"""`POST /v1/responses`. Nothing is stored: an answer is given once."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Response

from treeline_runtime.server import schema
from treeline_runtime.server.apis import answering, answers
from treeline_runtime.server.apis.responses_events import ResponseEvents
from treeline_runtime.server.apis.responses_fields import ResponsesBody
from treeline_runtime.server.dependencies import Converting, Generating, ReadingRoute
from treeline_runtime.server.http import Answer
from treeline_runtime.server.jobs import Answered, ResponsesTask
from treeline_runtime.server.service import Service

router = APIRouter(route_class=ReadingRoute)


@router.post(
    "/v1/responses",
    **schema.operation(
        tag=schema.OPENAI,
        summary="Answer a chat, as items",
        body=ResponsesBody,
        answer=answers.ResponseObject,
        event=answers.ResponseEvent,
    ),
)
async def responses(asked: Generating) -> Response:
    service = asked.service
    service.admit_for(asked, "generate")
    task = await service.read(asked, "responses", ResponsesTask)
    inflight = await service.open(task.chat.job, asked, answer_bytes=3 * len(task.shown))
    events = ResponseEvents(task.chat.job, _members(service, task), task.shown)
    if not task.chat.streaming.on:
        return await answering.whole(service, task.chat, inflight, events)
    return await answering.stream(asked, task.chat, inflight, events, events.failed)


@router.post(
    "/v1/responses/input_tokens",
    **schema.operation(
        tag=schema.OPENAI,
        summary="How many tokens the prompt of a chat has",
        body=ResponsesBody,
        answer=answers.InputTokens,
    ),
)
async def input_tokens(asked: Converting) -> Response:
    """How many tokens the prompt of such a request has."""
    return Answer((await asked.service.read(asked, "input_tokens", Answered)).body)


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
