"""docs/events.md: the messages that engines publish for the picker, from the structs that decode them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, Final

import msgspec
from treeline_wire import events, load, ports

_HEAD: Final = f"""\
# KV events and load reports

Generated from the structs in `wire/` that encode and decode them. A publisher is a ZMQ PUB socket; messages are
msgpack. [engines.md](engines.md) says how an engine is made to publish, [wire/README.md](../wire/README.md) how fields
may be added.

| socket | port | message |
|---|---|---|
| events | {ports.EVENTS} + rank | topic, sequence (8 bytes, big-endian), [a batch](#eventbatch) |
| replay | {ports.REPLAY} + rank | asked with a sequence; answers with the messages from there on |
| load | {ports.LOAD} | topic, [LoadStat](#loadstat) or [TreelineLoad](#treelineload) |

A batch is the array `[ts, events, dp_rank]`; an event is a map whose `type` is its name. The topic of a LoadStat is
`{load.LOAD_TOPIC.decode()}`, that of a TreelineLoad `{load.TREELINE_LOAD_TOPIC.decode()}`. A reader ignores fields that
it does not know, and fills missing ones with the defaults below. vLLM's and SGLang's older forms are read, too.
"""
_STRUCTS: Final = (
    events.EventBatch,
    events.BlockStored,
    events.BlockRemoved,
    events.AllBlocksCleared,
    load.LoadStat,
    load.TreelineLoad,
)


def page() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *(line for struct in _STRUCTS for line in _struct(struct))]).rstrip() + "\n"


def _struct(struct: type[msgspec.Struct]) -> Iterator[str]:
    yield from (f"## {struct.__name__}", "", inspect.getdoc(struct) or "", "")
    fields = [field for field in msgspec.structs.fields(struct) if field.name != "rejected"]  # the reader's own count
    if fields:
        yield from ("| field | type | default |", "|---|---|---|")
    for field in fields:
        yield f"| `{field.encode_name}` | {_kind(msgspec.inspect.type_info(field.type))} | {_default(field)} |"
    yield ""


def _default(field: Any) -> str:
    if field.required:
        return "required"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return "none" if value is None else f"`{value!r}`"


def _kind(info: Any) -> str:
    match info:
        case msgspec.inspect.UnionType():
            return " or ".join(_kind(one) for one in info.types if not isinstance(one, msgspec.inspect.NoneType))
        case msgspec.inspect.ListType():
            return f"array of {_kind(info.item_type)}" + (f", at most {info.max_length:,}" if info.max_length else "")
        case msgspec.inspect.DictType():
            return f"map from {_kind(info.key_type)} to {_kind(info.value_type)}"
        case msgspec.inspect.StructType():
            return f"[{info.cls.__name__}](#{info.cls.__name__.lower()})"
    return {"int": "integer", "str": "string", "float": "number", "bool": "boolean", "any": "any"}[
        type(info).__name__.removesuffix("Type").lower()
    ]
