"""Errors made by Envoy itself, in the shapes that clients of OpenAI and Anthropic parse: how one is written, and when
it applies."""

from __future__ import annotations

from typing import Final

from treeline_wire.openai_errors import error_body

from treeline_operator.envoy.messages import Message, extension

_ANTHROPICS: Final = {
    "gateway_failed": "api_error",
    "not_found": "not_found_error",
    "request_too_large": "request_too_large",
    "service_unavailable": "overloaded_error",
}
"""What Anthropic's API calls a code or a type of error, where it is another name."""
_AT_MESSAGES: Final[Message] = {
    "header_filter": {"header": {"name": ":path", "string_match": {"prefix": "/v1/messages"}}}
}
"""Replies to requests of Anthropic's clients."""


def reply(
    when: Message, message: str, kind: str, code: str, *, retry_after: str = "", as_status: int | None = None
) -> list[Message]:
    """The answer where `when` holds: OpenAI's `message`, `type` (`kind`) and `code`; before it Anthropic's, for who
    asks at its paths."""
    more: Message = {} if as_status is None else {"status_code": as_status}
    if retry_after:
        more["headers_to_add"] = [header("retry-after", retry_after)]
    theirs = _ANTHROPICS.get(code) or _ANTHROPICS.get(kind, kind)
    at_messages = {"and_filter": {"filters": [_AT_MESSAGES, when]}}
    return [
        {"filter": on, "body_format_override": {"json_format": body}, **more}
        for on, body in (
            (at_messages, {"type": "error", "error": {"type": theirs, "message": message}}),
            (when, error_body(message, kind, code=code)),
        )
    ]


def status(code: int) -> Message:
    """Replies with this status, whichever part of Envoy made them."""
    value = {"default_value": code, "runtime_key": f"treeline.reply.{code}"}
    return {"status_code_filter": {"comparison": {"value": value}}}


def expression(cel: str) -> Message:
    """Replies for which an expression in CEL holds. `response.code_details` says which part of Envoy made it; those
    of the picker begin with `treeline_`."""
    kind = "extensions.access_loggers.filters.cel.v3.ExpressionFilter"
    return {"extension_filter": extension("access_loggers.extension_filters.cel", kind, {"expression": cel})}


def header(name: str, value: str) -> Message:
    """A header that takes the place of one that is there."""
    return {"header": {"key": name, "value": value}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}


def anything_else() -> list[Message]:
    """Last: what no other mapper knows, such as a request that is no HTTP, or a path that cannot be normalized."""
    not_ours = '!response.code_details.startsWith("treeline_")'
    return [
        *reply(
            expression(f"response.code >= 400 && response.code < 500 && {not_ours}"),
            "The gateway refuses this request: it is not HTTP as the gateway speaks it.",
            "invalid_request_error",
            "bad_request",
        ),
        *reply(
            expression(f"response.code >= 500 && {not_ours}"),
            "The gateway cannot serve this request.",
            "service_unavailable",
            "gateway_failed",
        ),
    ]
