"""The dependencies that every request passes before its endpoint."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
from fastapi import APIRouter
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from treeline_runtime.server import chat, completions, native, vectors
from treeline_runtime.server.apis import anthropic_events, responses_events


def calls(dependant: Dependant) -> Iterator[object]:
    for each in dependant.dependencies:
        yield each.call
        yield from calls(each)


@pytest.mark.parametrize("module", [chat, completions, native, vectors, responses_events, anthropic_events])
def test_no_dependency_is_handed_to_a_thread(module: object) -> None:
    router: APIRouter = module.router  # type: ignore[attr-defined]
    found = [call for route in router.routes if isinstance(route, APIRoute) for call in calls(route.dependant)]
    assert found
    for call in found:
        assert inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__), call
