"""KV events, in the formats of vLLM and SGLang: the blocks of tokens in an engine's cache.

We write SGLang's form: msgpack `[ts, [maps tagged "type"], dp_rank]`, hashes as signed 64-bit integers, and `lora_name`
even if nil, since vLLM's typed decoders require it. We read every form that either engine has sent: batches as array or
map, events as maps or positional arrays, hashes signed, unsigned or as bytes, tokens as numbers or pairs. Common forms
use typed decoders; the slow path decodes each event on its own, so that a bad event does not cost the batch.

A payload costs a small multiple of its own bytes in memory: unused members are skipped, lists are bounded before they
are built, and untyped values come from small events only.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any, Final, TypeAlias, final

import msgspec
from msgspec import Meta, Struct

from .errors import WireError
from .media import FIRST_ID
from .namespaces import event_namespace

MAX_PAYLOAD_BYTES: Final = 64 << 20
"""The largest batch that is decoded, in bytes."""
_LARGE_BYTES: Final = 256 << 10
"""A batch larger than this is decoded event by event, so that other threads run in between."""
_SLOW_BYTES: Final = 256 << 10
"""An event larger than this is read only in today's form; in older forms a byte may become a list."""
_MOST: Final = 1 << 20
"""The most hashes in a batch, and tokens in an event. 8 MiB hold fewer, except of one-byte numbers."""
_MOST_EVENTS: Final = 1 << 18
_MOST_REJECTED: Final = 4096
"""The most bad events in a batch; with more, all of it is refused."""
_MOST_EXTRA_BYTES: Final = 256 << 10
"""The most bytes of extra keys in a large batch: they are untyped, so a byte may become a list."""
_MOST_KEYS: Final = 1024
"""The most extra keys of a block, each with at most as many items as the block has tokens."""

_U64: Final = (1 << 64) - 1
_SIGN: Final = 1 << 63

TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=0xFFFF_FFFF)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=0xFFFF_FFFF)]
Hashes: TypeAlias = Annotated[list[int], Meta(max_length=_MOST)]


class DecodeReason(StrEnum):
    """The reason why a payload or an event was refused. The values are metric labels."""

    TOO_LARGE = "too_large"
    NOT_MSGPACK = "not_msgpack"
    BAD_BATCH = "bad_batch"
    UNKNOWN_TYPE = "unknown_type"
    BAD_EVENT = "bad_event"
    BAD_HASH = "bad_hash"
    BAD_TOKENS = "bad_tokens"
    BAD_LOAD = "bad_load"


class DecodeError(WireError):
    """A whole payload was refused. `reason` is one word that can be counted."""

    def __init__(self, reason: DecodeReason, detail: str = "") -> None:
        self.reason = reason
        super().__init__(f"{reason}: {detail}" if detail else str(reason))


class BlockStored(Struct, frozen=True, gc=False, tag_field="type", tag="BlockStored"):
    """Blocks entered the cache: `token_ids` is the span of all of them, `block_size` tokens each.

    Hashes are u64 and chain: the first block's parent is `parent_block_hash` (None: the beginning of a prompt).
    `len(token_ids)` may differ from `len(block_hashes) * block_size` in foreign engines (masked or tier-only blocks).
    Our runtime's ids from 2^31 on spell the digest and the number of tokens of an image (`media`).
    """

    block_hashes: Hashes
    parent_block_hash: int | None = None
    token_ids: Annotated[list[TokenId], Meta(max_length=_MOST)] = []
    block_size: Count = 0
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: Annotated[list[Any], Meta(max_length=_MOST)] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    locality: str | None = None
    ownership: str | None = None

    @property
    def namespace(self) -> str | None:
        """The namespace of the blocks, in the form of `namespaces`; meaningful if there is no parent."""
        return event_namespace(self.lora_name, self.cache_salt)


class BlockRemoved(Struct, frozen=True, gc=False, tag_field="type", tag="BlockRemoved"):
    """Blocks left the cache (one tier of it, if `medium` is set). Hashes are u64."""

    block_hashes: Hashes
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None
    remaining_copy_counts: Annotated[list[Count], Meta(max_length=_MOST)] | None = None


