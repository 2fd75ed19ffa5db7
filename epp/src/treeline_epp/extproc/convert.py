"""Conversion between the proxy's serialized messages and the session's own.

Messages are read by protobuf. Answers that are always the same are serialized once, those with a destination once per
destination list. A body is copied once, between the bytes that protobuf would have written around it, and never
decoded.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Final

from google.protobuf import json_format, struct_pb2
from treeline_wire import envoy_pb2 as pb
from treeline_wire import headers as names

from treeline_epp.extproc.state import BodyMode, Kind, Message, Reply
from treeline_epp.flow.settings import LONGEST_WAIT_S
from treeline_epp.protowire import field, field_head, field_numbers
from treeline_epp.requests.body import Body, Buffer, Immediate
from treeline_epp.requests.isolation import ROUTING_KEY
from treeline_epp.requests.subset import NOTHING, parse_subset

_OURS = (names.CACHED_TOKENS, names.PROMPT_TOKENS)
_OVERWRITE = pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
_KINDS: Mapping[str | None, Kind] = {kind.value: kind for kind in Kind}
_MODES: Mapping[int, BodyMode] = {mode.value: mode for mode in BodyMode}
USED_HEADERS: Final = frozenset(
    {
        ":authority",
        ":method",
        ":path",
        ":status",
        "content-encoding",
        "content-length",
        "content-type",
        names.CACHED_TOKENS,
        names.CLIENT,
        names.DESTINATION,
        names.FAIRNESS_ID,
        names.FAIRNESS_ID_LLMD,
        names.FORK,
        names.FORWARDED_FOR,
        names.ISOLATION,
        names.MODEL_REWRITE,
        names.MODEL_REWRITE_LLMD,
        names.OBJECTIVE,
        names.OBJECTIVE_LLMD,
        names.OVERLOADED,
        names.PROMPT_TOKENS,
        names.RANK,
        names.REQUEST_ID,
        names.SELECTION,
        names.SESSION_ID,
        names.TRACEPARENT,
        names.TRACESTATE,
        ROUTING_KEY,
        *names.ENGINES,
    }
)
"""The headers that every picker reads; other headers are not converted."""


class UnknownMessage(ValueError):
    """The proxy sent a message of a kind that this picker does not know; `observed` as in `Message`."""

    def __init__(self, text: str, observed: bool) -> None:
        super().__init__(text)
        self.observed = observed


class Reader:
    """Reads the proxy's messages: of the headers `USED_HEADERS`, and `wanted` (lower-case names) besides."""

    def __init__(self, wanted: Iterable[str] = ()) -> None:
        self._used = USED_HEADERS.union(wanted)

    def read(self, data: bytes) -> Message:
        """Parse a message. Raises protobuf's `DecodeError`, `UnknownMessage`."""
        request = pb.ProcessingRequest.FromString(data)
        name = request.WhichOneof("request")
        kind = _KINDS.get(name)
        if kind is None:
            raise UnknownMessage(f"ext_proc message of unknown kind {name!r}", request.observability_mode)
        observed, modes = request.observability_mode, None
        if request.HasField("protocol_config"):
            config = request.protocol_config
            modes = _mode(config.request_body_mode), _mode(config.response_body_mode)
        subset = pool = served = None
        if request.HasField("metadata_context"):
            subset, pool, served = _metadata(request.metadata_context.SerializeToString())
        part = getattr(request, kind.value)
        if kind is Kind.REQUEST_BODY or kind is Kind.RESPONSE_BODY:
            return Message(kind, part.end_of_stream, {}, part.body, subset, pool, None, modes, observed)
        if kind is Kind.REQUEST_HEADERS or kind is Kind.RESPONSE_HEADERS:
            headers: dict[str, str] = {}
            used = self._used
            for header in part.headers.headers:
                if (key := header.key) in used:
                    headers[key] = header.raw_value.decode("latin-1") or header.value
            return Message(kind, part.end_of_stream, headers, b"", subset, pool, served, modes, observed)
        return Message(kind, subset=subset, pool=pool, modes=modes, observed=observed)


