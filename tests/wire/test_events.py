"""KV events: every generation is read, ours is written, and bad input has bounded cost."""

import gc
import hashlib
import struct
import tracemalloc
from typing import Any

import msgspec
import pytest
from treeline_wire import events
from treeline_wire.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    DecodeError,
    DecodeReason,
    EventBatch,
    block_hash,
    decode_batch,
    encode_batch,
    hash_of,
    root_digest,
)

from .fuzz import CHECKS, GOLDEN, mutants, run

pack = msgspec.msgpack.encode
U64 = (1 << 64) - 1


def golden(name: str) -> EventBatch:
    return decode_batch(bytes.fromhex(GOLDEN[name]))


def only(event: Any) -> Any:
    """Return the one event of a batch that holds just `event`."""
    batch = decode_batch(pack([1.0, [event], 0]))
    assert batch.rejected == {}
    assert len(batch.events) == 1
    return batch.events[0]


def rejection(event: Any) -> str:
    """Return why an event was left out of a batch that also holds a good one."""
    batch = decode_batch(pack([1.0, [event, {"type": "AllBlocksCleared"}], 0]))
    assert batch.events == [AllBlocksCleared()]
    ((reason, count),) = batch.rejected.items()
    assert count == 1
    return reason


def test_our_form_is_sglangs_with_the_adapters_name_to_the_byte() -> None:
    event = BlockStored([U64], None, [1, 2], 2, None, "GPU")
    assert encode_batch(1.0, [event]).hex() == GOLDEN["ours"]
    assert golden("ours") == golden("sglang")


@pytest.mark.parametrize(
    ("form", "events"),
    [
        (
            "map",
            [
                BlockStored([1], None, [1, 2], 2, None, "GPU", group_idx=0),
                BlockRemoved([1], "GPU", 0),
                AllBlocksCleared(),
            ],
        ),
        (
            "positional",
            [BlockStored([1], None, [1, 2], 2, None, "GPU"), BlockRemoved([1], "GPU"), AllBlocksCleared()],
        ),
        ("sglang", [BlockStored([U64], None, [1, 2], 2, None, "GPU")]),
    ],
)
def test_vllms_maps_and_arrays_and_sglangs_signed_hashes_are_read(form: str, events: list[Any]) -> None:
    assert golden(form) == EventBatch(1.0, events, 0)


class _VllmEvent(msgspec.Struct, tag=True, omit_defaults=True):
    pass


