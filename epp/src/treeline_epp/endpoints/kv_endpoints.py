"""Reads `--kv-events-config` of vLLM and SGLang: where the engine publishes its KV events, and at which of its ZMQ
endpoints it listens.

The rules are theirs (`_socket_setup` in vLLM's `distributed/kv_events.py`, 0.9 to 0.33, and in SGLang's
`srt/disaggregation/kv_events.py`): a publisher binds an endpoint that has a `*` or `::` in it, and connects to any
other, a host name, an IP address, and `0.0.0.0` too, which SGLang alone binds, from 0.5.19 on. The replay socket is
always bound. vLLM 0.33 makes of `tcp://*:0` the node's address with a free port, and tells that: so an IP address may
be one at which it listens.
"""

from __future__ import annotations

import re
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from treeline_epp.endpoints.spec import KvPorts

_ANY_V4: Final = "0.0.0.0"
_TCP: Final = re.compile(r"tcp://(.{1,255}):([0-9]{1,5})", re.ASCII)

Topic = Annotated[str, Meta(max_length=1024)]


class _Config(msgspec.Struct):
    """The members of the JSON that the picker reads. vLLM publishes if `enable_kv_cache_events`, SGLang, which has no
    such member, if `publisher` is "zmq".
    """

    enable_kv_cache_events: bool | None = None
    publisher: str | None = None
    endpoint: str | None = "tcp://*:5557"
    bind: bool | None = None
    replay_endpoint: str | None = None
    topic: Topic | None = ""


def ports_of(config: object, ranks: int) -> KvPorts | None:
    """Return the ports where an engine of this configuration publishes; None if it does not, or for invalid JSON."""
    try:
        read = msgspec.json.decode(config, type=_Config) if isinstance(config, str) else _Config()
    except (msgspec.MsgspecError, RecursionError):
        return None
    enabled, events = read.enable_kv_cache_events, place_of(read.endpoint)[1]
    publishes = enabled is not False if read.publisher == "zmq" else read.publisher is None and enabled
    if not publishes or events is None or read.endpoint is None:
        return None
    dials = "" if listens(read.endpoint, sglang=enabled is None, bind=read.bind) else read.endpoint
    return KvPorts(events, place_of(read.replay_endpoint)[1], read.topic or "", ranks, dials=dials)


def place_of(endpoint: str | None) -> tuple[str, int | None]:
    """Return host and port of a ZMQ endpoint over TCP; no port if it is none, or the port is out of range."""
    found = _TCP.fullmatch(endpoint or "")
    if found is None:
        return "", None
    port = int(found[2])
    return found[1], port if 0 < port < 65536 else None


def listens(endpoint: str, *, sglang: bool = False, bind: bool | None = None) -> bool:
    """Return whether the engine listens at this endpoint of its configuration. `bind` is SGLang's own member for it."""
    if sglang and bind is not None:
        return bind
    return "*" in endpoint or "::" in endpoint or (sglang and _ANY_V4 in endpoint)


def why_not_listening(endpoint: str) -> str:
    """Return what is wrong with an endpoint that the engine connects to, and what to do."""
    return (
        f"its --kv-events-config names {endpoint[:100]!r}, to which engines connect instead of listening there: "
        "write tcp://*:PORT"
    )