@functools.lru_cache(maxsize=1024)  # a proxy sends few different ones, some with each message
def _metadata(serialized: bytes) -> tuple[frozenset[str] | None, str | None, str | None]:
    """Return `(subset hint, pool, served endpoint)`, None for each that `Metadata` lacks."""
    metadata = pb.Metadata.FromString(serialized).filter_metadata
    subset: frozenset[str] | None = None
    pool: str | None = None
    served: str | None = None
    if names.LB_SUBSET in metadata:
        hint = metadata[names.LB_SUBSET].fields
        if names.SUBSET in hint:
            subset = _subset(hint[names.SUBSET])
    if names.LB in metadata:
        chosen = metadata[names.LB].fields
        if names.SERVED in chosen:
            served = chosen[names.SERVED].string_value or None
        if names.POOL_METADATA in chosen:
            pool = chosen[names.POOL_METADATA].string_value or None
    return subset, pool, served


def _subset(hint: struct_pb2.Value) -> frozenset[str]:
    """Return the endpoints that a hint allows; none for a hint without JSON form (NaN or infinity)."""
    try:
        return parse_subset(json_format.MessageToDict(hint))
    except (json_format.Error, ValueError, RecursionError):
        return NOTHING


def _mode(value: int) -> BodyMode:
    return _MODES.get(value, BodyMode.NONE)


def to_response(reply: Reply | Immediate, *, strip_response_headers: bool = False) -> bytes:
    """Serialize a `ProcessingResponse`, with exactly the bytes that protobuf writes.

    `strip_response_headers`: hide from clients the headers that runtimes send us.
    """
    if isinstance(reply, Immediate):
        return _immediate(reply)
    if reply.chunk is not None and reply.destination is None:
        head, tail = _around_chunk(reply.kind, len(reply.chunk), reply.end_of_stream)
        return b"".join((head, reply.chunk, tail))
    if reply.chunk is not None or reply.body is not None or reply.content_length is not None:
        return _decided(reply)
    if reply.served is not None or reply.headers:
        return _telling(reply, strip_response_headers=strip_response_headers)
    if reply.destination is not None and not reply.added:
        return _with_destination(reply.kind, reply.destination)
    if reply.destination is not None:
        return _decided(reply)
    return (_STRIPPED if strip_response_headers else _PLAIN)[reply.kind]


def _immediate(reply: Immediate) -> bytes:
    response = pb.ImmediateResponse(
        status=pb.HttpStatus(code=reply.status),
        headers=pb.HeaderMutation(set_headers=[_header(key, value) for key, value in reply.headers]),
        body=reply.body,
        details=reply.details,
    )
    return _serialize(pb.ProcessingResponse(immediate_response=response))


@functools.lru_cache(maxsize=16)
def override_timeout(seconds: float) -> bytes:
    """Ask for more time: the decision may take this long, plus a second. Envoy accepts it once for each of its
    messages, and up to its `max_message_timeout`; longer values change nothing.
    """
    response = pb.ProcessingResponse()
    response.override_message_timeout.FromTimedelta(timedelta(seconds=min(seconds + 1.0, LONGEST_WAIT_S)))
    return _serialize(response)


def _serialize(message: pb.ProcessingResponse | pb.HeaderValueOption) -> bytes:
    data: bytes = message.SerializeToString()
    return data


def _telling(reply: Reply, *, strip_response_headers: bool) -> bytes:
    """Serialize a reply to response headers that tells the client who answered, or what is left of its quota."""
    response = pb.ProcessingResponse()
    mutation = response.response_headers.response.header_mutation
    if reply.served is not None:
        mutation.set_headers.append(_header(names.CONFORMANCE_SERVED, reply.served.encode()))
    for name, value in reply.headers:
        mutation.set_headers.append(_header(name, value))
    if strip_response_headers:
        mutation.remove_headers.extend(_OURS)
    return _serialize(response)


def _header(key: str, value: bytes) -> pb.HeaderValueOption:
    return pb.HeaderValueOption(header=pb.HeaderValue(key=key, raw_value=value), append_action=_OVERWRITE)


# --- messages as bytes ------------------------------------------------------------------------------------------------

