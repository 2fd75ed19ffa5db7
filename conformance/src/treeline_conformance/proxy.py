"""Envoy, as a picker sees it: an ext_proc client that sends a request in one of the body modes and reads the answers.

A `Stream` is one HTTP request. All its messages are kept, and shown if a case fails.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

import grpc
import grpc.aio
from treeline_wire import envoy_pb2 as pb

from treeline_conformance import messages
from treeline_conformance.messages import NO_HINT, Mode
from treeline_conformance.pods import MODEL
from treeline_conformance.reading import Refusal, RequestReading
from treeline_conformance.verdict import Failed

PROCESS: Final = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
PIECE: Final = 64 * 1024
"""The size of chunks in which Envoy passes on a body that came at once."""
PROMPT: Final = b'{"model": "%s", "prompt": "What is the capital of France?", "max_tokens": 8}' % MODEL.encode()
_BYTES_S: Final = 1 << 20
"""Bytes a second by which the patience grows for long bodies, for busy machines."""
_MORE_BYTES: Final = 1 << 20
_MORE_ANSWERS: Final = 1_000
"""Bounds on bytes and answers beyond those sent, since a rewritten body may be longer."""
_CHANNEL: Final = [
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
]


class GrpcEnded(Failed):
    """The stream ended with a gRPC status, which hands the request to the proxy's failure mode."""

    def __init__(self, code: str, details: str) -> None:
        super().__init__(f"the stream ended with gRPC status {code}: {details[:200]}")
        self.code = code


class Stalled(Failed):
    """No answer came in time."""


@dataclass(frozen=True)
class Asking:
    """A request, and the way in which the proxy sends it. `body` None: headers end it. `hint` is in all messages, like
    Envoy's metadata, or in those of `hint_on`. `trailers`: the request has some. `config`: the first message has the
    modes.
    """

    mode: Mode = Mode.DUPLEX
    response_mode: Mode = Mode.DUPLEX
    method: str = "POST"
    path: str = "/v1/completions"
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = PROMPT
    piece: int = PIECE
    hint: Any = NO_HINT
    hint_on: frozenset[str] = frozenset({"headers", "body"})
    trailers: bool = False
    ends_twice: bool = False
    config: bool = True

    def headers_message(self) -> pb.ProcessingRequest:
        more = dict(self.headers)
        if self.body is not None and self.mode is not Mode.DUPLEX:  # full duplex removes it
            more.setdefault("content-length", str(len(self.body)))
        end = self.body is None and not self.trailers
        message = messages.request_headers(self.method, self.path, more, end=end)
        if self.config:
            message.protocol_config.CopyFrom(messages.config(self.mode, self.response_mode))
        return self._hinted(message, "headers")

    def body_messages(self) -> list[pb.ProcessingRequest]:
        """Return the messages of the body. In full duplex the end is a message of its own, as Envoy sends it."""
        if self.body is None or self.mode is Mode.NONE:
            return []
        parts = [self.body] if self.mode is Mode.BUFFERED else messages.in_chunks(self.body, self.piece)
        if self.mode is Mode.DUPLEX and not self.trailers:
            parts.append(b"")
        last = len(parts) - 1
        ends = not self.trailers
        said = [
            pb.ProcessingRequest(request_body=messages.body(part, end=ends and at == last))
            for at, part in enumerate(parts)
        ]
        if self.ends_twice:
            said.append(pb.ProcessingRequest(request_body=messages.body(parts[-1], end=True)))
        return [self._hinted(message, "body") for message in said]

    def trailers_message(self) -> pb.ProcessingRequest:
        return self._hinted(pb.ProcessingRequest(request_trailers=pb.HttpTrailers()), "body")

    def _hinted(self, message: pb.ProcessingRequest, part: str) -> pb.ProcessingRequest:
        return messages.hinted(message, self.hint) if part in self.hint_on else message


