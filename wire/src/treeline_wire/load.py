"""Load reports, pushed by engines on a PUB socket: SGLang's `LoadStat` unchanged, and our own map beside it.

`LoadStat` is a positional array, so its fields may only be added at the end. `TreelineLoad` is a map; a receiver
ignores members that it does not know and fills missing ones with their defaults.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta, Struct

from .events import DecodeError, DecodeReason

LOAD_TOPIC: Final = b"load"
TREELINE_LOAD_TOPIC: Final = b"treeline.load"

_MAX_PAYLOAD_BYTES: Final = 1 << 20

Count: TypeAlias = Annotated[int, Meta(ge=0)]
Rate: TypeAlias = Annotated[float, Meta(ge=0.0, le=1e15)]


class LoadStat(Struct, frozen=True, array_like=True, tag="LoadStat"):
    """SGLang's report. Counts of tokens; the deltas of the two totals give the prefill speed."""

    num_running: Count = 0
    num_waiting: Count = 0
    num_tokens: Count = 0
    max_total_num_tokens: Count = 0
    attn_dp_rank: Count | None = 0
    num_waiting_uncached_tokens: Count = 0
    num_total_tokens: Count = 0
    max_running_requests: Count = 0
    total_prefill_uncached_tokens: Count = 0
    total_prefill_busy_us: Count = 0


class TreelineLoad(Struct, frozen=True):
    """Our report.

    `seq` counts reports within an `epoch`. `in_flight`: requests accepted and unfinished in the server; `running` and
    `waiting`: in the scheduler. `waiting_uncached_tokens`: prefill work left. `pages_used` are neither free nor
    evictable, `pages_cached` evictable; the rest of `pages_total` is free. `host_tokens_per_s`, `disk_tokens_per_s` and
    `peer_tokens_per_s`: the speed at which it loads cached tokens from host memory, from disk and from other runtimes,
    0 while unknown. `digests`: of the loaded adapters, by name; `adapters` are their names, `resident` the
    digests of those that have a slot on the device. `decode_step_tokens`: given to a request by a decode step, several
    with guesses; 0 while unknown.
    """

    epoch: Count = 0
    seq: Count = 0
    running: Count = 0
    waiting: Count = 0
    waiting_uncached_tokens: Count = 0
    pages_used: Count = 0
    pages_total: Count = 0
    page_size: Count = 0
    prefill_tokens_per_s: Rate = 0.0
    decode_step_ms: Rate = 0.0
    draining: bool = False
    adapters: list[str] = []
    in_flight: Count = 0
    max_running: Count = 0
    pages_cached: Count = 0
    host_tokens_per_s: Rate = 0.0
    disk_tokens_per_s: Rate = 0.0
    peer_tokens_per_s: Rate = 0.0
    digests: dict[str, str] = {}
    resident: list[str] = []
    decode_step_tokens: Rate = 0.0


_encoder = msgspec.msgpack.Encoder()
_stat_decoder = msgspec.msgpack.Decoder(LoadStat)
_treeline_decoder = msgspec.msgpack.Decoder(TreelineLoad)


def encode(report: LoadStat | TreelineLoad) -> bytes:
    """Returns the payload of a report."""
    return _encoder.encode(report)


def decode_load(topic: bytes, payload: bytes) -> LoadStat | TreelineLoad:
    """Decodes a report. Topics are configurable, so an unknown topic is recognised by the payload's form.

    Raises `DecodeError` and nothing else.
    """
    if len(payload) > _MAX_PAYLOAD_BYTES:
        raise DecodeError(DecodeReason.TOO_LARGE, f"{len(payload)} bytes")
    is_map = bool(payload) and (payload[0] & 0xF0 == 0x80 or payload[0] in (0xDE, 0xDF))
    ours = topic == TREELINE_LOAD_TOPIC or (topic != LOAD_TOPIC and is_map)
    try:
        return _treeline_decoder.decode(payload) if ours else _stat_decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError) as error:
        raise DecodeError(DecodeReason.BAD_LOAD, str(error)[:200]) from None
