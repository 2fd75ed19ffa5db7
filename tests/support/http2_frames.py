"""HTTP/2 frames, valid and invalid, and a fuzzer of our end of a connection.

make fuzz-http2 ARGS="--count 10000000 --seed 0"
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import OrderedDict

from treeline_epp.http2 import frames, grpc
from treeline_epp.http2.connection import Connection
from treeline_epp.http2.events import Came, Ended, Limits, Requested
from treeline_epp.http2.fields import Fields
from treeline_epp.http2.grpc import CallError, MessageReader

REQUEST = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/a.B/C"),
    (":authority", "picker"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
]
SETTINGS = frames.settings({})
HELLO = frames.PREFACE + SETTINGS


def block(*more: tuple[str, str], without: str = "") -> bytes:
    fields = [(name, value) for name, value in REQUEST if name != without] + list(more)
    return frames.header_block([(name.encode(), value.encode()) for name, value in fields])


def headers(stream: int, fields: bytes, flags: int = frames.END_HEADERS) -> bytes:
    return frames.head(frames.HEADERS, flags, stream, len(fields)) + fields


def data(stream: int, body: bytes, *, end: bool = False) -> bytes:
    return frames.head(frames.DATA, frames.END_STREAM if end else 0, stream, len(body)) + body


def ours(limits: Limits | None = None, known: OrderedDict[bytes, Fields] | None = None) -> Connection:
    return Connection(limits or Limits(), OrderedDict() if known is None else known)


def fields_of(rng: random.Random) -> bytes:
    """Return a block that decompresses to much, changes the table, or is invalid."""
    resized = b"\x20" * rng.choice((0, 0, 0, 1, 2, 3))
    return resized + rng.choice(
        (
            block(),
            bytes((0x80 | rng.randrange(128),)) * rng.choice((1, 1000)),
            b"\x40\x01x\x7f\xe1\x06" + b"v" * 1000 + b"\xbe" * 20 + block(),
            rng.randbytes(rng.choice((1, 20, 500))),
            b"\x3f" + b"\xff" * 9,
        )
    )


def mutated(rng: random.Random) -> bytes:
    stream = rng.choice((0, 1, 1, 3, 3, 5, 7, 8, 9, 11))
    frame = rng.choice(
        [
            headers(stream, block(), rng.choice((0, 1, 4, 4, 5, 5, 0x2C, 0xFF))),
            headers(stream, fields_of(rng), rng.choice((0, 4, 4, 5))),
            data(stream, rng.randbytes(rng.choice((0, 1, 300))), end=rng.random() < 0.3),
            frames.window_update(stream, rng.choice((0, 1, 70_000, frames.MOST_WINDOW))),
            frames.rst_stream(stream, rng.randrange(20)),
            frames.ping(b"12345678", ack=rng.random() < 0.5),
            frames.settings({frames.Setting(rng.randint(1, 6)): rng.choice((0, 1, 20_000, 1 << 24, 1 << 31))}),
            frames.goaway(stream, 0),
            frames.head(frames.CONTINUATION, rng.choice((0, 4)), stream, 3) + b"abc",
            frames.head(rng.randrange(12, 256), rng.randrange(256), stream, 4) + b"abcd",
        ]
    )
    if rng.random() < 0.2:
        changed = bytearray(frame)
        changed[rng.randrange(len(changed))] = rng.randrange(256)
        frame = bytes(changed)
    return frame


def plausible(rng: random.Random, newest: int) -> tuple[bytes, int]:
    """Return a plausible frame of a client whose newest stream is ``newest``, and its newest stream after it."""
    stream = max(1, newest - 2 * rng.randrange(4))
    match rng.randrange(6):
        case 0:
            return headers(newest + 2, block()), newest + 2
        case 1:
            return frames.window_update(rng.choice((0, stream)), rng.randrange(1, 70_000)), newest
        case 2 if rng.random() < 0.2:
            return frames.rst_stream(stream, 8), newest
        case 3 if rng.random() < 0.2:
            return frames.ping(b"12345678", ack=False), newest
        case _:
            message = grpc.prefix(size := rng.choice((0, 5, 3000))) + b"x" * size
            return data(stream, message[: rng.randrange(len(message) + 1) or None], end=rng.random() < 0.1), newest


_STREAMS, _MESSAGE_BYTES = 8, 100_000
_ANSWERS = (b"", bytes(5), bytes(70_000))


def attack(seed: int, count: int) -> int:
    """Feed a connection up to `count` frames, in any order and partly mutated, while its streams are answered, read and
    ended; return how many it took. It raises nothing, keeps its bounds, and is either open or has ended with a
    reason."""
    rng = random.Random(seed)
    connection = ours(Limits(streams=_STREAMS))
    connection.receive(HELLO)
    readers: dict[int, MessageReader] = {}
    newest, wrong = -1, rng.choice((0.01, 0.1, 1.0))
    for done in range(count):
        if rng.random() < wrong:
            frame = mutated(rng)
        else:
            frame, newest = plausible(rng, newest)
        for event in connection.receive(frame):
            if isinstance(event, Requested):
                readers[event.stream] = MessageReader(_MESSAGE_BYTES)
            elif isinstance(event, Ended):
                readers.pop(event.stream, None)
            elif isinstance(event, Came):
                try:
                    messages = readers[event.stream].feed(event.data)
                    assert all(len(message) <= _MESSAGE_BYTES for message in messages if message is not None)
                    over = None in messages
                except CallError:
                    over = True
                if over:
                    connection.end(event.stream, grpc.WELL)
        for stream in range(max(1, newest - 10), max(12, newest + 1), 2):
            roll = rng.random()  # of each stream, one: chance is most of what an attack costs
            if roll < 0.2:
                connection.send(stream, grpc.BEGINNING, rng.choice(_ANSWERS))
            if 0.18 < roll < 0.28:
                connection.end(stream, grpc.WELL)
            connection.read(stream, int(roll * 100))
        connection.take()
        if connection.finished:
            assert connection.fault is not None
            assert len(connection) == 0
            return done + 1
        assert len(connection) <= _STREAMS
    return count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=1_000_000, help="frames (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    begin, done, connections, told = time.monotonic(), 0, 0, 0.0
    while done < options.count:
        try:
            done += attack(options.seed + connections, 300)
        except Exception:
            sys.stdout.write(f"\nattack({options.seed + connections}, 300) fails:\n")
            raise
        connections += 1
        if (now := time.monotonic()) > told + 1 or done >= options.count:
            told = now
            sys.stdout.write(
                f"\r{done:,} of {options.count:,} frames, {connections:,} connections, {now - begin:.0f} s"
            )
            sys.stdout.flush()
    sys.stdout.write("\nevery connection is there, or ended with a reason\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
