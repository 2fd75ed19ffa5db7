"""Which listener serves what: inference and information, metrics, administration. A path is served by one of them."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable

from treeline_runtime.server import native
from treeline_runtime.server.access import admin_key, api_key, read_only
from treeline_runtime.server.app import Handler, Route, Surface
from treeline_runtime.server.chat import chat_completions
from treeline_runtime.server.completions import completions
from treeline_runtime.server.http import Request, Response
from treeline_runtime.server.limits import MAX_BODY_BYTES
from treeline_runtime.server.probes import Probes
from treeline_runtime.server.service import Service

METRICS_PATH = "/metrics"
ADMIN_PATHS = ("/flush_cache", "/abort_request", "/debug/radix")


def inference(
    service: Service, probes: Probes, *, key: str | None, metrics_at: str | None, admin_at: str | None
) -> Surface:
    """The API, the probes, and what pickers and routers read. `metrics_at` and `admin_at` are the URLs of the other
    listeners, None where they are off; somebody who asks here for what they serve is told.
    """
    bound = functools.partial(_bound, service)
    model_info, server_info = Route(probes.model_info, open=True), Route(probes.server_info, open=True)
    ready = Route(probes.ready, open=True)
    tokenize = Route(bound(native.tokenize), max_body=MAX_BODY_BYTES)
    detokenize = Route(bound(native.detokenize), max_body=MAX_BODY_BYTES)
    routes = {
        ("POST", "/v1/chat/completions"): Route(
            bound(chat_completions), generates=True, max_body=MAX_BODY_BYTES
        ),
        ("POST", "/v1/completions"): Route(bound(completions), generates=True, max_body=MAX_BODY_BYTES),
        ("POST", "/generate"): Route(bound(native.generate), generates=True, max_body=MAX_BODY_BYTES),
        ("GET", "/v1/models"): Route(probes.models),
        ("GET", "/v1/loads"): Route(probes.loads),
        ("POST", "/tokenize"): tokenize,
        ("POST", "/detokenize"): detokenize,
        ("POST", "/v1/tokenize"): tokenize,
        ("POST", "/v1/detokenize"): detokenize,
        ("GET", "/live"): Route(probes.live, open=True),
        ("GET", "/ready"): ready,
        ("GET", "/health"): ready,
        ("GET", "/health_generate"): Route(probes.health_generate, generates=True),
        ("GET", "/model_info"): model_info,
        ("GET", "/get_model_info"): model_info,
        ("GET", "/server_info"): server_info,
        ("GET", "/get_server_info"): server_info,
        ("GET", "/treeline/tokenizer"): Route(probes.tokenizer, open=True),
    }
    served_by_other = {
        path: _served_by_other(path, "administration", "--admin-port", admin_at) for path in ADMIN_PATHS
    }
    served_by_other[METRICS_PATH] = _served_by_other(METRICS_PATH, "metrics", "--metrics-port", metrics_at)
    return Surface(routes, api_key(key), {"/v1/models/": Route(probes.model)}, served_by_other)


def metrics(probes: Probes) -> Surface:
    """Prometheus' page, for whoever can connect."""
    return Surface({("GET", METRICS_PATH): Route(probes.metrics)}, read_only)


def administration(service: Service, probes: Probes, *, key: str | None, loopback: bool) -> Surface:
    """What changes the server for everybody, or shows what others have asked. Nothing that changes it is a GET: a link
    must not do that.
    """
    bound = functools.partial(_bound, service)
    routes = {
        ("POST", "/flush_cache"): Route(bound(native.flush_cache)),
        ("POST", "/abort_request"): Route(bound(native.abort_request)),
        ("GET", "/debug/radix"): Route(probes.debug_radix),
    }
    return Surface(routes, admin_key(key, loopback=loopback))


def _bound(service: Service, handler: Callable[[Service, Request], Awaitable[Response | None]]) -> Handler:
    return functools.partial(handler, service)


def _served_by_other(path: str, what: str, flag: str, url: str | None) -> str:
    if url is None:
        return f"{path} is not served: {what} has a listener of its own, which is off ({flag})"
    return f"{path} is not served here: {what} has a listener of its own, {url} ({flag})"