@final
class AllBlocksCleared(Struct, frozen=True, tag_field="type", tag="AllBlocksCleared"):
    """The cache is empty."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(Struct, frozen=True):
    """A published message: events in order.

    `ts` is the publisher's clock in seconds since the epoch. `rejected` counts events that were left out, by
    `DecodeReason`.
    """

    ts: float
    events: list[Event]
    dp_rank: int | None = None
    rejected: dict[str, int] = {}


class _MapBatch(Struct, array_like=True):
    ts: float
    events: list[Event]
    dp_rank: int | None = None


class _RawBatch(Struct, array_like=True):
    """A batch with undecoded events."""

    ts: float
    events: Annotated[list[msgspec.Raw], Meta(max_length=_MOST_EVENTS)]
    dp_rank: int | None = None


class _Extras(Struct):
    """Only the undecoded extra keys of an event."""

    extra_keys: msgspec.Raw = msgspec.Raw()


class _RawMapBatch(Struct):
    """A batch as a map, with undecoded events."""

    ts: float
    events: Annotated[list[msgspec.Raw], Meta(max_length=_MOST_EVENTS)]
    data_parallel_rank: int | None = None
    attn_dp_rank: int | None = None


_TYPES: Final[dict[str, Any]] = {
    "BlockStored": BlockStored,
    "BlockRemoved": BlockRemoved,
    "AllBlocksCleared": AllBlocksCleared,
}
_POSITIONS: Final[dict[str, tuple[str, ...]]] = {
    "BlockStored": BlockStored.__struct_fields__[:11],
    "BlockRemoved": BlockRemoved.__struct_fields__[:3],
    "AllBlocksCleared": (),
}
"""The field order of the positional form, after its head. Older versions cut it at the tail; newer members are in maps
only."""
_METADATA: Final = ("cache_salt", "session_id")
"""Members that SGLang 0.5.18 and 0.5.19 put into the map instead of `lora_name`, for salted requests."""

_STORED_OPTIONAL: Final = (
    "medium",
    "cache_salt",
    "session_id",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
    "ownership",
)
_REMOVED_OPTIONAL: Final = ("medium", "group_idx", "locality", "ownership", "remaining_copy_counts")

_encoder = msgspec.msgpack.Encoder()
_map_decoder = msgspec.msgpack.Decoder(_MapBatch)
_raw_decoder = msgspec.msgpack.Decoder(_RawBatch)
_raw_map_decoder = msgspec.msgpack.Decoder(_RawMapBatch)
_extras_decoder = msgspec.msgpack.Decoder(_Extras)
_event_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
_any_decoder = msgspec.msgpack.Decoder()
_MAPS: Final = frozenset(bytes([first]) for first in (*range(0x80, 0x90), 0xDE, 0xDF))
"""First bytes of a map."""
_set: Final = msgspec.structs.force_setattr


def encode_batch(ts: float, events: Sequence[Event], dp_rank: int = 0) -> bytes:
    """Encodes a batch in SGLang's form. Hashes are u64, written as signed 64-bit integers."""
    return _encoder.encode((float(ts), [_outgoing(event) for event in events], dp_rank))


def decode_batch(payload: bytes) -> EventBatch:
    """Decodes a batch of any known version. Raises only `DecodeError`.

    Unknown and malformed events are left out and counted in `rejected`. O(bytes); about 1 µs for a block of 16 tokens
    in today's forms.
    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise DecodeError(DecodeReason.TOO_LARGE, f"{len(payload)} bytes")
    if len(payload) > _LARGE_BYTES:
        return _decode_each(payload)
    try:
        batch = _map_decoder.decode(payload)
        for event in batch.events:
            _settle(event)
    except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError):
        return _decode_each(payload)
    return _batch(batch.ts, batch.events, batch.dp_rank, {})


def root_digest(namespace: str | None) -> bytes:
    """The parent of a namespace's first block: empty for the common namespace (as in SGLang), else 32 bytes."""
    if namespace is None:
        return b""
    return hashlib.sha256(b"treeline.namespace\0" + namespace.encode()).digest()


def block_hash(parent_digest: bytes, tokens: Sequence[int]) -> bytes:
    """A block's 32-byte digest: SHA-256 over its parent's digest and its tokens as u32 little-endian."""
    return hashlib.sha256(parent_digest + struct.pack(f"<{len(tokens)}I", *tokens)).digest()


