"""The applications of the listeners: inference and information, metrics, administration. Each path is in one only."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Security
from starlette.types import ASGIApp

from treeline_runtime.server import chat, completions, native, vectors
from treeline_runtime.server.administration import Administration
from treeline_runtime.server.apis import (
    anthropic_events,
    ollama_events,
    ollama_models,
    responses_events,
    transcription_events,
)
from treeline_runtime.server.app import application
from treeline_runtime.server.dependencies import AdminKey, ApiKey, Guarded, without_body
from treeline_runtime.server.probes import Probes
from treeline_runtime.server.service import Service

METRICS_PATH = "/metrics"
ADMIN_PATHS = (
    "/flush_cache",
    "/reset_prefix_cache",
    "/abort_request",
    "/sleep",
    "/wake_up",
    "/is_sleeping",
    "/update_weights",
    "/update_weights_from_disk",
    "/start_profile",
    "/stop_profile",
    "/debug/radix",
)
SAID_OTHERWISE = {
    "/release_memory_occupation": "There is no /release_memory_occupation: POST /sleep?level=1 gives up weights and KV "
    "cache together, level=2 without a copy of the weights",
    "/resume_memory_occupation": "There is no /resume_memory_occupation: POST /wake_up takes weights and KV cache back",
}
"""SGLang's administration paths that do less than ours, and their replacements."""


def inference(
    service: Service,
    probes: Probes,
    *,
    key: str | None,
    metrics_at: str | None,
    admin_at: str | None,
    allowed_origins: Sequence[str] = (),
) -> ASGIApp:
    """The API, probes, endpoints for pickers and routers, and the OpenAPI document. `metrics_at` and `admin_at`: URLs
    of the other listeners, None if off; 404s for their paths name them. `allowed_origins`: of web pages.
    """
    hints = {path: _served_by_other(path, "administration", "--admin-port", admin_at) for path in ADMIN_PATHS}
    hints |= SAID_OTHERWISE
    hints[METRICS_PATH] = _served_by_other(METRICS_PATH, "metrics", "--metrics-port", metrics_at)
    return application(
        service,
        ApiKey(key),
        [
            chat.router,
            completions.router,
            responses_events.router,
            anthropic_events.router,
            ollama_events.router,
            ollama_models.router(service, probes),
            transcription_events.router,
            native.router,
            vectors.router,
            probes.keyed_router,
            probes.router,
        ],
        hints=hints,
        documented=True,
        allowed_origins=allowed_origins,
    )


def metrics(service: Service, probes: Probes) -> ASGIApp:
    """Prometheus' page, without a key."""
    router = APIRouter(dependencies=[Security(Guarded())])
    router.add_api_route(METRICS_PATH, probes.metrics)
    return application(service, without_body, [router], hints={})


def administration(
    service: Service, probes: Probes, engine: Administration, *, key: str | None, loopback: bool
) -> ASGIApp:
    """Change the server for everybody, or show others' requests. Some paths have a second name, vLLM's or SGLang's."""
    guard = AdminKey(key, loopback=loopback)
    debugging = APIRouter(dependencies=[Security(Guarded())])
    debugging.add_api_route("/debug/radix", probes.debug_radix)
    return application(service, guard, [engine.router, debugging], hints=SAID_OTHERWISE)


def _served_by_other(path: str, what: str, flag: str, url: str | None) -> str:
    if url is None:
        return f"{path} is not served: {what} has its own port, which is off ({flag})"
    return f"{path} is not served here: {what} has its own port, {url} ({flag})"
