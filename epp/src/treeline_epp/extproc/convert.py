"""Between Envoy's protobuf messages and the session's own: the only module that knows both.

Answers that are always the same are serialized once; those with a destination once per destination list.
"""

from __future__ import annotations

import functools

from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.type.v3 import http_status_pb2
from google.protobuf import json_format
from treeline_wire import headers as names

from treeline_epp.extproc.protowire import field_numbers, take_field, with_field
from treeline_epp.extproc.state import WHOLE_BYTES, BodyMode, Kind, Message, Reply
from treeline_epp.requests.body import Body, Buffer
from treeline_epp.requests.messages import Immediate
from treeline_epp.requests.parse import parse_subset

_REQUEST_BODY, _HTTP_BODY = field_numbers(pb.ProcessingRequest.DESCRIPTOR, "request_body", "body")
_BODY_PATH = field_numbers(pb.ProcessingResponse.DESCRIPTOR, "request_body", "response", "body_mutation", "body")
_OVERWRITE = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
_KINDS = {kind.value: kind for kind in Kind}


class UnknownMessage(ValueError):
    """The proxy sent a message of a kind that this picker does not know."""


def body_modes(request: pb.ProcessingRequest) -> tuple[BodyMode, BodyMode]:
    """`(request, response)` body modes from the first message of a stream.

    A proxy that does not tell follows the endpoint picker protocol, which is full duplex both ways.
    """
    if not request.HasField("protocol_config"):
        return BodyMode.FULL_DUPLEX_STREAMED, BodyMode.FULL_DUPLEX_STREAMED
    config = request.protocol_config
    return _mode(config.request_body_mode), _mode(config.response_body_mode)


def _mode(value: int) -> BodyMode:
    try:
        return BodyMode(value)
    except ValueError:
        return BodyMode.NONE


def read(data: bytes) -> tuple[pb.ProcessingRequest, Buffer | None]:
    """Parse a message of the proxy. A large request body is not copied into it: it is returned beside it.

    Raises `google.protobuf.message.DecodeError`.
    """
    if len(data) <= WHOLE_BYTES:
        return pb.ProcessingRequest.FromString(data), None
    rest, part = take_field(memoryview(data), _REQUEST_BODY)
    if part is None:
        return pb.ProcessingRequest.FromString(data), None
    inner, body = take_field(part, _HTTP_BODY)
    request = pb.ProcessingRequest.FromString(rest)
    request.request_body.MergeFromString(inner)
    return request, body


def to_message(request: pb.ProcessingRequest, large: Buffer | None = None) -> Message:
    """What the proxy says; `large` as from `read`. Raises `UnknownMessage`."""
    field = request.WhichOneof("request")
    kind = _KINDS.get(field or "")
    if kind is None:
        raise UnknownMessage(f"ext_proc message of unknown kind {field!r}")
    subset, pool, served = _metadata(request) if request.HasField("metadata_context") else _NO_METADATA
    if kind is Kind.REQUEST_BODY or kind is Kind.RESPONSE_BODY:
        body = getattr(request, field)
        data = body.body if large is None else large
        return Message(kind, body.end_of_stream, data=data, subset=subset, pool=pool)
    if kind is Kind.REQUEST_HEADERS or kind is Kind.RESPONSE_HEADERS:
        part = getattr(request, field)
        headers = {h.key: h.raw_value.decode("latin-1") or h.value for h in part.headers.headers}
        return Message(kind, part.end_of_stream, headers=headers, subset=subset, pool=pool, served=served)
    return Message(kind, subset=subset, pool=pool)


_Metadata = tuple[frozenset[str] | None, str | None, str | None]
_NO_METADATA: _Metadata = (None, None, None)


def _metadata(request: pb.ProcessingRequest) -> _Metadata:
    """`(subset hint, pool, served endpoint)` as far as this message carries them."""
    metadata = request.metadata_context.filter_metadata
    subset: frozenset[str] | None = None
    pool: str | None = None
    served: str | None = None
    if names.LB_SUBSET in metadata:
        hint = metadata[names.LB_SUBSET].fields
        if names.SUBSET in hint:
            subset = parse_subset(json_format.MessageToDict(hint[names.SUBSET]))
    if names.LB in metadata:
        chosen = metadata[names.LB].fields
        if names.SERVED in chosen:
            served = chosen[names.SERVED].string_value or None
        if names.POOL_METADATA in chosen:
            pool = chosen[names.POOL_METADATA].string_value or None
    return subset, pool, served


def to_response(reply: Reply | Immediate, *, strip_response_headers: bool = False) -> bytes:
    """A serialized `ProcessingResponse`.

    `strip_response_headers`: clients are not to see the headers that runtimes send us.
    """
    if isinstance(reply, Immediate):
        return _immediate(reply)
    if reply.destination is not None and reply.content_length is None and reply.body is None:
        return _with_destination(reply.kind, reply.destination)
    if isinstance(reply.body, Body):
        return with_field(_serialize(_build(reply)), _BODY_PATH, reply.body.pieces())
    if reply.destination is None and reply.chunk is None:
        return (_STRIPPED if strip_response_headers else _PLAIN)[reply.kind]
    return _serialize(_build(reply))


def _immediate(reply: Immediate) -> bytes:
    response = pb.ImmediateResponse(
        status=http_status_pb2.HttpStatus(code=reply.status),
        headers=pb.HeaderMutation(set_headers=[_header(key, value) for key, value in reply.headers]),
        body=reply.body,
        details=reply.details,
    )
    return _serialize(pb.ProcessingResponse(immediate_response=response))


@functools.lru_cache(maxsize=4096)
def _with_destination(kind: Kind, destination: str) -> bytes:
    return _serialize(_build(Reply(kind, destination=destination)))


def _serialize(response: pb.ProcessingResponse) -> bytes:
    data: bytes = response.SerializeToString()
    return data


def _build(reply: Reply) -> pb.ProcessingResponse:
    response = pb.ProcessingResponse()
    if reply.destination is not None:
        chosen = response.dynamic_metadata.fields[names.LB].struct_value
        chosen.fields[names.DESTINATION].string_value = reply.destination
    part = getattr(response, reply.kind.value)
    part.SetInParent()
    if reply.kind is Kind.REQUEST_TRAILERS or reply.kind is Kind.RESPONSE_TRAILERS:
        return response  # trailers cannot change headers; metadata must do
    common = part.response
    if reply.destination is not None:
        common.header_mutation.set_headers.append(_header(names.DESTINATION, reply.destination.encode()))
        common.clear_route_cache = True
    if reply.content_length is not None:
        common.header_mutation.set_headers.append(_header("content-length", b"%d" % reply.content_length))
    if isinstance(reply.body, bytes):
        common.body_mutation.body = reply.body
    if reply.chunk is not None:
        streamed = common.body_mutation.streamed_response
        streamed.body = bytes(reply.chunk)
        streamed.end_of_stream = reply.end_of_stream
    return response


def _header(key: str, value: bytes) -> base_pb2.HeaderValueOption:
    return base_pb2.HeaderValueOption(header=base_pb2.HeaderValue(key=key, raw_value=value), append_action=_OVERWRITE)


def _stripped() -> bytes:
    response = _build(Reply(Kind.RESPONSE_HEADERS))
    mutation = response.response_headers.response.header_mutation
    mutation.remove_headers.extend((names.CACHED_TOKENS, names.PROMPT_TOKENS))
    return _serialize(response)


_PLAIN = {kind: _serialize(_build(Reply(kind))) for kind in Kind}
_STRIPPED = _PLAIN | {Kind.RESPONSE_HEADERS: _stripped()}