class _VllmStored(_VllmEvent, tag="BlockStored"):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class _VllmRemoved(_VllmEvent, tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None


class _VllmCleared(_VllmEvent, tag="AllBlocksCleared"):
    pass


def test_decoders_with_vllms_types_read_what_we_publish() -> None:
    stored, removed = BlockStored([1], 2, [3, 4], 2, medium="GPU"), BlockRemoved([1], "GPU")
    payload = encode_batch(1.0, [stored, removed, AllBlocksCleared()])
    kinds = list[_VllmStored | _VllmRemoved | _VllmCleared]
    _, events, _ = msgspec.msgpack.decode(payload, type=tuple[float, kinds, int])
    assert events == [_VllmStored([1], 2, [3, 4], 2, None, "GPU", None), _VllmRemoved([1], "GPU"), _VllmCleared()]


def test_sglang_0_5_18_puts_salts_into_a_map_behind_the_medium() -> None:
    assert golden("salted").events == [BlockStored([U64], None, [1, 2], 2, None, "GPU", cache_salt="team-笒")]
    head = ["BlockStored", [1], None, [1], 1, None, "GPU"]
    assert only([*head, {"cache_salt": "s", "session_id": "x", "later": 1}]).session_id == "x"
    assert only([*head, {"session_id": "x"}]).cache_salt is None
    assert only([*head, {}]) == only(head)
    assert rejection([*head, {"cache_salt": 7}]) == DecodeReason.BAD_EVENT


def test_a_strict_reader_of_three_elements_reads_our_batches() -> None:
    payload = encode_batch(2, [BlockRemoved([1 << 63]), AllBlocksCleared()], 3)
    assert msgspec.msgpack.decode(payload, type=tuple[float, list[Any], int]) == (
        2.0,
        [{"type": "BlockRemoved", "block_hashes": [-(1 << 63)]}, {"type": "AllBlocksCleared"}],
        3,
    )


def test_every_field_survives_our_form() -> None:
    stored = BlockStored(
        block_hashes=[1 << 63, 5],
        parent_block_hash=U64,
        token_ids=[0, 2**32 - 1, 3, 4],
        block_size=2,
        lora_id=7,
        medium="CPU",
        lora_name="adapter",
        extra_keys=[["adapter", 1], None],
        group_idx=1,
        kv_cache_spec_kind="sliding_window",
        kv_cache_spec_sliding_window=128,
        cache_salt="salt",
        session_id="s",
        locality="LOCAL",
        ownership="tier",
    )
    removed = BlockRemoved([3, U64], "GPU", 0, "REMOTE", "tier", [1, 0])
    events = [stored, removed, AllBlocksCleared()]
    assert decode_batch(encode_batch(9.5, events, 4)) == EventBatch(9.5, events, 4)


@pytest.mark.parametrize("length", range(2, 13))
def test_arrays_may_omit_their_last_elements(length: int) -> None:
    full = ["BlockStored", [1], 2, [3], 1, 4, "GPU", "lora", [["x"]], 5, "mamba", 6]
    expected = BlockStored([1], 2, [3], 1, 4, "GPU", "lora", [["x"]], 5, "mamba", 6)
    stored = only(full[:length])
    given = BlockStored.__struct_fields__[: length - 1]
    assert all(getattr(stored, name) == getattr(expected, name) for name in given)
    defaults = BlockStored([1])
    rest = BlockStored.__struct_fields__[length - 1 :]
    assert all(getattr(stored, name) == getattr(defaults, name) for name in rest)


@pytest.mark.parametrize("event", [{"type": "AllBlocksCleared"}, ["AllBlocksCleared"]], ids=["map", "array"])
@pytest.mark.parametrize(
    ("batch", "rank"),
    [
        (lambda e: [2, [e]], None),
        (lambda e: [2.0, [e], None], None),
        (lambda e: [2.0, [e], 3], 3),
        (lambda e: [2.0, [e], 3, "later"], 3),
        (lambda e: {"ts": 2.0, "events": [e]}, None),
        (lambda e: {"ts": 2, "events": [e], "data_parallel_rank": 3, "later": 1}, 3),
        (lambda e: {"ts": 2, "events": [e], "attn_dp_rank": 3}, 3),
    ],
)
def test_batches_are_arrays_of_two_or_three_or_maps(event: Any, batch: Any, rank: int | None) -> None:
    assert decode_batch(pack(batch(event))) == EventBatch(2.0, [AllBlocksCleared()], rank)


@pytest.mark.parametrize("length", [8, 16, 20, 32, 64])
def test_hashes_are_numbers_of_either_sign_or_bytes_of_any_algorithm(length: int) -> None:
    digest = bytes(range(length))
    low = int.from_bytes(digest[-8:], "big")
    event = {
        "type": "BlockStored",
        "block_hashes": [-1, digest, U64],
        "parent_block_hash": digest,
        "token_ids": [],
    }
    stored = only(event)
    assert stored.block_hashes == [U64, low, U64]
    assert stored.parent_block_hash == low
    assert only({"type": "BlockRemoved", "block_hashes": [digest, -2]}).block_hashes == [low, U64 - 1]
    assert only(["BlockRemoved", [-(1 << 63)]]).block_hashes == [1 << 63]
    assert only({**event, "block_hashes": [3], "parent_block_hash": -5}).parent_block_hash == U64 - 4


def test_token_pairs_stand_for_their_first() -> None:
    event = {"type": "BlockStored", "block_hashes": [1], "token_ids": [[5, 6], [6, 7], 8], "block_size": 3}
    assert only(event).token_ids == [5, 6, 8]


def test_unknown_fields_are_ignored_and_missing_ones_have_defaults() -> None:
    assert only({"type": "BlockRemoved", "block_hashes": [1], "new_field": {"a": [1]}}) == BlockRemoved([1])
    assert only({"type": "BlockStored", "block_hashes": [1], "later": None}) == BlockStored([1])
    assert only({"type": "BlockRemoved", "block_hashes": [2], "remaining_copy_counts": [1]}).remaining_copy_counts == [
        1
    ]


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        ({"type": "BlockMoved", "block_hashes": [1]}, DecodeReason.UNKNOWN_TYPE),
        (["BlockMoved", 1], DecodeReason.UNKNOWN_TYPE),
        ({"block_hashes": [1]}, DecodeReason.BAD_EVENT),
        ({"type": 1}, DecodeReason.BAD_EVENT),
        (["x"], DecodeReason.UNKNOWN_TYPE),
        ([], DecodeReason.BAD_EVENT),
        ("BlockStored", DecodeReason.BAD_EVENT),
        (None, DecodeReason.BAD_EVENT),
        ({"type": "BlockStored"}, DecodeReason.BAD_HASH),
        (["BlockStored"], DecodeReason.BAD_HASH),
        ({"type": "BlockStored", "block_hashes": ["x"]}, DecodeReason.BAD_HASH),
        ({"type": "BlockStored", "block_hashes": [True]}, DecodeReason.BAD_HASH),
        ({"type": "BlockStored", "block_hashes": [b"short"]}, DecodeReason.BAD_HASH),
        ({"type": "BlockRemoved", "block_hashes": 1}, DecodeReason.BAD_HASH),
        ({"type": "BlockStored", "block_hashes": [1], "parent_block_hash": "x"}, DecodeReason.BAD_HASH),
        ({"type": "BlockStored", "block_hashes": [1], "token_ids": [-1]}, DecodeReason.BAD_TOKENS),
        ({"type": "BlockStored", "block_hashes": [1], "token_ids": [2**63]}, DecodeReason.BAD_TOKENS),
        ({"type": "BlockStored", "block_hashes": [1], "token_ids": [1.5]}, DecodeReason.BAD_TOKENS),
        ({"type": "BlockStored", "block_hashes": [1], "token_ids": [[1, 2, 3]]}, DecodeReason.BAD_TOKENS),
        ({"type": "BlockStored", "block_hashes": [1], "token_ids": None}, DecodeReason.BAD_TOKENS),
        ({"type": "BlockStored", "block_hashes": [1], "block_size": -1}, DecodeReason.BAD_EVENT),
        ({"type": "BlockStored", "block_hashes": [1], "medium": 3}, DecodeReason.BAD_EVENT),
    ],
)
def test_a_bad_event_costs_one_event(event: Any, reason: DecodeReason) -> None:
    assert rejection(event) == reason


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", DecodeReason.NOT_MSGPACK),
        (b"\xc1", DecodeReason.NOT_MSGPACK),
        (bytes.fromhex(GOLDEN["map"])[:-1], DecodeReason.NOT_MSGPACK),
        (bytes.fromhex(GOLDEN["map"]) + b"\x00", DecodeReason.NOT_MSGPACK),
        (b"\x91" * 100_000, DecodeReason.BAD_BATCH),
        (b"\xdd\xff\xff\xff\xff\x00\xdd\xff\xff\xff\xff", DecodeReason.BAD_BATCH),
        (b"\xdf\xff\xff\xff\xff\xa2ts", DecodeReason.NOT_MSGPACK),
        (pack(1), DecodeReason.BAD_BATCH),
        (pack([]), DecodeReason.BAD_BATCH),
        (pack([1.0]), DecodeReason.BAD_BATCH),
        (pack({}), DecodeReason.BAD_BATCH),
        (pack(["now", []]), DecodeReason.BAD_BATCH),
        (pack([True, []]), DecodeReason.BAD_BATCH),
        (pack([float("nan"), [], 0]), DecodeReason.BAD_BATCH),
        (pack([float("inf"), [["BlockRemoved", [1]]], 0]), DecodeReason.BAD_BATCH),
        (pack([1.0, {}, 0]), DecodeReason.BAD_BATCH),
        (pack([1.0, [], "0"]), DecodeReason.BAD_BATCH),
        (pack([1.0, [], True]), DecodeReason.BAD_BATCH),
        (bytes((64 << 20) + 1), DecodeReason.TOO_LARGE),
    ],
)
def test_a_bad_batch_is_one_typed_error(payload: bytes, reason: DecodeReason) -> None:
    with pytest.raises(DecodeError) as caught:
        decode_batch(payload)
    assert caught.value.reason is reason
    assert str(caught.value).startswith(reason)


