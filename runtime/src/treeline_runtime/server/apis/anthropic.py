"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's API."""

from __future__ import annotations

from treeline_runtime.server.apis import answering
from treeline_runtime.server.apis.anthropic_events import MessageEvents
from treeline_runtime.server.http import Request, Response
from treeline_runtime.server.jobs import Answered, MessagesTask
from treeline_runtime.server.service import Service


async def messages(service: Service, request: Request) -> Response | None:
    service.admit()
    task = await service.read(request, "messages", MessagesTask)
    inflight = await service.open(task.chat.job, request)
    try:
        events = MessageEvents(task.chat.job, service.model_name, fills_context=task.fills_context)
        if not task.chat.streaming.on:
            return await answering.whole(service, task.chat, inflight, events)
        await answering.stream(service, request, task.chat, inflight, events)
        return None
    finally:
        inflight.close()


async def count_tokens(service: Service, request: Request) -> Response:
    """How many tokens the prompt of such a request has."""
    return Response((await service.read(request, "count_tokens", Answered)).body)