_NUMBERS = {kind: field_numbers(pb.ProcessingResponse.DESCRIPTOR, kind.value)[0] for kind in Kind}
# A part of the first four kinds has a CommonResponse, which has header_mutation and body_mutation, and that `body` or
# `streamed_response` {body, end_of_stream}.
_RESPONSE, _HEADER_MUTATION, _SET_HEADERS = field_numbers(
    pb.HeadersResponse.DESCRIPTOR, "response", "header_mutation", "set_headers"
)
(_REMOVE_HEADERS,) = field_numbers(pb.HeaderMutation.DESCRIPTOR, "remove_headers")
_BODY_MUTATION, _STREAMED, _STREAMED_BODY = field_numbers(
    pb.CommonResponse.DESCRIPTOR, "body_mutation", "streamed_response", "body"
)
(_WHOLE_BODY,) = field_numbers(pb.BodyMutation.DESCRIPTOR, "body")
_CLEAR_ROUTE_CACHE = pb.CommonResponse(clear_route_cache=True).SerializeToString()
_END_OF_STREAM = pb.StreamedBodyResponse(end_of_stream=True).SerializeToString()
_TRAILERS = frozenset({Kind.REQUEST_TRAILERS, Kind.RESPONSE_TRAILERS})


def _decided(reply: Reply) -> bytes:
    """Serialize an answer with a destination, a length or a body; a chunk has a destination if no headers came."""
    metadata = b""
    options = b""
    if reply.destination is not None:
        options, metadata = _chosen(reply.destination)
    if reply.kind in _TRAILERS:  # trailers cannot change headers; metadata must carry it
        return _PLAIN[reply.kind] + metadata
    if reply.content_length is not None:
        options += _length_option(reply.content_length)
    for name, value in reply.added:
        if value is not None:
            options += field(_SET_HEADERS, _serialize(_header(name, value.encode())))
    for name, value in reply.added:
        if value is None:
            options += field(_REMOVE_HEADERS, name.encode())
    before = field(_HEADER_MUTATION, options) if options else b""
    pieces: list[Buffer] = []
    if reply.body is not None:
        pieces = reply.body.pieces() if isinstance(reply.body, Body) else [reply.body]
        size = sum(map(len, pieces))
        head = field_head(_WHOLE_BODY, size)
        before += field_head(_BODY_MUTATION, len(head) + size) + head
    after = b"" if reply.destination is None else _CLEAR_ROUTE_CACHE
    if reply.chunk is not None:
        head, tail = _streamed(len(reply.chunk), reply.end_of_stream)
        before, pieces, after = before + head, [reply.chunk], tail + after
    size = len(before) + sum(map(len, pieces)) + len(after)
    head = field_head(_RESPONSE, size)
    head = field_head(_NUMBERS[reply.kind], len(head) + size) + head
    return b"".join((head, before, *pieces, after, metadata))


@functools.lru_cache(maxsize=4096)
def _with_destination(kind: Kind, destination: str) -> bytes:
    return _decided(Reply(kind, destination=destination))


@functools.lru_cache(maxsize=4096)
def _length_option(length: int) -> bytes:
    return field(_SET_HEADERS, _serialize(_header("content-length", b"%d" % length)))


@functools.lru_cache(maxsize=4096)
def _chosen(destination: str) -> tuple[bytes, bytes]:
    """Return the destination as an entry of `set_headers`, and as dynamic metadata of the response."""
    option = field(_SET_HEADERS, _serialize(_header(names.DESTINATION, destination.encode())))
    response = pb.ProcessingResponse()
    response.dynamic_metadata.fields[names.LB].struct_value.fields[names.DESTINATION].string_value = destination
    return option, _serialize(response)


@functools.lru_cache(maxsize=4096)
def _around_chunk(kind: Kind, size: int, end_of_stream: bool) -> tuple[bytes, bytes]:
    """Return the bytes before and after a chunk of this size."""
    head, tail = _streamed(size, end_of_stream)
    for number in (_RESPONSE, _NUMBERS[kind]):
        head = field_head(number, len(head) + size + len(tail)) + head
    return head, tail


def _streamed(size: int, end_of_stream: bool) -> tuple[bytes, bytes]:
    """Return the bytes before and after the chunk within a `CommonResponse`."""
    head = field_head(_STREAMED_BODY, size) if size else b""
    tail = _END_OF_STREAM if end_of_stream else b""
    for number in (_STREAMED, _BODY_MUTATION):
        head = field_head(number, len(head) + size + len(tail)) + head
    return head, tail


_PLAIN = {kind: field(number, b"") for kind, number in _NUMBERS.items()}
_STRIPPED = _PLAIN | {Kind.RESPONSE_HEADERS: _telling(Reply(Kind.RESPONSE_HEADERS), strip_response_headers=True)}
