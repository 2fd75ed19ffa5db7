"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's API."""

from __future__ import annotations

from fastapi import APIRouter, Response

from treeline_runtime.server import operations
from treeline_runtime.server.apis import answering
from treeline_runtime.server.apis.anthropic_events import MessageEvents
from treeline_runtime.server.apis.errors import anthropic_error
from treeline_runtime.server.dependencies import Converting, Generating
from treeline_runtime.server.http import Answer, named_event
from treeline_runtime.server.jobs import Answered, MessagesTask

router = APIRouter()


@router.post("/v1/messages", **operations.MESSAGES)
async def messages(asked: Generating) -> Response:
    service = asked.service
    service.admit_for(asked, "generate")
    task = await service.read(asked, "messages", MessagesTask)
    inflight = await service.open(task.chat.job, asked)
    events = MessageEvents(task.chat.job, service.model_name, fills_context=task.fills_context)
    if not task.chat.streaming.on:
        return await answering.whole(service, task.chat, inflight, events)
    return await answering.stream(asked, task.chat, inflight, events, lambda error: named_event(anthropic_error(error)))


@router.post("/v1/messages/count_tokens", **operations.COUNT_TOKENS)
async def count_tokens(asked: Converting) -> Response:
    """How many tokens the prompt of such a request has."""
    return Answer((await asked.service.read(asked, "count_tokens", Answered)).body)
