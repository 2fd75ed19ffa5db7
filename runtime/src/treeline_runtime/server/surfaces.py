"""Which listener serves what: inference and information, metrics, administration. A path is served by one of them."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Collection

from treeline_runtime.models.pooling import Task
from treeline_runtime.server import native, operations, vectors
from treeline_runtime.server.access import admin_key, api_key, read_only
from treeline_runtime.server.administration import Administration
from treeline_runtime.server.apis import operations as api_operations
from treeline_runtime.server.apis.anthropic import count_tokens, messages
from treeline_runtime.server.apis.errors import ANTHROPIC_ERRORS
from treeline_runtime.server.apis.responses import input_tokens, responses
from treeline_runtime.server.app import Handler, Route, Surface
from treeline_runtime.server.chat import chat_completions
from treeline_runtime.server.completions import completions
from treeline_runtime.server.http import OPENAI_ERRORS, ErrorShape, Request, Response
from treeline_runtime.server.limits import MAX_BODY_BYTES
from treeline_runtime.server.probes import Probes
from treeline_runtime.server.schema import Operation
from treeline_runtime.server.service import Service

ServiceHandler = Callable[[Service, Request], Awaitable[Response | None]]
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
"""SGLang's paths of administration that do less than ours, and what there is in their place."""


def inference(
    service: Service,
    probes: Probes,
    *,
    key: str | None,
    metrics_at: str | None,
    admin_at: str | None,
    documented: bool,
) -> Surface:
    """The API, the probes, what pickers and routers read, and what all this is (`documented`). `metrics_at` and
    `admin_at` are the URLs of the other listeners, None where they are off; somebody who asks here for what they serve
    is told.
    """

    def generating(
        handler: ServiceHandler, operation: Operation, *tasks: Task, errors: ErrorShape = OPENAI_ERRORS
    ) -> Route:
        bound = functools.partial(_for_tasks, service, handler, tasks or ("generate",))
        return Route(bound, generates=True, max_body=MAX_BODY_BYTES, errors=errors, operation=operation)

    def converting(handler: ServiceHandler, operation: Operation, errors: ErrorShape = OPENAI_ERRORS) -> Route:
        bound = functools.partial(handler, service)
        return Route(bound, max_body=MAX_BODY_BYTES, errors=errors, operation=operation)

    tokenize = converting(native.tokenize, operations.TOKENIZE)
    detokenize = converting(native.detokenize, operations.DETOKENIZE)
    routes = {
        ("POST", "/v1/chat/completions"): generating(chat_completions, operations.CHAT),
        ("POST", "/v1/completions"): generating(completions, operations.COMPLETION),
        **_api_routes(generating, converting),
        ("POST", "/generate"): generating(native.generate, operations.GENERATE),
        **_vector_routes(generating),
        ("GET", "/v1/models"): Route(probes.models, operation=operations.MODELS),
        ("GET", "/v1/models/{model:path}"): Route(probes.model, operation=operations.MODEL),
        ("GET", "/v1/loads"): Route(probes.loads, operation=operations.LOADS),
        ("GET", "/load"): Route(probes.load, operation=operations.LOAD),
        ("GET", "/version"): _info(probes.version, operations.VERSION),
        ("POST", "/tokenize"): tokenize,
        ("POST", "/detokenize"): detokenize,
        ("POST", "/v1/tokenize"): tokenize,
        ("POST", "/v1/detokenize"): detokenize,
        **_probe_routes(probes),
        ("GET", "/treeline/tokenizer"): _info(probes.tokenizer, operations.TOKENIZER),
    }
    served_by_other = {path: _served_by_other(path, "administration", "--admin-port", admin_at) for path in ADMIN_PATHS}
    served_by_other |= SAID_OTHERWISE
    served_by_other[METRICS_PATH] = _served_by_other(METRICS_PATH, "metrics", "--metrics-port", metrics_at)
    return Surface(routes, api_key(key), served_by_other, documented)


def _info(handler: Handler, operation: Operation) -> Route:
    """Told to everybody."""
    return Route(handler, open=True, operation=operation)


