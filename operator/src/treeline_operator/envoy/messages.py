"""Envoy's messages as plain JSON: the parts that the modules here have in common.

A field that Envoy does not know makes it refuse the whole bootstrap (`envoy --mode validate`, which the tests run).
"""

from __future__ import annotations

import ipaddress
from typing import Any, Final

from treeline_wire.ollama_errors import ollama_error_body
from treeline_wire.openai_errors import error_body

Message = dict[str, Any]


def seconds(value: float) -> str:
    """A duration, in milliseconds at the finest."""
    return f"{value:.3f}".rstrip("0").rstrip(".") + "s"


def typed(kind: str, fields: Message | None = None) -> Message:
    """A message of type `kind` (package `envoy.…`) where Envoy takes any message."""
    return {"@type": f"type.googleapis.com/envoy.{kind}", **(fields or {})}


def extension(name: str, kind: str, fields: Message | None = None) -> Message:
    """An extension by its name, with its settings."""
    return {"name": f"envoy.{name}", "typed_config": typed(kind, fields)}


def http_filter(name: str, kind: str, fields: Message | None = None, **more: Any) -> Message:
    """An HTTP filter; `kind` is its message, without the package that all filters are in."""
    return {**extension(f"filters.http.{name}", f"extensions.filters.http.{kind}", fields), **more}


def http_manager(fields: Message) -> Message:
    """The network filter that speaks HTTP."""
    name = "filters.network.http_connection_manager"
    return extension(name, f"extensions.{name}.v3.HttpConnectionManager", fields)


def router(fields: Message | None = None) -> Message:
    """The last HTTP filter."""
    return http_filter("router", "router.v3.Router", fields)


def previous_hosts() -> Message:
    """Retry predicate: not a host that was tried before, within five draws."""
    kind = "extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
    return {
        "retry_host_predicate": [extension("retry_host_predicates.previous_hosts", kind)],
        "host_selection_retry_max_attempts": 5,
    }


def grpc_service(cluster: str, **more: Any) -> Message:
    """A gRPC service at a cluster."""
    return {"envoy_grpc": {"cluster_name": cluster}, **more}


def address(host: str, port: int) -> Message:
    """A TCP address."""
    return {"address": {"socket_address": {"address": host, "port_value": port}}}


def is_ip(host: str) -> bool:
    """Whether it is an IP address, not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def from_file(path: str) -> Message:
    """A source of configuration: a file that Envoy reads again when it is replaced by renaming."""
    return {"path_config_source": {"path": path}, "resource_api_version": "V3"}


_ANTHROPICS: Final = {
    "gateway_failed": "api_error",
    "not_found": "not_found_error",
    "request_too_large": "request_too_large",
    "service_unavailable": "overloaded_error",
}
"""Anthropic's names of codes and types of errors, where they differ."""


def _at(path: str, when: Message) -> Message:
    """Replies where `when` holds to requests of paths that begin with `path`."""
    begins = {"header_filter": {"header": {"name": ":path", "string_match": {"prefix": path}}}}
    return {"and_filter": {"filters": [begins, when]}}


def reply(
    when: Message, message: str, kind: str, code: str, *, retry_after: str = "", as_status: int | None = None
) -> list[Message]:
    """The reply where `when` holds: OpenAI's `message`, `type` (`kind`) and `code`, and before it Anthropic's and
    Ollama's for their paths."""
    more: Message = {} if as_status is None else {"status_code": as_status}
    if retry_after:
        more["headers_to_add"] = [header("retry-after", retry_after)]
    theirs = _ANTHROPICS.get(code) or _ANTHROPICS.get(kind, kind)
    return [
        {"filter": on, "body_format_override": {"json_format": body}, **more}
        for on, body in (
            (_at("/v1/messages", when), {"type": "error", "error": {"type": theirs, "message": message}}),
            (_at("/api/", when), ollama_error_body(message)),
            (when, error_body(message, kind, code=code)),
        )
    ]


def status(code: int) -> Message:
    """Replies with this status, whichever part of Envoy made them."""
    value = {"default_value": code, "runtime_key": f"treeline.reply.{code}"}
    return {"status_code_filter": {"comparison": {"value": value}}}


def expression(cel: str) -> Message:
    """Replies for which a CEL expression holds. `response.code_details` says which part of Envoy made the reply; the
    picker's begin with `treeline_`."""
    kind = "extensions.access_loggers.filters.cel.v3.ExpressionFilter"
    return {"extension_filter": extension("access_loggers.extension_filters.cel", kind, {"expression": cel})}


def header(name: str, value: str) -> Message:
    """A header that replaces an existing one."""
    return {"header": {"key": name, "value": value}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}


def anything_else() -> list[Message]:
    """The last mapper, for errors that no other knows, such as a malformed request or a path that cannot be
    normalized."""
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