def test_ten_thousand_mutated_inputs_never_raise_anything_else() -> None:
    assert run(10_000, seed=7) is None


def test_the_fuzzer_reaches_every_outcome() -> None:
    """A fuzzer that only ever saw refusals would prove nothing."""
    good = rejected = refused = 0
    for payload in mutants(3000, seed=1):
        try:
            batch = decode_batch(payload)
        except DecodeError:
            refused += 1
        else:
            good += bool(batch.events)
            rejected += bool(batch.rejected)
    assert len(CHECKS) == 3
    assert min(good, rejected, refused) > 100


def test_hashes_chain_like_sglangs() -> None:
    first = block_hash(root_digest(None), [1, 2])
    assert first == hashlib.sha256(struct.pack("<2I", 1, 2)).digest()
    assert block_hash(first, [3]) == hashlib.sha256(first + struct.pack("<I", 3)).digest()
    assert hash_of(first) == int.from_bytes(first[:8], "big")


def test_namespaces_have_roots_of_their_own() -> None:
    roots = {root_digest(name) for name in (None, "", "a", "b")}
    assert len(roots) == 4
    assert block_hash(root_digest("a"), [1]) != block_hash(root_digest("b"), [1])


def test_an_event_names_its_namespace() -> None:
    assert BlockStored([1]).namespace is None
    assert BlockStored([1], cache_salt="s").namespace == "s"
    assert BlockStored([1], lora_name="l").namespace not in (None, "l", "s")


