"""OpenAI's `/v1/responses`, of which nothing is stored, and Anthropic's `/v1/messages`."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Response

from treeline_runtime.server import schema
from treeline_runtime.server.apis import answering, answers
from treeline_runtime.server.apis.anthropic_events import MessageEvents
from treeline_runtime.server.apis.anthropic_fields import MessagesBody
from treeline_runtime.server.apis.errors import anthropic_error
from treeline_runtime.server.apis.responses_events import ResponseEvents
from treeline_runtime.server.apis.responses_fields import ResponsesBody
from treeline_runtime.server.dependencies import Converting, Generating, ReadingRoute
from treeline_runtime.server.http import Answer, named_event
from treeline_runtime.server.jobs import Answered, MessagesTask, ResponsesTask
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
    return await answering.answer(asked, task.chat, inflight, events, events.failed)


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


@router.post(
    "/v1/messages",
    **schema.operation(
        tag=schema.ANTHROPIC,
        summary="Answer a chat",
        body=MessagesBody,
        answer=answers.Message,
        event=answers.MessageEvent,
        error=answers.AnthropicError,
    ),
)
async def messages(asked: Generating) -> Response:
    service = asked.service
    service.admit_for(asked, "generate")
    task = await service.read(asked, "messages", MessagesTask)
    inflight = await service.open(task.chat.job, asked)
    events = MessageEvents(task.chat.job, service.model_name, fills_context=task.fills_context)
    return await answering.answer(asked, task.chat, inflight, events, lambda error: named_event(anthropic_error(error)))


@router.post(
    "/v1/messages/count_tokens",
    **schema.operation(
        tag=schema.ANTHROPIC,
        summary="How many tokens the prompt of a chat has",
        body=MessagesBody,
        answer=answers.TokenCount,
        error=answers.AnthropicError,
    ),
)
async def count_tokens(asked: Converting) -> Response:
    """How many tokens the prompt of such a request has."""
    return Answer((await asked.service.read(asked, "count_tokens", Answered)).body)


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
