"""Mutated and invented messages for every decoder of the contracts.

The invariant: a decoder returns a value that keeps its promises, or raises its own error. Nothing else, ever.

    python -m tests.wire.fuzz --count 1000000 --seed 0
"""

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from treeline_wire import frames
from treeline_wire.errors import WireError
from treeline_wire.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    DecodeError,
    decode_batch,
    encode_batch,
)
from treeline_wire.load import LOAD_TOPIC, TREELINE_LOAD_TOPIC, LoadStat, TreelineLoad, decode_load, encode

#: One stored block, one removal, one clear, as vLLM writes them today; the same as arrays; SGLang's; ours; a salted
#: block of SGLang 0.5.18; a load report.
GOLDEN = {
    "map": (
        "93cb3ff00000000000009389a474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739101b1"
        "706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473920102aa626c6f636b5f73697a6502a76c"
        "6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0a967726f75705f6964780084a4747970"
        "65ac426c6f636b52656d6f766564ac626c6f636b5f6861736865739101a66d656469756da3475055a967726f75"
        "705f6964780081a474797065b0416c6c426c6f636b73436c656172656400"
    ),
    "positional": (
        "93cb3ff00000000000009397ab426c6f636b53746f7265649101c092010202c0a347505593ac426c6f636b5265"
        "6d6f7665649101a347505591b0416c6c426c6f636b73436c656172656400"
    ),
    "sglang": (
        "93cb3ff00000000000009187a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391ffb1"
        "706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473920102aa626c6f636b5f73697a6502a76c"
        "6f72615f6964c0a66d656469756da347505500"
    ),
    "ours": (
        "93cb3ff00000000000009188a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391ffb1"
        "706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473920102aa626c6f636b5f73697a6502a76c"
        "6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c000"
    ),
    "salted": (
        "93cb3ff00000000000009198ab426c6f636b53746f72656491ffc092010202c0a347505581aa63616368655f73"
        "616c74a87465616d2de7ac9200"
    ),
    "loadstat": "9ba84c6f61645374617401020304000506070809",
}
_FAILURES = Path("fuzz-failures")
_INTERESTING = bytes(
    [0x80, 0x90, 0xA0, 0xC0, 0xC1, 0xC4, 0xCB, 0xCF, 0xD3, 0xD9, 0xDC, 0xDD, 0xDE, 0xDF, 0xFF, 0x7F, 0]
)
_NUMBERS = [0, 1, -1, 2**31, -(2**31), 2**32 - 1, 2**32, 2**63 - 1, -(2**63), 2**63, 2**64 - 1]
_WORDS = [
    "BlockStored",
    "BlockRemoved",
    "AllBlocksCleared",
    "LoadStat",
    "GPU",
    "",
    "\0x",
    "type",
    "ts",
    "é" * 40,
]
_KEYS = [*BlockStored.__struct_fields__, *BlockRemoved.__struct_fields__, *TreelineLoad.__struct_fields__]
_KEYS += ["type", "ts", "events", "data_parallel_rank", "oldest", "newest", "blocks"]


def check_batch(payload: bytes) -> None:
    """`decode_batch`: hashes are u64, tokens u32, and what was decoded survives our own form."""
    try:
        batch = decode_batch(payload)
    except DecodeError:
        return
    for event in batch.events:
        if isinstance(event, AllBlocksCleared):
            continue
        assert all(0 <= h < 1 << 64 for h in event.block_hashes), event
        if isinstance(event, BlockStored):
            assert event.parent_block_hash is None or 0 <= event.parent_block_hash < 1 << 64, event
            assert all(0 <= token < 1 << 32 for token in event.token_ids), event
            assert event.namespace is None or isinstance(event.namespace, str)
    written = encode_batch(batch.ts, batch.events)
    again = encode_batch(batch.ts, decode_batch(written).events)
    assert again == written, "it changes when it is written and read again"


def check_load(payload: bytes) -> None:
    """`decode_load`, by either topic and by an unknown one."""
    for topic in (LOAD_TOPIC, TREELINE_LOAD_TOPIC, b"x"):
        try:
            report = decode_load(topic, payload)
        except DecodeError:
            continue
        assert decode_load(topic, encode(report)) == report


def check_frames(payload: bytes) -> None:
    """Every parser of frames, on the payload in a place where bytes are expected."""
    magic = b"treeline"
    for verb in (b"hello", b"snapshot", b"chunk", b"end", payload):
        _no_other_error(frames.parse_reply, [b"", magic, verb, b"1", payload])
    pieces = [payload[i : i + 8] for i in range(0, min(len(payload), 40), 8)]
    for parse in (frames.parse_live, frames.parse_reply):
        _no_other_error(parse, pieces)
        _no_other_error(parse, [b"", *pieces])
    frames.parse_request(pieces)
    frames.parse_request([b"", magic, *pieces[:2]])


CHECKS: tuple[Callable[[bytes], None], ...] = (check_batch, check_load, check_frames)


