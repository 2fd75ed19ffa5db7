"""The ZMQ endpoints of `--kv-events-config`: at which of them vLLM and SGLang listen, and which they connect to.

By their own rules (`_socket_setup` in vLLM's `distributed/kv_events.py`, 0.9 to 0.33, and in SGLang's
`srt/disaggregation/kv_events.py`): a publisher binds an endpoint that has a `*` or `::` in it, and connects to any
other, a host name, an IP address, and `0.0.0.0` too, which SGLang alone binds, from 0.5.19 on. The replay socket is
always bound. vLLM 0.33 makes of `tcp://*:0` the node's address with a free port, and tells that: so an IP address may
be one at which it listens.
"""

from __future__ import annotations

from typing import Final

_ANY_V4: Final = "0.0.0.0"


def listens(endpoint: str, *, sglang: bool = False, bind: bool | None = None) -> bool:
    """Does the engine listen at this endpoint of its configuration? `bind` is SGLang's own word on it."""
    if sglang and bind is not None:
        return bind
    return "*" in endpoint or "::" in endpoint or (sglang and _ANY_V4 in endpoint)


def why_not_listening(endpoint: str) -> str:
    """What is wrong with an endpoint that the engine connects to, and what to do."""
    return (
        f"its --kv-events-config names {endpoint[:100]!r}, to which engines connect instead of listening there: "
        "write tcp://*:PORT"
    )