def hash_of(digest: bytes) -> int:
    """A digest's u64 in events: its first 8 bytes, big-endian."""
    return int.from_bytes(digest[:8], "big")


def _outgoing(event: Event) -> dict[str, Any]:
    """Returns the map to write: SGLang's fields in SGLang's order, then all others that are set."""
    if isinstance(event, AllBlocksCleared):
        return {"type": "AllBlocksCleared"}
    out: dict[str, Any] = {
        "type": type(event).__name__,
        "block_hashes": [_signed(h) for h in event.block_hashes],
    }
    if isinstance(event, BlockStored):
        parent = event.parent_block_hash
        out["parent_block_hash"] = None if parent is None else _signed(parent)
        out["token_ids"] = event.token_ids
        out["block_size"] = event.block_size
        out["lora_id"] = event.lora_id
        optional: tuple[str, ...] = _STORED_OPTIONAL
    else:
        optional = _REMOVED_OPTIONAL
    for name in optional:
        value = getattr(event, name)
        if value is not None or name == "lora_name":
            out[name] = value
    return out


def _signed(value: int) -> int:
    return value - (1 << 64) if value & _SIGN else value


def _settle(event: Event) -> None:
    """Converts signed hashes of a new event to u64, in place. Raises `ValueError` for extra keys that no engine
    sends."""
    if type(event) is BlockStored:
        if event.extra_keys is not None:
            _check_extra(event.extra_keys, len(event.block_hashes))
        parent = event.parent_block_hash
        if parent is not None and parent < 0:
            _set(event, "parent_block_hash", parent & _U64)
    elif isinstance(event, AllBlocksCleared):
        return
    hashes = event.block_hashes
    for i, value in enumerate(hashes):
        if value < 0:
            hashes[i] = value & _U64


def _check_extra(extra_keys: list[Any], blocks: int) -> None:
    """Checks the extra keys of blocks: nil, or a few strings, digests, numbers, and pairs of an item and its offset."""
    if len(extra_keys) > blocks:
        raise ValueError("more extra keys than blocks")
    for keys in filter(None, extra_keys):
        if isinstance(keys, dict) or (isinstance(keys, list) and len(keys) > _MOST_KEYS):
            raise ValueError("extra keys of a block in another form")
        for key in keys if isinstance(keys, list) else ():
            if isinstance(key, dict) or (
                isinstance(key, list) and not (0 < len(key) <= 8 and not any(isinstance(it, list | dict) for it in key))
            ):
                raise ValueError("an extra key in another form")


def _batch(ts: float, events: list[Event], dp_rank: int | None, rejected: dict[str, int]) -> EventBatch:
    if not math.isfinite(ts):
        raise DecodeError(DecodeReason.BAD_BATCH, "ts is not a finite number")
    return EventBatch(ts, events, dp_rank, rejected)


class _RejectedError(Exception):
    def __init__(self, reason: DecodeReason) -> None:
        self.reason = reason


def _decode_each(payload: bytes) -> EventBatch:
    """Decodes event by event: a large batch, or one with events in another form."""
    ts, raw_events, dp_rank = _outline(payload)
    events: list[Event] = []
    rejected: dict[str, int] = {}
    hashes, extra = _MOST, _MOST_EXTRA_BYTES
    for raw in raw_events:
        try:
            needed = _extra_bytes(raw)
            if needed > extra:
                raise _RejectedError(DecodeReason.TOO_LARGE)
            extra -= needed
            event = _event(raw)
        except _RejectedError as error:
            rejected[error.reason] = rejected.get(error.reason, 0) + 1
            if sum(rejected.values()) > _MOST_REJECTED:
                raise DecodeError(DecodeReason.BAD_BATCH, f"more than {_MOST_REJECTED} bad events") from None
            continue
        events.append(event)
        hashes -= 0 if isinstance(event, AllBlocksCleared) else len(event.block_hashes)
        if hashes < 0:
            raise DecodeError(DecodeReason.TOO_LARGE, f"more than {_MOST} hashes")
    return _batch(ts, events, dp_rank, rejected)


