"""Messages of ext_proc in Envoy's form, and any message as JSON for a report."""

from __future__ import annotations

import base64
import copy
import enum
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf import json_format, struct_pb2
from treeline_wire import envoy_pb2 as pb

DESTINATION = "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"
SUBSET = "x-gateway-destination-endpoint-subset"
LB, LB_SUBSET = "envoy.lb", "envoy.lb.subset_hint"
_SHOWN_BYTES = 160
_SHOWN_MESSAGES = 4


class Mode(enum.Enum):
    """The way in which a proxy sends a request's body; the values are those of `ProcessingMode.BodySendMode`."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    DUPLEX = 4

    @property
    def word(self) -> str:
        return self.name.lower()


class NoHint(enum.Enum):
    """The absence of a subset hint, which differs from a hint of null."""

    NO_HINT = 0


NO_HINT = NoHint.NO_HINT


def config(request: Mode, response: Mode) -> pb.ProtocolConfiguration:
    """Return the proxy's body modes, for a stream's first message."""
    modes = pb.ProcessingMode
    return pb.ProtocolConfiguration(
        request_body_mode=modes.BodySendMode.Name(request.value),
        response_body_mode=modes.BodySendMode.Name(response.value),
    )


def headers(fields: Mapping[str, str], *, end: bool) -> pb.HttpHeaders:
    """Return headers with values as bytes, as Envoy sends them."""
    entries = [pb.HeaderValue(key=key, raw_value=value.encode()) for key, value in fields.items()]
    return pb.HttpHeaders(headers=pb.HeaderMap(headers=entries), end_of_stream=end)


def request_headers(method: str, path: str, more: Mapping[str, str], *, end: bool) -> pb.ProcessingRequest:
    fields = {
        ":method": method,
        ":path": path,
        ":scheme": "http",
        ":authority": "conformance.example",
        "content-type": "application/json",
        "x-request-id": "5f3c7a52-0c4b-4f6e-9f0a-6d1f6f0f0001",
        "x-forwarded-proto": "http",
    }
    return pb.ProcessingRequest(request_headers=headers(fields | dict(more), end=end))


def body(data: bytes, *, end: bool) -> pb.HttpBody:
    return pb.HttpBody(body=data, end_of_stream=end)


def hinted(message: pb.ProcessingRequest, hint: Any) -> pb.ProcessingRequest:
    """Return the message with a subset hint in its metadata; `hint` as decoded from JSON."""
    if hint is not NO_HINT:
        with_metadata(message, LB_SUBSET, SUBSET, hint)
    return message


def with_metadata(message: pb.ProcessingRequest, namespace: str, key: str, value: Any) -> pb.ProcessingRequest:
    found = message.metadata_context.filter_metadata[namespace]
    found.fields[key].CopyFrom(json_format.ParseDict(value, struct_pb2.Value()))
    return message


def in_chunks(data: bytes, size: int) -> list[bytes]:
    """Split a body; an empty one gives one empty chunk."""
    return [data[at : at + size] for at in range(0, len(data), size)] or [b""]


# --- as JSON ----------------------------------------------------------------------------------------------------------


def shown(message: pb.ProcessingRequest | pb.ProcessingResponse) -> dict[str, Any]:
    """Return a message as JSON: values of headers as text, long bodies by length, digest and beginning."""
    short = copy.deepcopy(message)
    long = _shorten(short)
    try:
        found: dict[str, Any] = _plain(json_format.MessageToDict(short, preserving_proto_field_name=True))
    except json_format.SerializeToJsonError as error:  # numbers in metadata that JSON lacks
        return {"no_json": str(error)}
    return found | {"long_body": long} if long else found


def _shorten(message: pb.ProcessingRequest | pb.ProcessingResponse) -> dict[str, Any]:
    holder = _body_holder(message)
    if holder is None or len(holder.body) <= _SHOWN_BYTES:
        return {}
    data = bytes(holder.body)
    holder.body = data[:_SHOWN_BYTES]
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _body_holder(message: pb.ProcessingRequest | pb.ProcessingResponse) -> Any:
    """Return the part of a message that has the field `body`, if there is one."""
    kind = message.WhichOneof("request" if isinstance(message, pb.ProcessingRequest) else "response")
    if kind is None:
        return None
    part = getattr(message, kind)
    if isinstance(part, pb.HttpBody | pb.ImmediateResponse):
        return part
    if not isinstance(part, pb.BodyResponse):
        return None
    mutation = part.response.body_mutation
    which = mutation.WhichOneof("mutation")
    return mutation.streamed_response if which == "streamed_response" else mutation if which == "body" else None


def _plain(value: Any) -> Any:
    """Decode base64 to text: names of fields say which strings are bytes."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: _text(item) if key in ("raw_value", "body") else _plain(item) for key, item in value.items()}


def _text(value: Any) -> Any:
    if not isinstance(value, str):
        return _plain(value)
    return base64.b64decode(value).decode(errors="backslashreplace")


def transcript(entries: Sequence[tuple[str, Any]]) -> list[dict[str, Any]]:
    """Return the speakers and their messages; of long exchanges the beginning and the end."""
    left_out = len(entries) - 2 * _SHOWN_MESSAGES
    if left_out <= 0:
        return [_entry(*entry) for entry in entries]
    gap = ("suite", f"({left_out} messages are left out here)")
    return [_entry(*entry) for entry in (*entries[:_SHOWN_MESSAGES], gap, *entries[-_SHOWN_MESSAGES:])]


def _entry(who: str, said: Any) -> dict[str, Any]:
    return {"who": who, "said": said if isinstance(said, str) else shown(said)}