def outcome(payload: bytes) -> Any:
    try:
        return decode_batch(payload)
    except DecodeError as error:
        return error.reason


def test_large_batches_decoded_event_by_event_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    payloads = [*map(bytes.fromhex, GOLDEN.values()), *mutants(3000, seed=3)]
    whole = [outcome(payload) for payload in payloads]
    monkeypatch.setattr(events, "_LARGE_BYTES", 0)
    assert [outcome(payload) for payload in payloads] == whole
    assert sum(type(each) is EventBatch and bool(each.rejected) for each in whole) > 100


SIZE = 1 << 20


def many(item: bytes, count: int) -> bytes:
    """Return an array of the same item."""
    return b"\xdd" + struct.pack(">I", count) + item * count


def map_of(**members: bytes) -> bytes:
    return bytes([0x80 + len(members)]) + b"".join(pack(name) + value for name, value in members.items())


def stored(**members: bytes) -> bytes:
    return map_of(type=pack("BlockStored"), **{"block_hashes": many(b"\x01", 100), **members})


EMPTY = many(b"\x90", SIZE)
LARGE = {
    "events that are nil": many(b"\xc0", SIZE),
    "as many events as there may be": many(b"\xc0", 1 << 18),
    "tokens that nobody reads": many(stored(lookahead_token_ids=EMPTY), 1),
    "a member that nobody knows": many(stored(later=EMPTY), 1),
    "extra keys": many(stored(extra_keys=EMPTY), 1),
    "extra keys of one block": many(stored(extra_keys=many(EMPTY, 1)), 1),
    "extra keys in many events": many(stored(extra_keys=many(many(b"\x90", 1000), 100)), SIZE // 100_000),
    "hashes": many(map_of(type=pack("BlockRemoved"), block_hashes=many(b"\xe0", 3 * SIZE)), 1),
    "hashes in many events": many(map_of(type=pack("BlockRemoved"), block_hashes=many(b"\xe0", 10_000)), 200),
    "counts": many(stored(remaining_copy_counts=many(b"\xe0", SIZE)), 1),
    "an event as an array": many(b"\x92" + pack("BlockStored") + EMPTY, 1),
    "many events as arrays": many(b"\x92" + pack("BlockStored") + many(b"\x90", 1000), SIZE // 1000),
    "an event of no type": many(map_of(later=EMPTY), 1),
    "an event that is a list": many(EMPTY, 1),
    "maps": many(stored(extra_keys=many(b"\x80", SIZE)), 1),
}


@pytest.mark.parametrize(
    "what", [pytest.param(w, marks=pytest.mark.deep if w.startswith("hashes") else ()) for w in LARGE]
)
def test_decoding_a_payload_takes_memory_in_proportion(what: str) -> None:
    ts, inside = pack(1.0), LARGE[what]
    payload = map_of(ts=ts, events=inside) if what == "maps" else b"\x92" + ts + inside
    gc.collect()
    tracemalloc.start()
    try:
        outcome(payload)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < max(24 * len(payload), 48 << 20)


def test_a_large_batch_loses_only_its_wasteful_events() -> None:
    good = pack({"type": "BlockRemoved", "block_hashes": [7]})
    bad = stored(extra_keys=many(many(b"\x90", 300_000), 1))
    batch = decode_batch(b"\x92" + pack(1.0) + b"\x93" + good + bad + good)
    assert batch.events == [BlockRemoved([7])] * 2
    assert batch.rejected == {DecodeReason.TOO_LARGE: 1}


@pytest.mark.parametrize("extra", [[None, None], [{"a": 1}], [[["a", [1]]]], [["x"] * 1025], [[[]]]])
def test_unknown_extra_keys_lose_the_event(extra: Any) -> None:
    assert rejection({"type": "BlockStored", "block_hashes": [1], "extra_keys": extra}) == DecodeReason.BAD_EVENT


@pytest.mark.parametrize("extra", [[None], ["salt"], [["lora", ["mm", 3], b"digest", "salt"]], [[]]])
def test_extra_keys_of_todays_engines_are_kept(extra: Any) -> None:
    assert only({"type": "BlockStored", "block_hashes": [1], "extra_keys": extra}).extra_keys == extra
