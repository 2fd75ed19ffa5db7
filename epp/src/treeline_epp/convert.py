"""Between Envoy's protobuf messages and the exchange's own: the only module that knows both.

Answers that are always the same are serialized once; those with a destination once per destination list.
"""

from __future__ import annotations

import functools

from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.type.v3 import http_status_pb2
from google.protobuf import json_format
from treeline_wire import headers as names

from treeline_epp.exchange import BodyMode, Immediate, Kind, Message, Reply
from treeline_epp.request import parse_subset

_OVERWRITE = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
_KINDS = {kind.value: kind for kind in Kind}


class UnknownMessage(ValueError):
    """The proxy sent a message of a kind that this picker does not know."""


def body_modes(request: pb.ProcessingRequest) -> tuple[BodyMode, BodyMode]:
    """``(request, response)`` body modes from the first message of a stream.

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


def to_message(request: pb.ProcessingRequest) -> Message:
    """What the proxy says. Raises :class:`UnknownMessage`."""
    field = request.WhichOneof("request")
    kind = _KINDS.get(field or "")
    if kind is None:
        raise UnknownMessage(f"ext_proc message of unknown kind {field!r}")
    subset, pool, served = _metadata(request) if request.HasField("metadata_context") else _NO_METADATA
    if kind is Kind.REQUEST_BODY or kind is Kind.RESPONSE_BODY:
        body = getattr(request, field)
        return Message(kind, body.end_of_stream, data=body.body, subset=subset, pool=pool)
    if kind is Kind.REQUEST_HEADERS or kind is Kind.RESPONSE_HEADERS:
        part = getattr(request, field)
        headers = {h.key: h.raw_value.decode("latin-1") or h.value for h in part.headers.headers}
        return Message(kind, part.end_of_stream, headers=headers, subset=subset, pool=pool, served=served)
    return Message(kind, subset=subset, pool=pool)


_Metadata = tuple[frozenset[str] | None, str | None, str | None]
_NO_METADATA: _Metadata = (None, None, None)


def _metadata(request: pb.ProcessingRequest) -> _Metadata:
    """``(subset hint, pool, served endpoint)`` as far as this message carries them."""
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


def to_response(action: Reply | Immediate, *, hiding: bool = False) -> bytes:
    """A serialized ``ProcessingResponse``. ``hiding``: clients are not to see the headers that runtimes send us."""
    if isinstance(action, Immediate):
        return _immediate(action)
    if action.destination is not None and action.content_length is None and action.body is None:
        return _with_destination(action.kind, action.destination)
    if action.destination is None and action.chunk is None:
        return (_HIDING if hiding else _PLAIN)[action.kind]
    return _serialize(_build(action))


def _immediate(action: Immediate) -> bytes:
    response = pb.ImmediateResponse(
        status=http_status_pb2.HttpStatus(code=action.status),
        headers=pb.HeaderMutation(set_headers=[_header(key, value) for key, value in action.headers]),
        body=action.body,
        details=action.details,
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
    if reply.body is not None:
        common.body_mutation.body = reply.body
    if reply.chunk is not None:
        streamed = common.body_mutation.streamed_response
        streamed.body = reply.chunk
        streamed.end_of_stream = reply.end_of_stream
    return response


def _header(key: str, value: bytes) -> base_pb2.HeaderValueOption:
    return base_pb2.HeaderValueOption(
        header=base_pb2.HeaderValue(key=key, raw_value=value), append_action=_OVERWRITE
    )


def _hiding() -> bytes:
    response = _build(Reply(Kind.RESPONSE_HEADERS))
    mutation = response.response_headers.response.header_mutation
    mutation.remove_headers.extend((names.CACHED_TOKENS, names.PROMPT_TOKENS))
    return _serialize(response)


_PLAIN = {kind: _serialize(_build(Reply(kind))) for kind in Kind}
_HIDING = _PLAIN | {Kind.RESPONSE_HEADERS: _hiding()}
