"""Our subset of Envoy's messages, field by field and byte by byte, against a package with its whole API."""

from __future__ import annotations

import random
from typing import Any

import pytest
from betterproto2 import Message as Theirs
from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.config.endpoint import v3 as endpoint
from envoy_data_plane.envoy.extensions.filters.http.ext_proc import v3 as filters
from envoy_data_plane.envoy.service.discovery import v3 as discovery
from envoy_data_plane.envoy.service.ext_proc import v3 as ext_proc
from envoy_data_plane.envoy.type import v3 as types
from envoy_data_plane.google import rpc
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message
from treeline_wire import envoy_pb2 as pb

API = (ext_proc, filters, core, types, endpoint, discovery, rpc)
MESSAGES: dict[str, Descriptor] = dict(pb.DESCRIPTOR.message_types_by_name)
PARTLY = {
    "ClusterLoadAssignment",
    "LocalityLbEndpoints",
    "LbEndpoint",
    "Endpoint",
    "Address",
    "SocketAddress",
    "Node",
    "Status",
    "DiscoveryRequest",
    "DiscoveryResponse",
    "ProcessingResponse",
}
"""Messages of which only the used fields are here."""
TYPES = {
    FieldDescriptor.TYPE_BOOL: "bool",
    FieldDescriptor.TYPE_BYTES: "bytes",
    FieldDescriptor.TYPE_ENUM: "enum",
    FieldDescriptor.TYPE_INT32: "int32",
    FieldDescriptor.TYPE_MESSAGE: "message",
    FieldDescriptor.TYPE_STRING: "string",
    FieldDescriptor.TYPE_UINT32: "uint32",
}


def theirs(name: str) -> Any:
    """Return their class of a message or an enum."""
    (found,) = {getattr(module, name) for module in API if hasattr(module, name)}
    return found


def is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def our_fields(descriptor: Descriptor) -> dict[str, tuple[Any, ...]]:
    return {
        field.name: (
            field.number,
            "map" if is_map(field) else TYPES[field.type],
            field.is_repeated and not is_map(field),
            field.containing_oneof.name if field.containing_oneof else None,
        )
        for field in descriptor.fields
    }


def their_fields(message: type[Theirs]) -> dict[str, tuple[Any, ...]]:
    known = message._betterproto.meta_by_field_name
    return {
        name: (meta.number, meta.proto_type, bool(meta.repeated), meta.group) for name, meta in sorted(known.items())
    }


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_has_the_fields_of_envoys(name: str) -> None:
    ours, all_of_it = our_fields(MESSAGES[name]), their_fields(theirs(name))
    if name == "HttpStatus":  # its enum has the statuses as they are, and on the wire both are the same
        ours["code"] = (1, "enum", False, None)
    same = {field: all_of_it.get(field) for field in ours} if name in PARTLY else all_of_it
    assert ours == same


def enums() -> dict[str, EnumDescriptor]:
    nested = {f"{name}{enum}": of for name, m in MESSAGES.items() for enum, of in m.enum_types_by_name.items()}
    return nested | dict(pb.DESCRIPTOR.enum_types_by_name)


@pytest.mark.parametrize("name", enums())
def test_an_enum_has_the_values_of_envoys(name: str) -> None:
    assert {value.number for value in enums()[name].values} == {int(member) for member in theirs(name)}
    for value in enums()[name].values:
        assert theirs(name)(value.number).name in (value.name, f"{value.name}_")


def filled(message: Message, dice: random.Random, depth: int = 0) -> Message:
    """Draw a message with about half of its fields, at most one of each oneof."""
    for field in message.DESCRIPTOR.fields:
        if field.containing_oneof and message.WhichOneof(field.containing_oneof.name):
            continue
        if dice.random() < 0.5 or (depth > 5 and field.message_type):
            continue
        held = getattr(message, field.name)
        if is_map(field):
            for key in dice.sample(("envoy.lb", "a", "ß"), dice.randint(1, 2)):
                filled(held[key], dice, depth + 1)
        elif field.is_repeated:
            for _ in range(dice.randint(1, 3)):
                if field.message_type:
                    filled(held.add(), dice, depth + 1)
                else:
                    held.append(scalar(field, dice))
        elif field.message_type:
            held.SetInParent()
            filled(held, dice, depth + 1)
        else:
            setattr(message, field.name, scalar(field, dice))
    return message


def scalar(field: FieldDescriptor, dice: random.Random) -> Any:
    if field.enum_type:
        return dice.choice(field.enum_type.values).number
    if field.type == FieldDescriptor.TYPE_BOOL:
        return dice.choice((True, False))
    if field.type == FieldDescriptor.TYPE_BYTES:
        return b"\x00\xffbytes"
    if field.type == FieldDescriptor.TYPE_STRING:
        return dice.choice(("", "x-header", "ß"))
    if field.type == FieldDescriptor.TYPE_DOUBLE:
        return dice.choice((0.0, -1.5, 1e300))
    return dice.choice((0, 1_000, 70_000))  # in whole microseconds, which is all that their durations have


WHOLE = ("ProcessingRequest", "ProcessingResponse", "DiscoveryRequest", "DiscoveryResponse", "ClusterLoadAssignment")


@pytest.mark.parametrize("name", WHOLE)
def test_messages_round_trip_between_both_packages(name: str) -> None:
    for seed in range(200):
        ours = filled(getattr(pb, name)(), random.Random(seed))
        data = ours.SerializeToString()
        again = bytes(theirs(name).parse(data))
        assert sorted(again) == sorted(data), (seed, ours)  # they write a few fields in another order
        assert type(ours).FromString(again) == ours, seed