def _outline(payload: bytes) -> tuple[float, list[msgspec.Raw], int | None]:
    """Decodes the batch (an array of two or three, or a map) with undecoded events."""
    try:
        if payload[:1] in _MAPS:
            as_map = _raw_map_decoder.decode(payload)
            rank = as_map.attn_dp_rank if as_map.data_parallel_rank is None else as_map.data_parallel_rank
            return as_map.ts, as_map.events, rank
        batch = _raw_decoder.decode(payload)
    except msgspec.ValidationError as error:
        raise DecodeError(DecodeReason.BAD_BATCH, str(error)[:200]) from None
    except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError) as error:
        raise DecodeError(DecodeReason.NOT_MSGPACK, str(error)[:200]) from None
    return batch.ts, batch.events, batch.dp_rank


def _extra_bytes(raw: msgspec.Raw) -> int:
    """Returns the size of an event's extra keys; 0 for an event in an older form, which is small."""
    try:
        return len(_extras_decoder.decode(raw).extra_keys)
    except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError):
        return 0


def _event(raw: msgspec.Raw) -> Event:
    try:
        event = _event_decoder.decode(raw)
        _settle(event)
    except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError):
        pass
    else:
        return event
    if len(raw) > _SLOW_BYTES:
        raise _RejectedError(DecodeReason.TOO_LARGE)
    try:
        return _loose_event(_any_decoder.decode(raw))
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError, MemoryError):
        raise _RejectedError(DecodeReason.BAD_EVENT) from None


def _loose_event(raw: Any) -> Event:
    if isinstance(raw, list) and raw and isinstance(raw[0], str):
        kind: Any = raw[0]
        fields: dict[str, Any] = dict(zip(_POSITIONS.get(kind, ()), raw[1:], strict=False))
        if isinstance(fields.get("lora_name"), dict):
            metadata = fields.pop("lora_name")
            fields |= {name: metadata[name] for name in _METADATA if name in metadata}
        if fields.get("parent_block_hash") == 0:
            fields["parent_block_hash"] = None  # llm-d-inference-sim writes a prompt's beginning like this
    elif isinstance(raw, dict):
        kind = raw.get("type")
        fields = raw
    else:
        raise _RejectedError(DecodeReason.BAD_EVENT)
    known = _TYPES.get(kind) if isinstance(kind, str) else None
    if known is None:
        raise _RejectedError(DecodeReason.UNKNOWN_TYPE if isinstance(kind, str) else DecodeReason.BAD_EVENT)
    plain: dict[str, Any] = {"type": kind}
    for name in known.__struct_fields__:
        if name in fields:
            plain[name] = fields[name]
    if known is not AllBlocksCleared:
        hashes = plain.get("block_hashes")
        if not isinstance(hashes, list):
            raise _RejectedError(DecodeReason.BAD_HASH)
        plain["block_hashes"] = [_hash(h) for h in hashes]
    if known is BlockStored:
        if plain.get("parent_block_hash") is not None:
            plain["parent_block_hash"] = _hash(plain["parent_block_hash"])
        plain["token_ids"] = _tokens(plain.get("token_ids", []))
    event: Event = msgspec.convert(plain, known)
    _settle(event)
    return event


def _hash(value: Any) -> int:
    """Returns a u64 from a signed or unsigned number, or from raw bytes: vLLM uses the last 8 (of 32 of SHA-256, or 16
    of xxhash).
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value & _U64
    if isinstance(value, bytes) and len(value) >= 8:
        return int.from_bytes(value[-8:], "big")
    raise _RejectedError(DecodeReason.BAD_HASH)


def _tokens(value: Any) -> list[int]:
    """Returns token ids. An item may be a pair (EAGLE: token and next token); the first is the block's own. SGLang has
    wide numbers for the tokens of images, which no prompt's key can spell; their lowest 31 bits tell them apart.
    """
    if not isinstance(value, list):
        raise _RejectedError(DecodeReason.BAD_TOKENS)
    tokens: list[int] = []
    for item in value:
        token = item[0] if isinstance(item, list) and len(item) == 2 else item
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 1 << 63:
            raise _RejectedError(DecodeReason.BAD_TOKENS)
        tokens.append(token if token < 1 << 32 else FIRST_ID | token & FIRST_ID - 1)
    return tokens
