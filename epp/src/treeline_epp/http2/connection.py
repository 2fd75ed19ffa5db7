"""One connection of a client, by RFC 9113: bytes in, events out; `take` gives the bytes to send.

Theory of operation. `receive` reads whole frames and keeps the rest. A stream is open from its HEADERS until both sides
have ended it; closed ones are remembered for a while (`_closed`), since frames that were in flight are no fault.

Flow control. Bytes of a stream are credited to the peer when the caller has read them (`read`), so a stream whose
messages wait does not fill our memory; the connection's own window is credited at once, so no stream waits for others.
Our own data wait in their stream until the peer's windows have room (`sending.py`); `waiting` counts them.

A fault of a stream ends the stream, a fault of the connection sends GOAWAY and makes `finished` true.

Clients of a proxy share its connection: faults that one of them can cause (streams that are reset at once, fields that
are too long, data that come too late) do not count against it. They are work, done in slices (`most_frames`).
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable

from treeline_epp.http2 import frames
from treeline_epp.http2.events import Came, ConnectionFault, Ended, Event, Limits, Requested, Roomy, unpadded
from treeline_epp.http2.fields import BadBlock, FieldReader, Fields, Malformed, TooLong, length_of
from treeline_epp.http2.frames import FIRST_WINDOW, HEAD_BYTES, MOST_WINDOW, NUMBER, PREFACE, Code, Setting
from treeline_epp.http2.sending import Sending, Stream, WindowTooLarge

_REMEMBERED = 256
"""Closed streams that are remembered."""
_STREAMS_A_FRAME = 64
"""Streams whose window changes cost as much as one frame."""
_FRAMES_A_BLOCK = 31
"""Frames that cost as much as decoding one block of fields."""
_BLOCK_PARTS = 16
"""Largest block, in multiples of the allowed bytes of fields: a longer one than allowed is skipped, up to this."""
_HEARD = b"goodbye!"  # a ping: its answer shows that the peer has read all before it


class Connection:
    """The server's end of a connection."""

    def __init__(self, limits: Limits, known: OrderedDict[bytes, Fields]) -> None:
        """Begin a connection; `known` are blocks of header fields, shared by all connections."""
        self.limits = limits
        self.finished = False
        """Whether nothing more is read or sent: close it when the remaining bytes are written."""
        self.fault: ConnectionFault | None = None
        self.more = False
        """Whether there may be unread frames: call `receive` again, even without new bytes."""
        self.room = limits.all_streams
        """Most streams that may be open here, by the room that other connections leave."""
        self.settled = False
        """Whether the peer has acknowledged our settings."""
        self._streams: dict[int, Stream] = {}
        self._closed: OrderedDict[int, bool] = OrderedDict()
        """The last closed streams, and whether we broke them off."""
        self._last = 0
        self._parting = self.left = False
        """`left`: the peer has read our GOAWAY, so no more streams come."""
        self._fields = FieldReader(limits.header_bytes, known)
        self._rest = b""
        self._greeted = False
        self._first_frame = True
        self._block: tuple[int, int, bytearray] | None = None
        """Stream, flags and beginning of a block that continues in the next frame."""
        self._sending = Sending()
        self._window = limits.connection_window
        self._credit = self._idle = self._spent_bytes = 0
        self._handlers: list[Callable[[int, int, memoryview, list[Event]], None]] = [
            self._on_data, self._on_headers, self._on_priority, self._on_rst_stream, self._on_settings,
            self._on_push_promise, self._on_ping, self._on_goaway, self._on_window_update, self._on_continuation,
        ]  # fmt: skip
        ours = {
            Setting.HEADER_TABLE_SIZE: 0,
            Setting.MAX_CONCURRENT_STREAMS: limits.streams,
            Setting.INITIAL_WINDOW_SIZE: limits.stream_window,
            Setting.MAX_FRAME_SIZE: limits.frame_bytes,
            Setting.MAX_HEADER_LIST_SIZE: limits.header_bytes,
        }
        self._sending.control(frames.settings(ours))
        self._sending.control(frames.window_update(0, limits.connection_window - FIRST_WINDOW))

    def __len__(self) -> int:
        """Return the number of open streams."""
        return len(self._streams)

    # ---- input --------------------------------------------------------------------------------------------------

    def receive(self, data: bytes, most_frames: int = sys.maxsize) -> list[Event]:
        """Parse bytes and return their events, up to `most_frames` frames; see `more`. Raises nothing: a fault is in
        `fault`, and the open streams get `Ended`.
        """
        events: list[Event] = []
        self.more = False
        if self.finished:
            return events
        try:
            self._receive(data, most_frames, events)
        except ConnectionFault as fault:
            self._fail(fault, events)
        except WindowTooLarge:
            self._fail(ConnectionFault(Code.FLOW_CONTROL_ERROR, "a window beyond all numbers"), events)
        return events

    def _receive(self, data: bytes, most_frames: int, events: list[Event]) -> None:
        if self._rest:
            data = self._rest + data
            self._rest = b""
        at = 0
        if not self._greeted:
            if not data.startswith(PREFACE):
                if PREFACE.startswith(data):
                    self._rest = data
                    return
                raise ConnectionFault(Code.PROTOCOL_ERROR, "this is not HTTP/2")
            self._greeted, at = True, len(PREFACE)
        view, size = memoryview(data), len(data)
        while size - at >= HEAD_BYTES and most_frames > 0:
            decoded = self._fields.decoded
            length = data[at] << 16 | data[at + 1] << 8 | data[at + 2]
            if length > self.limits.frame_bytes:
                raise ConnectionFault(Code.FRAME_SIZE_ERROR, f"a frame of {length} bytes")
            end = at + HEAD_BYTES + length
            if end > size:
                break
            kind, flags = data[at + 3], data[at + 4]
            stream = NUMBER.unpack_from(data, at + 5)[0] & MOST_WINDOW
            if self._first_frame:
                if kind != frames.SETTINGS or flags & frames.ACK:
                    raise ConnectionFault(Code.PROTOCOL_ERROR, "settings come first")
                self._first_frame = False
            if self._block is not None and (kind != frames.CONTINUATION or stream != self._block[0]):
                raise ConnectionFault(Code.PROTOCOL_ERROR, "a block of fields is interrupted")
            if kind < len(self._handlers):
                self._handlers[kind](flags, stream, view[at + HEAD_BYTES : end], events)
            most_frames -= 1 + _FRAMES_A_BLOCK * (self._fields.decoded - decoded)
            at = end
        self._rest = data[at:]
        self.more = most_frames <= 0

    def _on_data(self, flags: int, stream: int, payload: memoryview, events: list[Event]) -> None:
        size = len(payload)
        if stream == 0:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "data of no stream")
        self._window -= size
        if self._window < 0:
            raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "more data than the connection has room for")
        self._credit_connection(size)
        if flags & frames.PADDED:
            payload = unpadded(payload)
        known = self._streams.get(stream)
        if known is None or known.peer_ended:
            self._late(stream, known, size)
            return
        known.window -= size
        if known.window < 0:
            self._break(stream, Code.FLOW_CONTROL_ERROR, events)
            return
        known.unread += size - len(payload)
        known.came += len(payload)
        ended = bool(flags & frames.END_STREAM)
        wrong = known.announced is not None and (
            known.came > known.announced or (ended and known.came != known.announced)
        )
        if wrong:
            self._break(stream, Code.PROTOCOL_ERROR, events)
            return
        if not payload and not ended:
            self._nothing()
        known.peer_ended = ended
        events.append(Came(stream, bytes(payload), ended))

    def _on_headers(self, flags: int, stream: int, payload: memoryview, events: list[Event]) -> None:
        if stream == 0:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "fields of no stream")
        if flags & frames.PADDED:
            payload = unpadded(payload)
        if flags & frames.PRIORITIZED:
            if len(payload) < 5:
                raise ConnectionFault(Code.FRAME_SIZE_ERROR, "a priority of less than five bytes")
            if NUMBER.unpack_from(payload)[0] & MOST_WINDOW == stream:
                raise ConnectionFault(Code.PROTOCOL_ERROR, "a stream that depends on itself")
            payload = payload[5:]
        if not flags & frames.END_HEADERS:
            self._block = stream, flags, bytearray(payload)
            return
        self._on_block(stream, flags, bytes(payload), events)

    def _on_continuation(self, flags: int, stream: int, payload: memoryview, events: list[Event]) -> None:
        if self._block is None:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "nothing to continue")
        _, first, block = self._block
        if not payload:
            self._nothing()
        block += payload
        if len(block) > _BLOCK_PARTS * self.limits.header_bytes:
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "more fields than this server takes")
        if flags & frames.END_HEADERS:
            self._block = None
            self._on_block(stream, first, bytes(block), events)

    def _on_block(self, stream: int, flags: int, block: bytes, events: list[Event]) -> None:
        known = self._streams.get(stream)
        ended = bool(flags & frames.END_STREAM)
        try:
            if known is not None:
                self._on_trailers(stream, known, block, events, ended=ended)
            elif stream in self._closed:
                self._fields.skip(block)
                if not self._closed[stream]:
                    raise ConnectionFault(Code.STREAM_CLOSED, "fields of a stream that has ended")
            else:
                self._on_request(stream, block, events, ended=ended)
        except BadBlock as error:
            raise ConnectionFault(Code.COMPRESSION_ERROR, str(error)) from None
        except (TooLong, Malformed) as error:
            code = Code.ENHANCE_YOUR_CALM if isinstance(error, TooLong) else Code.PROTOCOL_ERROR
            if known is not None:
                self._break(stream, code, events)
                return
            self._remember(stream, broken=True)
            self._sending.control(frames.rst_stream(stream, code))
            if isinstance(error, Malformed):
                self._nothing()

    def _on_request(self, stream: int, block: bytes, events: list[Event], *, ended: bool) -> None:
        if stream % 2 == 0 or stream <= self._last:
            raise ConnectionFault(Code.PROTOCOL_ERROR, f"stream {stream} cannot be opened")
        if not self.left:
            self._last = stream
        fields = self._fields.request(block)
        if self.left:
            return
        if len(self._streams) >= min(self.room, self.limits.streams):
            self._remember(stream, broken=True)
            self._sending.control(frames.rst_stream(stream, Code.REFUSED_STREAM))
            return
        announced = length_of(fields.get("content-length"))
        if ended and announced:
            raise Malformed("content-length")
        opened = self._streams[stream] = Stream(self._sending.stream_window, self.limits.stream_window, announced)
        opened.peer_ended = ended
        events.append(Requested(stream, fields, ended))

    def _on_trailers(self, stream: int, known: Stream, block: bytes, events: list[Event], *, ended: bool) -> None:
        if known.peer_ended:
            raise ConnectionFault(Code.STREAM_CLOSED, "fields of a stream that has ended")
        self._fields.trailers(block)
        if not ended or (known.announced is not None and known.came != known.announced):
            raise Malformed("trailers that end nothing")
        known.peer_ended = True
        events.append(Came(stream, b"", ended=True))

    def _on_priority(self, _flags: int, stream: int, payload: memoryview, _events: list[Event]) -> None:
        if stream == 0:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "a priority of no stream")
        if len(payload) != 5:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "a priority of other than five bytes")
        if NUMBER.unpack_from(payload)[0] & MOST_WINDOW == stream:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "a stream that depends on itself")
        self._nothing()

    def _on_rst_stream(self, _flags: int, stream: int, payload: memoryview, events: list[Event]) -> None:
        if len(payload) != 4:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "a reset of other than four bytes")
        if stream == 0 or (stream > self._last and not self.left):
            raise ConnectionFault(Code.PROTOCOL_ERROR, "a reset of a stream that was never opened")
        if self._forget(stream, broken=False):
            self.forgive(self.limits.paid_frames)
            events.append(Ended(stream))
        else:
            self._nothing()
            if stream in self._closed:  # closed by us before; after its own reset none of its frames can be in flight
                self._closed[stream] = False

    def _on_settings(self, flags: int, stream: int, payload: memoryview, events: list[Event]) -> None:
        if stream:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "settings of a stream")
        if flags & frames.ACK:
            if payload:
                raise ConnectionFault(Code.FRAME_SIZE_ERROR, "an acknowledgement with settings")
            if not self.settled:
                self.settled = True
                self._fields.settings_acknowledged()
            return
        if len(payload) % 6:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "settings of other than six bytes each")
        self._nothing()
        said = frames.settings_of(bytes(payload))
        for name, value in said:
            self._on_setting(name, value)
        window = dict(said).get(Setting.INITIAL_WINDOW_SIZE)  # the last of them counts
        if window is not None:
            self._on_stream_window(window)
        self._sending.control(frames.SETTINGS_ACK)
        if window is not None:  # after the acknowledgement: only then may we use the new window
            for open_stream, known in list(self._streams.items()):
                self._send_more(open_stream, known, events)

    def _on_setting(self, name: int, value: int) -> None:
        if name == Setting.ENABLE_PUSH and value > 1:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "pushes may be enabled or not")
        if name == Setting.MAX_FRAME_SIZE:
            if not frames.LEAST_FRAME_BYTES <= value <= frames.MOST_FRAME_BYTES:
                raise ConnectionFault(Code.PROTOCOL_ERROR, "no such size of frames")
            self._sending.frame_bytes = value
        if name == Setting.INITIAL_WINDOW_SIZE and value > MOST_WINDOW:
            raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "no such window")

    def _on_stream_window(self, window: int) -> None:
        """Apply the initial window of all streams. O(streams), so many streams count as more work."""
        self._nothing(len(self._streams) // _STREAMS_A_FRAME)
        more, self._sending.stream_window = window - self._sending.stream_window, window
        for known in self._streams.values():
            known.answer.grow(more)

    def _on_push_promise(self, *_: object) -> None:
        raise ConnectionFault(Code.PROTOCOL_ERROR, "clients push nothing")

    def _on_ping(self, flags: int, stream: int, payload: memoryview, _events: list[Event]) -> None:
        if stream:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "a ping of a stream")
        if len(payload) != 8:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "a ping of other than eight bytes")
        if flags & frames.ACK:  # otherwise any frame is answer enough
            if self._parting and payload == _HEARD and not self.left:
                self.left = True
                self._sending.control(frames.goaway(self._last, Code.NO_ERROR))
            return
        self._nothing()
        self._sending.control(frames.ping(bytes(payload), ack=True))

    def _on_goaway(self, _flags: int, stream: int, payload: memoryview, _events: list[Event]) -> None:
        if stream or len(payload) < 8:
            raise ConnectionFault(Code.PROTOCOL_ERROR if stream else Code.FRAME_SIZE_ERROR, "a wrong goodbye")
        self._nothing()  # it concerns streams that we would open; the peer's own go on, and more may come

    def _on_window_update(self, _flags: int, stream: int, payload: memoryview, events: list[Event]) -> None:
        if len(payload) != 4:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "a window of other than four bytes")
        more = NUMBER.unpack_from(payload)[0] & MOST_WINDOW
        if stream == 0:
            if more == 0:
                raise ConnectionFault(Code.PROTOCOL_ERROR, "a window that does not grow")
            self._nothing()
            self._sending.grow(more)
            for blocked in self._sending.resume():
                self._sent(blocked, self._streams[blocked], events)
            return
        known = self._streams.get(stream)
        if known is None:
            if stream > self._last and not self.left:
                raise ConnectionFault(Code.PROTOCOL_ERROR, "a window of a stream that was never opened")
            return
        self._nothing()
        try:
            known.answer.grow(more)
        except WindowTooLarge:
            self._break(stream, Code.FLOW_CONTROL_ERROR, events)
            return
        if more == 0:
            self._break(stream, Code.PROTOCOL_ERROR, events)
            return
        self._send_more(stream, known, events)

    def _late(self, stream: int, known: Stream | None, size: int) -> None:
        """Handle data for a stream that takes none; no fault if the peer did not know yet that we had ended it."""
        if known is None and stream not in self._closed and stream > self._last and not self.left:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "data of a stream that was never opened")
        if known is not None:
            raise ConnectionFault(Code.STREAM_CLOSED, "data of a stream that has ended")
        by_peer = not self._closed.get(stream, True)
        if by_peer or not size:
            self._nothing()
        if by_peer:
            self._sending.control(frames.rst_stream(stream, Code.STREAM_CLOSED))

    def _nothing(self, count: int = 1) -> None:
        """Count frames (or as much work) without content, except those that our own data caused."""
        if self._sending.sent_bytes > self._spent_bytes:
            self._spent_bytes += count * self.limits.bytes_a_frame
            return
        self._idle += count
        if self._idle > self.limits.idle_frames:
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "too many frames that bring nothing")

    def _credit_connection(self, size: int) -> None:
        self._credit += size
        if self._credit > self.limits.connection_window // 2:
            self._sending.control(frames.window_update(0, self._credit))
            self._window += self._credit
            self._credit = 0

    def _break(self, stream: int, code: Code, events: list[Event]) -> None:
        """End a stream for a fault of the peer."""
        self._nothing()
        self.reset(stream, code)
        events.append(Ended(stream))

    def _fail(self, fault: ConnectionFault, events: list[Event]) -> None:
        self.fault, self.finished = fault, True
        self._sending.control(frames.goaway(self._last, fault.code, str(fault).encode()[:200]))
        events += [Ended(stream) for stream in self._streams]
        for stream in list(self._streams):
            self._forget(stream, broken=True)

    # ---- output -------------------------------------------------------------------------------------------------

    def take(self) -> list[bytes | memoryview]:
        """Return the bytes to write now."""
        return self._sending.take()

    def read(self, stream: int, size: int) -> None:
        """Credit bytes of a stream that the caller has handled: as many more may come."""
        known = self._streams.get(stream)
        if known is None or known.peer_ended:
            return
        known.unread += size
        if known.unread > self.limits.stream_window // 2:
            self._sending.control(frames.window_update(stream, known.unread))
            known.window += known.unread
            known.unread = 0

    def waiting(self, stream: int) -> int:
        """Return the bytes that wait until the peer has room for them."""
        known = self._streams.get(stream)
        return 0 if known is None else sum(map(len, known.answer.queue))

    def begun(self, stream: int) -> bool:
        """Return whether the beginning of an answer is sent."""
        known = self._streams.get(stream)
        return known is not None and known.answer.begun

    def send(self, stream: int, fields: bytes, data: bytes) -> None:
        """Send bytes of an answer's body; its fields, an encoded block, go before the first ones."""
        known = self._streams.get(stream)
        if known is not None:
            self._sending.data(stream, known.answer, fields, data)

    def end(self, stream: int, trailers: bytes) -> None:
        """End an answer after its waiting bytes. `trailers`: an encoded block; all of the answer if none was sent."""
        known = self._streams.get(stream)
        if known is not None:
            known.answer.ending = trailers
            if not known.answer.queue:
                self._end(stream, known)

    def reset(self, stream: int, code: Code) -> None:
        """End a stream at once."""
        if self._forget(stream, broken=True):
            self._sending.control(frames.rst_stream(stream, code))

    def leave(self) -> None:
        """Announce the end: open streams and those in flight go on, and a second GOAWAY names the last one."""
        if not self._parting:
            self._parting = True
            self._sending.control(frames.goaway(frames.MOST_STREAM, Code.NO_ERROR) + frames.ping(_HEARD, ack=False))

    def forgive(self, count: int) -> None:
        """Let frames without content count no longer: time has passed, or a stream."""
        self._idle = max(0, self._idle - count)

    def ping(self, data: bytes) -> None:
        """Ask for a sign of life with eight bytes, which the peer returns."""
        self._sending.control(frames.ping(data, ack=False))

    def _send_more(self, stream: int, known: Stream, events: list[Event]) -> None:
        """Send waiting data of a stream whose window may have grown."""
        if known.answer.queue and known.answer.room > 0 and self._sending.drain(stream, known.answer):
            self._sent(stream, known, events)

    def _sent(self, stream: int, known: Stream, events: list[Event]) -> None:
        """Handle a stream without waiting data: end it, or report its room."""
        if known.answer.ending is not None:
            self._end(stream, known)
        else:
            events.append(Roomy(stream))

    def _end(self, stream: int, known: Stream) -> None:
        assert known.answer.ending is not None
        self._sending.trailers(stream, known.answer.ending, whole=known.peer_ended)
        self.forgive(self.limits.paid_frames)
        self._forget(stream, broken=not known.peer_ended)

    def _forget(self, stream: int, *, broken: bool) -> bool:
        """Drop a stream; return whether it was open."""
        if self._streams.pop(stream, None) is None:
            return False
        self._sending.forget(stream)
        self._remember(stream, broken=broken)
        return True

    def _remember(self, stream: int, *, broken: bool) -> None:
        self._closed[stream] = broken
        if len(self._closed) > _REMEMBERED:
            self._closed.popitem(last=False)
