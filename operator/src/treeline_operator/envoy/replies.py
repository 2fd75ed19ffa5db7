"""Errors made by Envoy itself, in the shape that OpenAI clients parse: how one is written, and when it applies."""

from __future__ import annotations

from envoy_data_plane.envoy.config.accesslog import v3 as accesslog_v3
from envoy_data_plane.envoy.config.core import v3 as core_v3
from envoy_data_plane.envoy.extensions.access_loggers.filters.cel.v3 import ExpressionFilter
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import ResponseMapper
from envoy_data_plane.google.protobuf import Any, Struct


def reply(
    when: accesslog_v3.AccessLogFilter,
    message: str,
    kind: str,
    code: str,
    *,
    retry_after: str = "",
    as_status: int | None = None,
) -> ResponseMapper:
    """The answer where `when` holds: OpenAI's `message`, `type` (`kind`) and `code`."""
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return ResponseMapper(
        filter=when,
        status_code=as_status,
        body_format_override=core_v3.SubstitutionFormatString(json_format=Struct.from_dict(body)),
        headers_to_add=[header("retry-after", retry_after)] if retry_after else [],
    )


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
        reply(
            expression(f"response.code >= 400 && response.code < 500 && {not_ours}"),
            "The gateway refuses this request: it is not HTTP as the gateway speaks it.",
            "invalid_request_error",
            "bad_request",
        ),
        reply(
            expression(f"response.code >= 500 && {not_ours}"),
            "The gateway cannot serve this request.",
            "service_unavailable",
            "gateway_failed",
        ),
    ]