def _probe_routes(probes: Probes) -> dict[tuple[str, str], Route]:
    """How it is, and what it serves."""
    ready = _info(probes.ready, operations.READY)
    model_info = _info(probes.model_info, operations.MODEL_INFO)
    server_info = _info(probes.server_info, operations.SERVER_INFO)
    return {
        ("GET", "/live"): _info(probes.live, operations.LIVE),
        ("GET", "/ready"): ready,
        ("GET", "/health"): ready,
        ("GET", "/ping"): ready,
        ("GET", "/health_generate"): Route(probes.health_generate, generates=True, operation=operations.WORKS),
        ("GET", "/model_info"): model_info,
        ("GET", "/get_model_info"): model_info,
        ("GET", "/server_info"): server_info,
        ("GET", "/get_server_info"): server_info,
    }


def _api_routes(generating: Callable[..., Route], converting: Callable[..., Route]) -> dict[tuple[str, str], Route]:
    """Chats in the words of other APIs."""
    counting = converting(count_tokens, api_operations.COUNT_TOKENS, ANTHROPIC_ERRORS)
    return {
        ("POST", "/v1/responses"): generating(responses, api_operations.RESPONSES),
        ("POST", "/v1/responses/input_tokens"): converting(input_tokens, api_operations.INPUT_TOKENS),
        ("POST", "/v1/messages"): generating(messages, api_operations.MESSAGES, errors=ANTHROPIC_ERRORS),
        ("POST", "/v1/messages/count_tokens"): counting,
    }


def _vector_routes(route: Callable[..., Route]) -> dict[tuple[str, str], Route]:
    """Paths in the spellings of OpenAI, vLLM, Jina and Cohere, each for the tasks that it can be asked of."""
    pooling = route(vectors.pooling, operations.POOLING, "embed", "score", "reward")
    classify = route(vectors.classify, operations.CLASSIFY, "reward", "score")
    score = route(vectors.score, operations.SCORE, "score")
    rerank = route(vectors.rerank, operations.RERANK, "score")
    return {
        ("POST", "/v1/embeddings"): route(vectors.embeddings, operations.EMBEDDINGS, "embed"),
        ("POST", "/pooling"): pooling,
        **dict.fromkeys([("POST", path) for path in ("/classify", "/v1/classify")], classify),
        **dict.fromkeys([("POST", path) for path in ("/score", "/v1/score")], score),
        **dict.fromkeys([("POST", path) for path in ("/rerank", "/v1/rerank", "/v2/rerank")], rerank),
    }


async def _for_tasks(
    service: Service, handler: ServiceHandler, tasks: Collection[Task], request: Request
) -> Response | None:
    service.check_task(request.path, tasks)
    return await handler(service, request)


def metrics(probes: Probes) -> Surface:
    """Prometheus' page, for whoever can connect."""
    return Surface({("GET", METRICS_PATH): Route(probes.metrics)}, read_only)


def administration(
    service: Service, probes: Probes, engine: Administration, *, key: str | None, loopback: bool
) -> Surface:
    """What changes the server for everybody, or shows what others have asked. Nothing that changes it is a GET: a link
    must not do that. Some paths have a second name, vLLM's or SGLang's.
    """
    flush_cache = Route(functools.partial(native.flush_cache, service))
    update_weights = Route(engine.update_weights)
    routes = {
        ("POST", "/flush_cache"): flush_cache,
        ("POST", "/reset_prefix_cache"): flush_cache,
        ("POST", "/abort_request"): Route(functools.partial(native.abort_request, service)),
        ("POST", "/sleep"): Route(engine.sleep),
        ("POST", "/wake_up"): Route(engine.wake_up),
        ("GET", "/is_sleeping"): Route(engine.is_sleeping),
        ("POST", "/update_weights"): update_weights,
        ("POST", "/update_weights_from_disk"): update_weights,
        ("POST", "/start_profile"): Route(engine.start_profile),
        ("POST", "/stop_profile"): Route(engine.stop_profile),
        ("GET", "/debug/radix"): Route(probes.debug_radix),
    }
    return Surface(routes, admin_key(key, loopback=loopback), SAID_OTHERWISE)


def _served_by_other(path: str, what: str, flag: str, url: str | None) -> str:
    if url is None:
        return f"{path} is not served: {what} has a listener of its own, which is off ({flag})"
    return f"{path} is not served here: {what} has a listener of its own, {url} ({flag})"