class Stream:
    """One ext_proc stream. It times out after `patience_s` without an answer."""

    def __init__(self, call: Any, said: list[tuple[str, Any]], patience_s: float) -> None:
        self._call = call
        self._reading: asyncio.Future[Any] | None = None
        self.said = said
        self.patience_s = patience_s

    async def send(self, message: pb.ProcessingRequest) -> None:
        """Send a message. Raises Stalled if the picker reads nothing, GrpcEnded if it has ended the stream with an
        error.
        """
        self.said.append(("proxy", message))
        writing = asyncio.ensure_future(self._call.write(message))
        writing.add_done_callback(_seen)  # the stream may have ended
        done, _ = await asyncio.wait({writing}, timeout=self.patience_s)
        if not done:
            writing.cancel()
            raise Stalled(f"the picker reads nothing for {self.patience_s:.3g} s")
        try:
            writing.result()
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            await self._raise_error()

    async def receive(self, waiting_for: str = "an answer") -> pb.ProcessingResponse | None:
        """Return the next answer; None if the stream has ended well. Raises Stalled, GrpcEnded."""
        try:
            return await self._read(self.patience_s)
        except TimeoutError:
            self.said.append(("suite", f"waited {self.patience_s:.3g} s for {waiting_for}"))
            raise Stalled(f"waited {self.patience_s:.3g} s for {waiting_for}") from None

    async def silence(self, seconds: float) -> pb.ProcessingResponse | None:
        """Return an answer within some seconds; None for no answer, or the end of the stream."""
        with contextlib.suppress(TimeoutError):
            return await self._read(seconds)
        return None

    async def _read(self, seconds: float) -> pb.ProcessingResponse | None:
        """Read an answer. A cancelled read would cancel the call, so it goes on for the next read. Raises
        TimeoutError.
        """
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._call.read())
            self._reading.add_done_callback(_seen)
        done, _ = await asyncio.wait({self._reading}, timeout=seconds)
        if not done:
            raise TimeoutError
        reading, self._reading = self._reading, None
        try:
            answer = reading.result()
        except grpc.aio.AioRpcError as error:
            self._raise(error.code(), error.details())
        if answer is grpc.aio.EOF:
            await self._raise_error()
            self.said.append(("picker", "ended the stream"))
            return None
        if answer is None:  # gRPC's result for undecodable bytes
            self.said.append(("picker", "said what is no ProcessingResponse"))
            raise Failed("what it says is no ProcessingResponse")
        self.said.append(("picker", answer))
        found: pb.ProcessingResponse = answer
        return found

    async def expect(self, kind: str) -> pb.ProcessingResponse:
        """Return the next answer, which must be of this kind."""
        answer = await self.receive(f"the answer to {kind}")
        found = "nothing more" if answer is None else answer.WhichOneof("response") or "an empty message"
        if found != kind:
            raise Failed(f"{found} instead of the answer to {kind}")
        assert answer is not None
        return answer

    async def half_close(self) -> None:
        self.said.append(("proxy", "closed its side of the stream"))
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._call.done_writing()

    async def end(self) -> None:
        """Close our side, and wait until the stream ends. Raises GrpcEnded for an error, Stalled."""
        await self.half_close()
        while await self.receive("the end of the stream") is not None:
            pass

    def cancel(self) -> None:
        self.said.append(("proxy", "reset the stream"))
        self._call.cancel()

    async def _raise_error(self) -> None:
        """Raise GrpcEnded, unless the stream has ended well."""
        code, details = await self._call.code(), await self._call.details()
        if code is not grpc.StatusCode.OK:
            self._raise(code, details)

    def _raise(self, code: grpc.StatusCode, details: str | None) -> NoReturn:
        self.said.append(("picker", f"ended the stream with gRPC status {code.name}: {(details or '')[:500]}"))
        raise GrpcEnded(code.name, details or "")


def _seen(done: asyncio.Future[Any]) -> None:
    if not done.cancelled():
        done.exception()


