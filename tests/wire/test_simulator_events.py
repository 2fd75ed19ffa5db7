"""Events of llm-d-inference-sim, in both of its formats, as bytes.

They were written by its message types (pkg/engine/vllm/kvevents.go and pkg/kvcache/kv_cache_sender.go, November 2026)
through the library that it uses, vmihailenco/msgpack v5: integers at their full width, all members of a positional
event whether they are set or not, and 0 for "no parent" there.
"""

from __future__ import annotations

from treeline_wire.events import AllBlocksCleared, BlockRemoved, BlockStored, decode_batch

_HASH = 0xF000000000000001
_STORED = [
    BlockStored([_HASH, 2], None, [100, 20000, 3, 70000], 2, medium="GPU"),
    BlockStored([3], 2, [5, 6], 2, medium="GPU"),
    BlockRemoved([3], medium="GPU"),
]


def test_positional_events_of_the_simulator() -> None:
    batch = decode_batch(
        bytes.fromhex(
            "93cb3ff80000000000009399ab426c6f636b53746f72656492cff000000000000001cf0000000000000002cf0000000000000000"
            "94ce00000064ce00004e20ce00000003ce0001117002c0a3475055c0c099ab426c6f636b53746f72656491cf0000000000000003"
            "cf000000000000000292ce00000005ce0000000602c0a3475055c0c093ac426c6f636b52656d6f76656491cf0000000000000003"
            "a347505500"
        )
    )
    assert (batch.ts, batch.dp_rank, batch.rejected) == (1.5, 0, {})
    assert batch.events == _STORED


def test_positional_events_of_the_simulator_with_a_salt() -> None:
    batch = decode_batch(
        bytes.fromhex(
            "93cb3ff80000000000009199ab426c6f636b53746f72656492cff000000000000001cf0000000000000002cf0000000000000000"
            "94ce00000064ce00004e20ce00000003ce0001117002c0a3475055c09291a874656e616e742d61c000"
        )
    )
    [stored] = batch.events
    assert isinstance(stored, BlockStored)
    assert stored.extra_keys == [["tenant-a"], None]
    assert stored.parent_block_hash is None


def test_map_events_of_the_simulator() -> None:
    batch = decode_batch(
        bytes.fromhex(
            "93cb3ff80000000000009386a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392cff000000000000001"
            "cf0000000000000002b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f69647394ce00000064ce00004e20ce0000"
            "0003ce00011170aa626c6f636b5f73697a6502a66d656469756da347505586a474797065ab426c6f636b53746f726564ac626c6f"
            "636b5f68617368657391cf0000000000000003b1706172656e745f626c6f636b5f68617368cf0000000000000002a9746f6b656e"
            "5f69647392ce00000005ce00000006aa626c6f636b5f73697a6502a66d656469756da347505583a474797065ac426c6f636b5265"
            "6d6f766564ac626c6f636b5f68617368657391cf0000000000000003a66d656469756da347505500"
        )
    )
    assert (batch.ts, batch.dp_rank, batch.rejected) == (1.5, 0, {})
    assert batch.events == _STORED


def test_both_forms_of_a_cleared_cache() -> None:
    batch = decode_batch(
        bytes.fromhex(
            "93cb3ff80000000000009291b0416c6c426c6f636b73436c656172656481a474797065b0416c6c426c6f636b73436c656172656400"
        )
    )
    assert batch.events == [AllBlocksCleared(), AllBlocksCleared()]