def seeds() -> list[bytes]:
    """Return messages of every kind that the decoders take."""
    stored = BlockStored(
        [1 << 63, 2], None, list(range(32)), 16, None, "GPU", cache_salt="s", extra_keys=[["a", 1], None]
    )
    removed = BlockRemoved([7, 1 << 63], "CPU", 1)
    found = [bytes.fromhex(text) for text in GOLDEN.values()]
    found.append(encode_batch(1.5, [stored, removed, AllBlocksCleared(), stored]))
    found.append(encode(LoadStat(1, 2, 3)))
    found.append(encode(TreelineLoad(epoch=5, adapters=["a"], prefill_tokens_per_s=2.5)))
    found.append(frames.encode_reply(frames.Hello(1, 2, 3))[-1])
    found.append(frames.encode_reply(frames.SnapshotHeader(1, -1, 3))[-1])
    raw = {
        "type": "BlockStored",
        "block_hashes": [bytes(range(32))],
        "token_ids": [[1, 2], [2, 3]],
        "block_size": 2,
    }
    found.append(msgspec.msgpack.encode({"ts": 2, "events": [raw], "data_parallel_rank": None}))
    return found


def mutants(count: int, seed: int) -> Iterator[bytes]:
    """Yield mutated seeds, and one in four built from the words of the formats. The same for the same seed."""
    rng = random.Random(seed)
    known = seeds()
    for _ in range(count):
        if rng.random() < 0.25:
            yield msgspec.msgpack.encode(_made_up(rng))
            continue
        data = bytearray(rng.choice(known))
        for _ in range(rng.choice((1, 1, 1, 2, 6))):
            _mutate(rng, data, known)
        yield bytes(data)


def _mutate(rng: random.Random, data: bytearray, known: list[bytes]) -> None:
    at = rng.randrange(len(data) + 1)
    match rng.randrange(7):
        case 0 if at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        case 1 if at < len(data):
            data[at] = rng.choice(_INTERESTING)
        case 2:
            data[at:at] = bytes([rng.choice(_INTERESTING)]) * rng.choice((1, 1, 4, 8))
        case 3:
            del data[at : at + rng.choice((1, 2, 8))]
        case 4 if rng.random() < 0.3:
            del data[at:]
        case 5:
            other = rng.choice(known)
            begin = rng.randrange(len(other))
            data[at : at + rng.randrange(9)] = other[begin : begin + rng.randrange(1, 40)]
        case 6:
            data[at:at] = data[at : at + rng.randrange(1, 30)]
        case _:
            pass


def _made_up(rng: random.Random) -> Any:
    """Return a batch with the right outline and random contents, or just random data."""
    if rng.random() < 0.2:
        return _value(rng, 4)
    events = [_event(rng) for _ in range(rng.randrange(4))]
    rank = rng.choice([None, 0, 0, 0, 3, 3, "x", True])
    ts = rng.choice([*[1.5] * 9, 1, float("nan"), float("inf"), None, "x", True, 2**63])
    if rng.random() < 0.2:
        return {"ts": ts, "events": events, "data_parallel_rank": rank}
    return [ts, events, rank][: rng.choice((3, 3, 3, 2, 1))]


def _event(rng: random.Random) -> Any:
    kind = rng.choice(_WORDS[:4])
    if rng.random() < 0.5:
        hashes = [rng.choice([*_NUMBERS, bytes(32), bytes(8), "x"]) for _ in range(rng.randrange(3))]
        fields = [
            hashes,
            rng.choice(_NUMBERS),
            [rng.choice([1, 5, [1, 2], 2**31]) for _ in range(rng.randrange(4))],
        ]
        return [kind, *fields, *(_value(rng, 2) for _ in range(rng.randrange(10)))]
    event = {rng.choice(_KEYS): _value(rng, 2) for _ in range(rng.randrange(8))}
    event["block_hashes"] = [rng.choice(_NUMBERS) for _ in range(rng.randrange(3))]
    return {"type": kind, **event}


def _value(rng: random.Random, depth: int) -> Any:
    match rng.randrange(9 if depth else 6):
        case 0:
            return rng.choice(_NUMBERS)
        case 1:
            return rng.choice(_WORDS)
        case 2:
            return rng.choice([None, True, False])
        case 3:
            return rng.choice([0.0, -1.5, float("nan"), 1e300])
        case 4:
            return rng.randbytes(rng.choice((0, 8, 32)))
        case 5:
            return rng.randrange(200_000)
        case 6 | 7:
            return [_value(rng, depth - 1) for _ in range(rng.randrange(4))]
        case _:
            return {rng.choice(_KEYS): _value(rng, depth - 1) for _ in range(rng.randrange(4))}


def _no_other_error(parse: Callable[[list[bytes]], object], message: list[bytes]) -> None:
    try:
        parse(message)
    except WireError:
        return


def run(count: int, seed: int) -> tuple[bytes, str] | None:
    """Try `count` inputs; return the first that breaks the invariant, with its outcome, or None."""
    for payload in mutants(count, seed):
        for check in CHECKS:
            try:
                check(payload)
            except Exception as error:
                return payload, f"{check.__name__}: {type(error).__name__}: {error}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    begin = time.monotonic()
    step = 50_000
    for done in range(0, options.count, step):
        found = run(min(step, options.count - done), options.seed + done)
        if found is not None:
            payload, what = found
            _FAILURES.mkdir(exist_ok=True)
            path = _FAILURES / f"wire-{options.seed + done}.bin"
            path.write_bytes(payload)
            sys.stdout.write(f"\n{what}\ninput: {path} ({payload.hex()[:200]})\n")
            return 1
        total = min(done + step, options.count)
        sys.stdout.write(f"\r{total:,} of {options.count:,} inputs, {time.monotonic() - begin:.0f} s")
        sys.stdout.flush()
    sys.stdout.write("\nevery decoder returned a value or raised its own error\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
