"""The refusals of requests: an answer to the client, never a failure of the picker.

Every expected condition is one of these, so that a proxy never sees a gRPC error for it (which would hand the request
to fail-open). The table of statuses and reasons is the one that other endpoint pickers publish.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
from treeline_wire.anthropic_errors import anthropic_error_body, is_anthropics
from treeline_wire.ollama_errors import is_ollamas, ollama_error_body
from treeline_wire.openai_errors import error_body, no_such_model

from treeline_epp.picking.decision import PickError

DROPPED_REASON = "x-llm-d-request-dropped-reason"
"""Response header naming, for machines, why a request was dropped."""
_TYPES = {429: "rate_limit_error", 500: "server_error", 503: "service_unavailable"}
"""OpenAI's types of errors, by status; every other status is the request's own fault."""


class Refusal(msgspec.Struct, frozen=True, gc=False):
    """An HTTP answer instead of a destination, in the error shape of the API that was asked.

    `status` is an HTTP status, `code` OpenAI's error code (also the label of the refusals metric), `reason` the
    machine-readable dropped reason, `retry_after_s` whole seconds, `extra_headers` further response headers.
    """

    status: int
    message: str
    code: str
    param: str | None = None
    reason: str | None = None
    retry_after_s: int | None = None
    extra_headers: tuple[tuple[str, bytes], ...] = ()

    def headers(self) -> list[tuple[str, bytes]]:
        """Return the response headers, without those of the body."""
        out = [("content-type", b"application/json")]
        if self.reason is not None:
            out.append((DROPPED_REASON, self.reason.encode()))
        if self.retry_after_s is not None:
            out.append(("retry-after", str(self.retry_after_s).encode()))
        return [*out, *self.extra_headers]

    def body(self, path: str = "") -> bytes:
        """Return the JSON body. `path`: the request's, without its query; "" if unknown."""
        if is_anthropics(path):
            return msgspec.json.encode(anthropic_error_body(self.status, self.message))
        if is_ollamas(path):
            return msgspec.json.encode(ollama_error_body(self.message))
        kind = _TYPES.get(self.status, "invalid_request_error")
        return msgspec.json.encode(error_body(self.message, kind, param=self.param, code=self.code))


def bad_request(message: str, *, param: str | None = None, code: str = "invalid_request") -> Refusal:
    """400: the request itself is wrong; `param` names the field."""
    return Refusal(400, message, code, param=param)


def model_not_found(model: str, served: Sequence[str]) -> Refusal:
    """404: no pool serves `model`; `served` are the models that the client can ask for."""
    return Refusal(404, no_such_model(model, served), "model_not_found", param="model")


def not_kept_apart(why: str) -> Refusal:
    """400: the client has a cache of its own, but an engine here needs a salt, and none can be written."""
    message = f"This request cannot be kept apart from other clients' (gateway.isolation is PerKey): {why}."
    return Refusal(400, message, "not_kept_apart")


def path_not_served() -> Refusal:
    """404: the engine behind the request's model does not serve this method and path to clients."""
    message = "The engine of this model serves nothing by this method and path."
    return Refusal(404, message, "not_found")


def too_many_requests(why: str) -> Refusal:
    """429: the client has reached a limit; `why` says which."""
    return Refusal(429, f"{why}, which is as much as it may have.", "too_many_requests", retry_after_s=1)


def body_too_large(limit: int) -> Refusal:
    """413: more than `limit` bytes of body."""
    return Refusal(413, f"The request body is larger than {limit} bytes.", "request_too_large")


def no_room(limit: int) -> Refusal:
    """503: the bodies of other requests use up the `limit` bytes that the picker keeps for them."""
    message = f"The endpoint picker holds request bodies of {limit} bytes already, which is its limit; try again later."
    return Refusal(503, message, "too_many_bodies", reason="rejected-too-many-bodies", retry_after_s=1)


def no_prefill() -> Refusal:
    """503: several prefill endpoints failed, and the endpoints that were to answer compute no prompts."""
    message = "No endpoint has computed the prompt of this request; try again later."
    return Refusal(503, message, "no_prefill", reason="rejected-no-endpoints", retry_after_s=1)


def client_gone() -> Refusal:
    """503, which no client gets: the client that waited for a decision has left."""
    return Refusal(503, "The client has gone.", "client_gone", reason="rejected-context-cancelled")


def of_pick(error: PickError) -> Refusal:
    """Convert the picker's error: 429 with a hint when to come back, 503 when no endpoint is ready, else 500."""
    if error.status == 500:
        return internal_error()
    wait = max(1, math.ceil(error.retry_after_s))
    return Refusal(error.status, str(error), error.code, None, error.reason, wait, error.headers)


def internal_error() -> Refusal:
    """500: our mistake; the log has the details."""
    return Refusal(500, "The endpoint picker failed on this request.", "internal_error")
