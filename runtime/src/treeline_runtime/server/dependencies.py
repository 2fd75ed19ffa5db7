"""What endpoints depend on: the request with its body, read within the bounds of its path."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import Depends, Request

from treeline_runtime.server.http import ApiRequest, while_connected
from treeline_runtime.server.limits import MAX_BODY_BYTES, MAX_CONTROL_BYTES, Reservation
from treeline_runtime.server.service import Service


def _reading(limit: int, *, generates: bool = False) -> Any:
    """Reads a body of at most `limit` bytes. Endpoint and answer are cancelled when the client leaves; what the request
    holds is given back when its answer has left. `generates`: a drain waits for it."""

    async def read(request: Request) -> AsyncIterator[ApiRequest]:
        service: Service = request.app.state.service
        asked = request.state.asked = ApiRequest(request.scope, request.receive, service)
        with contextlib.ExitStack() as stack:
            stack.callback(asked.release)
            if generates and service.tracing is not None:
                stack.enter_context(service.tracing.serving(asked))
            await asked.read_body(limit, Reservation(service.budget, asked.client))
            if generates:
                stack.enter_context(service.generating())
            async with while_connected(asked):
                yield asked

    return Depends(read)


Controlling = Annotated[ApiRequest, _reading(MAX_CONTROL_BYTES)]
"""Of endpoints that take no prompt."""
Converting = Annotated[ApiRequest, _reading(MAX_BODY_BYTES)]
Checking = Annotated[ApiRequest, _reading(MAX_CONTROL_BYTES, generates=True)]
Generating = Annotated[ApiRequest, _reading(MAX_BODY_BYTES, generates=True)]
