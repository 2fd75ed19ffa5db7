"""Our end of HTTP/2 against the h2 library as a client, in pieces cut anywhere, and against peers that break rules."""

from __future__ import annotations

import random
from collections import OrderedDict
from itertools import pairwise

import h2.config
import h2.connection
import h2.events
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.http2_frames import HELLO, REQUEST, SETTINGS, attack, block, data, headers, ours
from treeline_epp.http2 import frames, grpc
from treeline_epp.http2.connection import Connection
from treeline_epp.http2.events import Came, Ended, Event, Limits, Requested, Roomy
from treeline_epp.http2.fields import Fields
from treeline_epp.http2.frames import Code
from treeline_epp.http2.sending import Answer, Sending


def sent(connection: Connection) -> bytes:
    return b"".join(connection.take())


def client(table: int = 4096) -> h2.connection.H2Connection:
    made = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
    made.initiate_connection()
    return made


class Echo:
    """A server on `Connection` that sends back the data of each stream, then trailers."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.requests: dict[int, Fields] = {}
        self.bodies: dict[int, bytes] = {}
        self.ended: set[int] = set()

    def receive(self, given: bytes) -> None:
        for event in self.connection.receive(given):
            self.on(event)

    def on(self, event: Event) -> None:
        match event:
            case Requested():
                self.requests[event.stream], self.bodies[event.stream] = event.fields, b""
                self.finish(event.stream, ended=event.ended)
            case Came():
                self.bodies[event.stream] += event.data
                self.connection.read(event.stream, len(event.data))
                if event.data:
                    self.connection.send(event.stream, grpc.BEGINNING, event.data)
                self.finish(event.stream, ended=event.ended)
            case Ended():
                self.ended.add(event.stream)
            case Roomy():
                pass

    def finish(self, stream: int, *, ended: bool) -> None:
        if ended:
            self.connection.end(stream, grpc.WELL if self.connection.begun(stream) else grpc.only(grpc.Status.OK, ""))


def cut(given: bytes, rng: random.Random) -> list[bytes]:
    places = sorted({0, len(given), *(rng.randrange(len(given) + 1) for _ in range(rng.choice((0, 1, 5, 40))))})
    return [given[start:end] for start, end in pairwise(places)]


def test_data_released_by_a_larger_window_follows_the_settings_ack() -> None:
    connection = ours()
    connection.receive(HELLO + frames.SETTINGS_ACK + headers(1, block()))
    connection.send(1, b"", b"x" * 70_000)
    connection.receive(frames.window_update(0, 1 << 20))
    sent(connection)
    connection.receive(frames.settings({frames.Setting.INITIAL_WINDOW_SIZE: 1 << 20}))
    assert sent(connection) == frames.SETTINGS_ACK + data(1, b"x" * (70_000 - frames.FIRST_WINDOW))


@settings(max_examples=60, deadline=None)
@given(
    bodies=st.lists(st.integers(0, 200_000), min_size=1, max_size=6),
    window=st.sampled_from([1, 100, 65_535, 1 << 20]),
    seed=st.integers(0, 1 << 32),
)
def test_a_client_of_another_library_gets_its_data_back_with_any_windows_and_cuts(
    bodies: list[int], window: int, seed: int
) -> None:
    if window < 100:
        bodies = [size % 40 for size in bodies]
    rng = random.Random(seed)
    peer, echo = client(), Echo(ours())
    peer.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window})
    to_send = {}
    for size in bodies:
        stream = peer.get_next_available_stream_id()
        peer.send_headers(stream, REQUEST)
        to_send[stream] = rng.randbytes(size)
    wanted, back, trailers = dict(to_send), dict.fromkeys(to_send, b""), set[int]()
    for _ in range(200_000):
        for piece in cut(peer.data_to_send(), rng):
            echo.receive(piece)
        for piece in cut(sent(echo.connection), rng):
            for event in peer.receive_data(piece):
                if isinstance(event, h2.events.DataReceived):
                    back[event.stream_id] += event.data
                    peer.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                if isinstance(event, h2.events.TrailersReceived):
                    trailers.add(event.stream_id)
                    assert (b"grpc-status", b"0") in event.headers or ("grpc-status", "0") in event.headers
                if isinstance(event, h2.events.ResponseReceived) and event.stream_ended:
                    trailers.add(event.stream_id)
        for stream in rng.sample(sorted(to_send), len(to_send)):
            room = min(peer.local_flow_control_window(stream), peer.max_outbound_frame_size, len(to_send[stream]))
            if room or not to_send[stream]:
                peer.send_data(stream, to_send[stream][:room], end_stream=room == len(to_send[stream]))
                to_send[stream] = to_send[stream][room:]
                if not to_send[stream]:
                    del to_send[stream]
        if len(trailers) == len(wanted):
            break
    assert back == wanted
    assert len(echo.connection) == 0
    assert echo.connection.fault is None


def test_data_without_room_waits_and_other_streams_pass() -> None:
    connection = ours()
    connection.receive(HELLO + headers(1, block()) + headers(3, block()))
    connection.take()
    connection.send(1, grpc.BEGINNING, b"x" * 100_000)
    assert connection.waiting(1) == 100_000 - frames.FIRST_WINDOW
    connection.end(1, grpc.WELL)
    connection.send(3, grpc.BEGINNING, b"y")
    assert connection.waiting(3) == 1, "the connection has no room"
    connection.take()
    assert connection.receive(frames.window_update(0, 1)) == [Roomy(3)], "the first one has no room of its own"
    assert sent(connection).endswith(b"y")
    connection.receive(frames.window_update(1, 100_000) + frames.window_update(0, 200_000))
    assert connection.waiting(1) == 0
    assert sent(connection).endswith(grpc.WELL + frames.rst_stream(1, Code.NO_ERROR))


def test_an_empty_piece_is_sent_despite_a_negative_window() -> None:
    connection = ours()
    connection.receive(HELLO + headers(1, block()))
    connection.send(1, grpc.BEGINNING, b"x" * frames.FIRST_WINDOW)
    connection.receive(frames.settings({frames.Setting.INITIAL_WINDOW_SIZE: 1000}))
    connection.take()
    connection.send(1, grpc.BEGINNING, b"")
    assert sent(connection) == frames.head(frames.DATA, 0, 1, 0)
    connection.end(1, grpc.WELL)
    assert connection.fault is None


def test_the_cost_of_a_window_update_does_not_grow_with_waiting_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    connection = ours()
    connection.receive(HELLO + frames.settings({frames.Setting.INITIAL_WINDOW_SIZE: 0}))
    for stream in range(1, 1001, 2):
        connection.receive(headers(stream, block()))
        connection.send(stream, grpc.BEGINNING, b"four")
        connection.end(stream, grpc.WELL)
    looked, drain = [], Sending.drain

    def looking(sending: Sending, stream: int, answer: Answer) -> bool:
        looked.append(stream)
        return drain(sending, stream, answer)

    monkeypatch.setattr(Sending, "drain", looking)
    connection.receive(frames.window_update(7, 1) + frames.window_update(0, 1))
    assert looked == [7]
    said = b"".join((4).to_bytes(2, "big") + size.to_bytes(4, "big") for size in (1, 0) * 1000 + (2,))
    connection.receive(frames.head(frames.SETTINGS, 0, 0, len(said)) + said)
    assert len(looked) == 1 + 500, "of all the windows in a frame the last one counts"
    connection.take()
    connection.receive(frames.window_update(0, 9) + frames.settings({frames.Setting.INITIAL_WINDOW_SIZE: 4}))
    assert len(connection) == 0, "all have been sent"


def test_window_updates_of_many_streams_count_as_more_work() -> None:
    connection = ours(Limits(idle_frames=100))
    connection.receive(HELLO)
    for stream in range(1, 2001, 2):
        connection.receive(headers(stream, block()))
    for size in range(20):
        connection.receive(frames.settings({frames.Setting.INITIAL_WINDOW_SIZE: size}))
    assert connection.fault is not None
    assert connection.fault.code is Code.ENHANCE_YOUR_CALM


def test_an_unread_stream_gets_no_window_but_its_connection_does() -> None:
    limits = Limits(stream_window=40_000, connection_window=100_000)
    connection = ours(limits)
    connection.receive(HELLO + headers(1, block()) + headers(3, block()))
    connection.take()
    for _ in range(4):
        assert len(connection.receive(data(1, b"x" * 10_000))) == 1
    assert connection.receive(data(1, b"x")) == [Ended(1)], "more than its window"
    assert frames.rst_stream(1, Code.FLOW_CONTROL_ERROR) in sent(connection)
    for _ in range(40):
        connection.receive(data(3, b"x" * 10_000))
        connection.read(3, 10_000)
    assert connection.fault is None
    assert len(connection) == 1


def test_a_repeated_block_of_a_peer_without_a_table_is_decoded_once() -> None:
    known: OrderedDict[bytes, Fields] = OrderedDict()
    shrunk = b"\x20" + block()
    connection = ours(known=known)
    (first,) = connection.receive(HELLO + frames.SETTINGS_ACK + headers(1, shrunk))
    (second,) = connection.receive(headers(3, block()))
    (third,) = connection.receive(headers(5, block()))
    assert isinstance(first, Requested)
    assert isinstance(second, Requested)
    assert isinstance(third, Requested)
    assert first.fields == second.fields
    assert second.fields is third.fields
    other = ours(known=known)
    (again,) = other.receive(HELLO + headers(1, block()))
    assert isinstance(again, Requested)
    assert again.fields is not second.fields, "this peer may still keep one"


ENTRY = b"\x40\x01x" + b"\x7f\xa1\x1e" + b"v" * 4000
"""A field of four kilobytes, which the table keeps."""
BROKEN: dict[str, tuple[bytes, Code]] = {
    "no preface": (b"GET / HTTP/1.1\r\n\r\n", Code.PROTOCOL_ERROR),
    "no settings": (frames.PREFACE + frames.ping(b"12345678", ack=False), Code.PROTOCOL_ERROR),
    "an even stream": (HELLO + headers(2, block()), Code.PROTOCOL_ERROR),
    "an older stream": (HELLO + headers(5, block()) + headers(3, block()), Code.PROTOCOL_ERROR),
    "a large frame": (HELLO + frames.head(frames.DATA, 0, 1, 16_385), Code.FRAME_SIZE_ERROR),
    "a block within a block": (HELLO + headers(1, block(), 0) + SETTINGS, Code.PROTOCOL_ERROR),
    "nothing to continue": (HELLO + frames.head(frames.CONTINUATION, 4, 1, 0), Code.PROTOCOL_ERROR),
    "a push": (HELLO + frames.head(frames.PUSH_PROMISE, 4, 1, 4) + b"0000", Code.PROTOCOL_ERROR),
    "a table that is lost": (HELLO + headers(1, b"\xff\xff\xff"), Code.COMPRESSION_ERROR),
    "fields without end": (
        HELLO + headers(1, b"x" * 9000, 0) + (frames.head(frames.CONTINUATION, 0, 1, 9000) + b"x" * 9000) * 30,
        Code.ENHANCE_YOUR_CALM,
    ),
    "a window of nothing": (HELLO + frames.window_update(0, 0), Code.PROTOCOL_ERROR),
    "a window beyond numbers": (HELLO + frames.window_update(0, frames.MOST_WINDOW), Code.FLOW_CONTROL_ERROR),
    "data of nobody": (HELLO + data(1, b"x"), Code.PROTOCOL_ERROR),
    "a reset of nobody": (HELLO + frames.rst_stream(1, 8), Code.PROTOCOL_ERROR),
    "fields of an ended stream": (HELLO + headers(1, block(), 5) + headers(1, block(), 5), Code.STREAM_CLOSED),
    "fields behind a reset": (
        HELLO + headers(1, block()) + frames.rst_stream(1, 8) + headers(1, block(), 5),
        Code.STREAM_CLOSED,
    ),
    "a flood of pings": (HELLO + frames.ping(b"12345678", ack=False) * 11_000, Code.ENHANCE_YOUR_CALM),
    "a flood of settings": (HELLO + SETTINGS * 11_000, Code.ENHANCE_YOUR_CALM),
    "a flood of nothing": (HELLO + headers(1, block()) + data(1, b"") * 11_000, Code.ENHANCE_YOUR_CALM),
    "a flood of resets of what is not open": (
        HELLO + headers(1, block()) + frames.rst_stream(1, 8) * 11_000,
        Code.ENHANCE_YOUR_CALM,
    ),
    "a flood of data behind an end": (
        HELLO + headers(1, block(), 5) + headers(3, block()) + frames.rst_stream(3, 8) + data(3, b"x") * 11_000,
        Code.ENHANCE_YOUR_CALM,
    ),
    "fields that are too long, with a table": (HELLO + headers(1, ENTRY + b"\xbe" * 5), Code.COMPRESSION_ERROR),
    "a table that is changed three times": (
        HELLO + headers(1, b"\x20\x3f\xe1\x1f\x20" + block()),
        Code.COMPRESSION_ERROR,
    ),
    "a table of a number without end": (HELLO + headers(1, b"\x3f" + b"\xff" * 9000), Code.COMPRESSION_ERROR),
}

SMALL = HELLO + frames.SETTINGS_ACK + headers(1, b"\x20" + block())
"""A peer that keeps no table."""
CAUSED_BY_A_CLIENT = {
    "streams that are reset at once": lambda i: headers(i, block()) + frames.rst_stream(i, 8),
    "streams that are reset, and what a proxy measures by each": lambda i: (
        headers(i, block()) + frames.ping(b"12345678", ack=False) + frames.rst_stream(i, 8)
    ),
    "streams that are refused": lambda i: headers(i, block()),
    "fields that are too long": lambda i: headers(i, block(("tracestate", "x" * 16_000))),
    "many fields by reference": lambda i: headers(i, b"\x84" * 700),
}


@pytest.mark.parametrize("name", CAUSED_BY_A_CLIENT)
def test_errors_of_one_client_do_not_end_the_shared_connection(name: str) -> None:
    connection = ours(Limits(idle_frames=100, streams=2))
    connection.receive(SMALL)
    for stream in range(3, 1003, 2):
        connection.receive(CAUSED_BY_A_CLIENT[name](stream))
        connection.take()
    assert connection.fault is None
    connection.receive(frames.rst_stream(1, 8) + frames.rst_stream(3, 8))
    (event,) = connection.receive(headers(1003, block()))
    assert isinstance(event, Requested)


def test_data_in_flight_for_an_ended_stream_does_not_end_the_connection() -> None:
    connection = ours(Limits(idle_frames=100))
    connection.receive(HELLO + headers(1, block()))
    connection.end(1, grpc.WELL)
    for _ in range(500):
        connection.receive(data(1, b"x" * 1000))
    assert connection.fault is None


def test_too_long_fields_are_skipped_in_any_pieces_and_end_only_their_stream() -> None:
    connection = ours()
    connection.receive(SMALL)
    sent(connection)
    more = (frames.head(frames.CONTINUATION, 0, 3, 9000) + b"\xff" * 9000) * 8
    assert connection.receive(headers(3, block(), 0) + more + frames.head(frames.CONTINUATION, 4, 3, 0)) == []
    assert sent(connection) == frames.rst_stream(3, Code.ENHANCE_YOUR_CALM)
    (event,) = connection.receive(headers(5, block()))
    assert isinstance(event, Requested)


def test_frames_are_processed_in_slices_and_header_blocks_count_more() -> None:
    connection = ours()
    connection.receive(SMALL + headers(3, block()))
    known = b"".join(headers(i, block()) for i in range(5, 23, 2))
    sent = known + b"".join(headers(i, block(("x", str(i)))) for i in range(23, 29, 2)) + data(1, b"x")
    came = [connection.receive(sent[:-1], 4)]
    while connection.more:
        came.append(connection.receive(b"", 4))
    slices = [[event.stream for event in events] for events in came]
    assert slices == [[5, 7, 9, 11], [13, 15, 17, 19], [21, 23], [25], [27], []]
    assert connection.receive(sent[-1:], 4) == [Came(1, b"x", ended=False)]


@pytest.mark.parametrize("name", BROKEN)
def test_a_peer_that_breaks_the_connections_rules_gets_a_reason_and_is_disconnected(name: str) -> None:
    given_bytes, code = BROKEN[name]
    connection = ours()
    connection.receive(given_bytes)
    assert connection.fault is not None
    assert connection.fault.code is code
    assert connection.finished
    out = sent(connection)
    at = out.rindex(frames.head(frames.GOAWAY, 0, 0, 8 + len(str(connection.fault).encode()[:200])))
    assert out[at + 13 : at + 17] == code.to_bytes(4, "big")
    assert connection.receive(headers(101, block())) == []


MALFORMED = {
    "no path": block(without=":path"),
    "upper case": block(("X-Y", "z")),
    "of HTTP/1": block(("connection", "close")),
    "te": block(("te", "gzip"), without="te"),
    "unknown pseudo": frames.header_block([(b":x", b"y")]) + block(),
    "pseudo behind": block((":path", "/")),
    "a wrong length": block(("content-length", "minus one")),
    "a length without end": block(("content-length", "1" * 5000)),
    "a line break": block(("x", "a\nb")),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_request_ends_its_stream_alone(name: str) -> None:
    connection = ours()
    assert connection.receive(HELLO + headers(1, MALFORMED[name])) == []
    assert frames.rst_stream(1, Code.PROTOCOL_ERROR) in sent(connection)
    (event,) = connection.receive(headers(3, block()))
    assert isinstance(event, Requested)
    assert connection.receive(data(1, b"late")) == []
    assert connection.fault is None


def test_data_after_a_peers_own_reset_is_an_error() -> None:
    connection = ours()
    connection.receive(HELLO + headers(1, block()) + headers(3, block()))
    connection.end(1, grpc.WELL)
    connection.end(3, grpc.WELL)
    connection.take()
    connection.receive(data(1, b"late") + headers(1, block(), 5))
    assert sent(connection) == b"", "the peer did not know yet that we ended it"
    connection.receive(frames.rst_stream(1, 8) + data(1, b"late"))
    assert sent(connection) == frames.rst_stream(1, Code.STREAM_CLOSED)
    connection.receive(frames.rst_stream(3, 8) + headers(3, block(), 5))
    assert connection.fault is not None
    assert connection.fault.code is Code.STREAM_CLOSED


def test_excess_streams_are_refused_and_may_be_retried() -> None:
    connection = ours(Limits(streams=2))
    events = connection.receive(HELLO + b"".join(headers(i, block()) for i in (1, 3, 5)))
    assert [type(event) for event in events] == [Requested, Requested]
    assert frames.rst_stream(5, Code.REFUSED_STREAM) in sent(connection)
    connection.end(1, grpc.WELL)
    (event,) = connection.receive(headers(7, block()))
    assert isinstance(event, Requested)


def test_a_closing_connection_finishes_open_streams_and_takes_no_new_ones() -> None:
    connection = ours()
    connection.receive(HELLO + headers(1, block()))
    connection.take()
    connection.leave()
    connection.leave()
    said = sent(connection)
    assert said == frames.goaway(frames.MOST_STREAM, Code.NO_ERROR) + frames.ping(said[-8:], ack=False), "once"
    (event,) = connection.receive(headers(3, block()))
    assert isinstance(event, Requested), "it was on its way, and is not lost"
    assert not connection.left
    connection.receive(frames.ping(b"treeline", ack=True))
    assert not connection.left, "that is the answer to something else"
    connection.receive(frames.ping(said[-8:], ack=True) * 2)
    assert connection.left
    assert sent(connection) == frames.goaway(3, Code.NO_ERROR)
    assert connection.receive(headers(5, block()) + data(5, b"x") + frames.rst_stream(5, 8)) == []
    assert connection.receive(data(1, b"x", end=True)) == [Came(1, b"x", ended=True)]
    connection.end(1, grpc.WELL)
    connection.end(3, grpc.WELL)
    assert len(connection) == 0
    assert connection.fault is None


def test_a_peer_that_sent_goaway_still_gets_answers() -> None:
    """The GOAWAY is about streams that a server would open."""
    connection = ours()
    connection.receive(HELLO + headers(1, block()) + frames.goaway(0, Code.NO_ERROR))
    (event,) = connection.receive(headers(3, block()))
    assert isinstance(event, Requested)
    assert not connection.left
    connection.receive(frames.goaway(0, Code.NO_ERROR) * 100_000)
    assert connection.fault is not None, "a flood of them is one"


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 32))
def test_any_bytes_are_answered_or_end_the_connection(seed: int) -> None:
    assert attack(seed, 60) > 0
