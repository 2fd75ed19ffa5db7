"""Errors made by Envoy itself, in the shapes that clients of OpenAI and Anthropic parse: how one is written, and when
it applies."""

from __future__ import annotations

from typing import Final

from envoy_data_plane.envoy.config.accesslog import v3 as accesslog_v3
from envoy_data_plane.envoy.config.core import v3 as core_v3
from envoy_data_plane.envoy.config.route import v3 as route_v3
from envoy_data_plane.envoy.extensions.access_loggers.filters.cel.v3 import ExpressionFilter
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import ResponseMapper
from envoy_data_plane.envoy.type.matcher.v3 import StringMatcher
from envoy_data_plane.google.protobuf import Any, Struct
from treeline_wire.openai_errors import error_body


def reply(
    when: accesslog_v3.AccessLogFilter,
    message: str,
    kind: str,
    code: str,
    *,
    retry_after: str = "",
    as_status: int | None = None,
) -> list[ResponseMapper]:
    """The answer where `when` holds: OpenAI's `message`, `type` (`kind`) and `code`; before it Anthropic's, for who
    asks at its paths."""

    def mapper(filter: accesslog_v3.AccessLogFilter, body: dict[str, object]) -> ResponseMapper:
        return ResponseMapper(
            filter=filter,
            status_code=as_status,
            body_format_override=core_v3.SubstitutionFormatString(json_format=Struct.from_dict(body)),
            headers_to_add=[header("retry-after", retry_after)] if retry_after else [],
        )

    theirs = _ANTHROPICS.get(code) or _ANTHROPICS.get(kind, kind)
    return [
        mapper(_both(_at_messages(), when), {"type": "error", "error": {"type": theirs, "message": message}}),
        mapper(when, error_body(message, kind, code=code)),
    ]


_ANTHROPICS: Final = {
    "gateway_failed": "api_error",
    "not_found": "not_found_error",
    "request_too_large": "request_too_large",
    "service_unavailable": "overloaded_error",
}
"""What Anthropic's API calls a code or a type of error, where it is another name."""


def _at_messages() -> accesslog_v3.AccessLogFilter:
    """Replies to requests of Anthropic's clients."""
    path = route_v3.HeaderMatcher(name=":path", string_match=StringMatcher(prefix="/v1/messages"))
    return accesslog_v3.AccessLogFilter(header_filter=accesslog_v3.HeaderFilter(header=path))


def _both(*filters: accesslog_v3.AccessLogFilter) -> accesslog_v3.AccessLogFilter:
    return accesslog_v3.AccessLogFilter(and_filter=accesslog_v3.AndFilter(filters=list(filters)))


def status(code: int) -> accesslog_v3.AccessLogFilter:
    """Replies with this status, whoever made them."""
    value = core_v3.RuntimeUInt32(default_value=code, runtime_key=f"treeline.reply.{code}")
    return accesslog_v3.AccessLogFilter(
        status_code_filter=accesslog_v3.StatusCodeFilter(comparison=accesslog_v3.ComparisonFilter(value=value))
    )


def expression(cel: str) -> accesslog_v3.AccessLogFilter:
    """Replies for which an expression in CEL holds. `response.code_details` says which part of Envoy made it; those
    of the picker begin with `treeline_`."""
    typed = Any.pack(ExpressionFilter(expression=cel))
    extension = accesslog_v3.ExtensionFilter(name="envoy.access_loggers.extension_filters.cel", typed_config=typed)
    return accesslog_v3.AccessLogFilter(extension_filter=extension)


def header(name: str, value: str) -> core_v3.HeaderValueOption:
    """A header that takes the place of one that is there."""
    return core_v3.HeaderValueOption(
        header=core_v3.HeaderValue(key=name, value=value),
        append_action=core_v3.HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD,
    )


def anything_else() -> list[ResponseMapper]:
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