@dataclass
class Answer:
    """The picker's answers to a request. `destinations`: the list that it chose, in order."""

    asking: Asking
    reading: RequestReading
    stream: Stream

    @property
    def refusal(self) -> Refusal | None:
        return self.reading.refusal

    @property
    def destinations(self) -> list[str]:
        value = self.reading.header if self.reading.header is not None else self.reading.metadata
        return [] if not value else [part.strip() for part in value.split(",")]

    @property
    def upstream_body(self) -> bytes:
        return self.reading.body(self.asking.body or b"")

    def routed(self) -> str:
        """Return the first choice. Raises Failed without one."""
        if self.refusal is not None:
            raise Failed(f"refused with {self.refusal.status}: {self.refusal.body[:200].decode(errors='replace')}")
        if not self.destinations:
            raise Failed("no destination was given")
        return self.destinations[0]

    def refused(self) -> Refusal:
        """Return the refusal. Raises Failed if the request was routed."""
        if self.refusal is None:
            raise Failed(f"routed to {','.join(self.destinations) or 'no endpoint'} instead of refused")
        return self.refusal


class Proxy:
    """A connection to the picker. `open_stream` opens one request's stream; `ask` sends a request and reads the
    answers.
    """

    def __init__(self, channel: grpc.aio.Channel, patience_s: float, said: list[tuple[str, Any]]) -> None:
        self._process: Any = channel.stream_stream(
            PROCESS,
            request_serializer=pb.ProcessingRequest.SerializeToString,
            response_deserializer=pb.ProcessingResponse.FromString,
        )
        self._patience_s = patience_s
        self._said = said
        self._calls: list[Any] = []

    def open_stream(self) -> Stream:
        call = self._process()
        self._calls.append(call)
        return Stream(call, self._said, self._patience_s)

    async def ask(self, asking: Asking | None = None) -> Answer:
        """Send a request in its mode, and read all of the picker's answers. Raises Stalled, GrpcEnded, Failed."""
        asking = asking or Asking()
        stream = self.open_stream()
        stream.patience_s += len(asking.body or b"") / _BYTES_S
        reading = RequestReading(asking.mode, asking.body is not None, asking.trailers)
        answer = Answer(asking, reading, stream)
        await stream.send(asking.headers_message())
        bodies = asking.body_messages()
        if asking.mode is Mode.DUPLEX:
            await self._duplex(answer, bodies)
        else:
            await self._in_turns(answer, bodies)
        return answer

    async def _duplex(self, answer: Answer, bodies: list[pb.ProcessingRequest]) -> None:
        """Send and read at the same time, without waiting for answers in between."""
        sending = asyncio.create_task(self._send_all(answer, bodies))
        try:
            while not answer.reading.complete():
                try:
                    await self._take(answer, "the picker's answer")
                except Stalled:
                    if sending.done():  # otherwise the wait has not begun: sending has a limit of its own
                        raise
            if answer.refusal is None:
                await sending
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _send_all(self, answer: Answer, bodies: list[pb.ProcessingRequest]) -> None:
        for message in bodies:
            answer.reading.sent_chunks += 1
            await answer.stream.send(message)
        if answer.asking.trailers:
            await answer.stream.send(answer.asking.trailers_message())

    async def _in_turns(self, answer: Answer, bodies: list[pb.ProcessingRequest]) -> None:
        reading = answer.reading
        await self._take(answer, "the answer to request_headers")
        for message in bodies:
            if reading.refusal is not None:
                return
            reading.sent_chunks += 1
            await answer.stream.send(message)
            await self._take(answer, "the answer to request_body")
        if answer.asking.trailers and reading.refusal is None:
            await answer.stream.send(answer.asking.trailers_message())
            await self._take(answer, "the answer to request_trailers")

    async def _take(self, answer: Answer, waiting_for: str) -> None:
        response = await answer.stream.receive(waiting_for)
        if response is None:
            raise Failed(f"the stream ended before {waiting_for}")
        answer.reading.take(response)
        returned, sent = sum(map(len, answer.reading.chunks)), len(answer.asking.body or b"")
        if returned > sent + _MORE_BYTES or len(answer.reading.kinds) > sent + _MORE_ANSWERS:
            raise Failed(
                f"it does not end: {returned:,} bytes in {len(answer.reading.kinds):,} answers for {sent:,} bytes"
            )

    def close(self) -> None:
        """Reset all open streams."""
        for call in self._calls:
            call.cancel()
        self._calls.clear()


def open_channel(target: str) -> grpc.aio.Channel:
    """Open a connection to the picker, without TLS."""
    return grpc.aio.insecure_channel(target, options=_CHANNEL)
