"""Messages as frames: ours, the peers' of every generation, and invalid ones."""

import pytest
from treeline_wire import frames
from treeline_wire.events import AllBlocksCleared, BlockStored, encode_batch
from treeline_wire.frames import (
    FrameError,
    Hello,
    HelloRequest,
    ReplayEnd,
    ReplayItem,
    ReplayRequest,
    SnapshotChunk,
    SnapshotEnd,
    SnapshotHeader,
    SnapshotRequest,
)

END = b"\xff" * 8
SEQ = (5).to_bytes(8, "big")
STORED = BlockStored([1 << 63], 2, [3], 1, None, "GPU", cache_salt="ns")


def test_live_messages() -> None:
    assert frames.live(b"t", 0, b"p") == [b"t", bytes(8), b"p"]
    assert frames.parse_live([b"t", SEQ, b"p"]) == (b"t", 5, b"p")
    for bad in ([], [b"t", SEQ], [b"t", b"5", b"p"], [b"", b"t", SEQ, b"p"]):
        with pytest.raises(FrameError):
            frames.parse_live(bad)


def test_requests_have_their_wire_format() -> None:
    assert frames.replay_request(5) == [b"", SEQ]
    assert frames.hello_request() == [b"", b"treeline", b"hello", b"1"]
    assert frames.snapshot_request() == [b"", b"treeline", b"snapshot", b"1"]


def test_requests_are_parsed() -> None:
    assert frames.parse_request(frames.replay_request(5)) == ReplayRequest(5)
    assert frames.parse_request(frames.hello_request()) == HelloRequest(1)
    assert frames.parse_request(frames.snapshot_request()) == SnapshotRequest(1)
    assert frames.parse_request([b"", b"treeline", b"hello", b"12"]) == HelloRequest(12)


@pytest.mark.parametrize(
    "message",
    [
        [],
        [b""],
        [b"", b"x"],
        [b"x", SEQ],
        [b"", SEQ, b""],
        [b"", b"treeline", b"goodbye", b"1"],
        [b"", b"treeline", b"hello", b"one"],
        [b"", b"treeline", b"hello", b""],
        [b"", b"treeline", b"hello", b"99999"],
        [b"", b"treeline", b"hello"],
        [b"", b"Treeline", b"hello", b"1"],
    ],
)
def test_servers_drop_other_requests(message: list[bytes]) -> None:
    assert frames.parse_request(message) is None


@pytest.mark.parametrize(
    ("message", "reply"),
    [
        ([b"", b"topic", SEQ, b"p"], ReplayItem(b"topic", 5, b"p")),
        ([b"", b"", SEQ, b""], ReplayItem(b"", 5, b"")),
        ([b"", SEQ, b"p"], ReplayItem(b"", 5, b"p")),
        ([b"", b"", END, b""], ReplayEnd()),
        ([b"", END, b""], ReplayEnd()),
    ],
)
def test_replay_replies_of_both_generations(message: list[bytes], reply: frames.Reply) -> None:
    assert frames.parse_reply(message) == reply


def test_we_write_the_newer_generation() -> None:
    assert frames.encode_reply(ReplayItem(b"t", 5, b"p")) == [b"", b"t", SEQ, b"p"]
    assert frames.encode_reply(ReplayEnd()) == [b"", b"", END, b""]


@pytest.mark.parametrize(
    "reply",
    [
        ReplayItem(b"t", 5, b"p"),
        ReplayEnd(),
        Hello(epoch=1 << 63, oldest=0, newest=9),
        Hello(epoch=1),
        SnapshotHeader(epoch=3, seq=-1, blocks=0),
        SnapshotChunk([STORED, STORED]),
        SnapshotEnd(),
    ],
)
def test_replies_survive_the_wire(reply: frames.Reply) -> None:
    assert frames.parse_reply(frames.encode_reply(reply)) == reply


def test_additions_to_a_reply_are_ignored_by_older_readers() -> None:
    message = frames.encode_reply(Hello(1, 2, 3))
    message[4] = b"\x84" + message[4][1:] + b"\xa3new\x01"
    message[3] = b"2"
    assert frames.parse_reply(message) == Hello(1, 2, 3)


def test_a_chunk_counts_what_it_leaves_out() -> None:
    message = frames.encode_reply(SnapshotChunk([STORED]))
    message[4] = encode_batch(0.0, [STORED, AllBlocksCleared()])
    assert frames.parse_reply(message) == SnapshotChunk([STORED], rejected=1)


@pytest.mark.parametrize(
    "message",
    [
        [],
        [b"x"],
        [b"", SEQ],
        [b"x", b"", SEQ, b"p"],
        [b"", b"", b"short", b"p"],
        [b"", b"treeline", b"hello", b"1", b""],
        [b"", b"treeline", b"hello", b"1", b"\x80"],
        [b"", b"treeline", b"hello", b"1", b"\x81\xa5epoch\xa1x"],
        [b"", b"treeline", b"hello", b"x", b"\x81\xa5epoch\x01"],
        [b"", b"treeline", b"snapshot", b"1", b"\x80"],
        [b"", b"treeline", b"chunk", b"1", b"\xc1"],
        [b"", b"treeline", b"verb", b"1", b"\x80"],
        [b"", b"treeline", b"end", b"1", b"", b""],
        [b"", b"other", b"end", b"1", b""],
    ],
)
def test_other_replies_are_one_typed_error(message: list[bytes]) -> None:
    with pytest.raises(FrameError):
        frames.parse_reply(message)


@pytest.mark.parametrize("seq", [-1, (1 << 64) - 1])
def test_a_seq_is_never_the_end_mark(seq: int) -> None:
    with pytest.raises(ValueError, match="out of range"):
        frames.live(b"", seq, b"")
