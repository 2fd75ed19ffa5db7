"""Cases on streams and connections: their ends, their number, and slow readers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from typing import Final

from treeline_wire import envoy_pb2 as pb

from treeline_conformance import messages
from treeline_conformance.bench import Bench
from treeline_conformance.case import ALL_MODES, case
from treeline_conformance.cases.bodies import as_json
from treeline_conformance.messages import Mode
from treeline_conformance.pods import MODEL
from treeline_conformance.proxy import Answer, Asking
from treeline_conformance.reading import RequestReading
from treeline_conformance.verdict import Failed, Level, NotApplicable

MUST, SHOULD, MAY = Level.MUST, Level.SHOULD, Level.MAY
_MANY: Final = 200
_HELD: Final = 1_000
_ASKED: Final = 20
"""Requests after which, by chance, neither of two equal pods is left out."""
_EVENTS: Final = {":status": "200", "content-type": "text/event-stream"}


@case(
    "streams.end", MUST, "A stream that has said everything ends well when the proxy closes its side.", modes=ALL_MODES
)
async def end(bench: Bench, mode: Mode) -> None:
    answer = await bench.ask(mode)
    answer.routed()
    await answer.stream.end()


@case("streams.early-half-close", SHOULD, "A proxy that closes its side after the body still gets its answer.")
async def early_half_close(bench: Bench, mode: Mode) -> None:
    stream, asking = bench.proxy.open_stream(), Asking(mode)
    reading = RequestReading(mode, has_body=True)
    bodies = asking.body_messages()
    reading.sent_chunks = len(bodies)
    for message in [asking.headers_message(), *bodies]:
        await stream.send(message)
    await stream.half_close()
    while not reading.complete():
        said = await stream.receive("the picker's answer")
        if said is None:
            raise Failed("the stream ended before the answer")
        reading.take(said)
    Answer(asking, reading, stream).routed()


@case("streams.late-half-close", MUST, "A stream that stays open after its response ends well, whenever that is.")
async def late_half_close(bench: Bench, mode: Mode) -> None:
    answer = await bench.ask(mode)
    answer.routed()
    stream = answer.stream
    await stream.send(pb.ProcessingRequest(response_headers=messages.headers(_EVENTS, end=False)))
    await stream.expect("response_headers")
    await stream.send(pb.ProcessingRequest(response_body=messages.body(b"data: [DONE]\n\n", end=True)))
    await stream.expect("response_body")
    await stream.silence(0.5)
    await stream.end()


@case("streams.nothing", MUST, "A stream on which nothing is said ends well.")
async def nothing(bench: Bench, _mode: Mode) -> None:
    stream = bench.proxy.open_stream()
    await stream.end()


@case("streams.reset", MUST, "A reset at any moment leaves the connection and the next request alone.")
async def reset(bench: Bench, mode: Mode) -> None:
    asking = Asking(mode)
    said = [asking.headers_message(), *asking.body_messages()]
    for count in range(1, len(said) + 1):
        stream = bench.proxy.open_stream()
        for message in said[:count]:
            await stream.send(message)
        stream.cancel()
    answer = await bench.ask(mode)
    answer.routed()
    await answer.stream.send(pb.ProcessingRequest(response_headers=messages.headers(_EVENTS, end=False)))
    answer.stream.cancel()
    (await bench.ask(mode)).routed()


@case("streams.cancelled-load", SHOULD, "Requests whose clients went away before an answer are no load any more.")
async def cancelled_load(bench: Bench, mode: Mode) -> None:
    """Ask whether cancelled requests still count: then their pod gets nothing while others are idle."""
    pod, other = bench.pods[0].endpoint, bench.pods[1].endpoint

    async def takes(times: int) -> bool:
        """Return whether the pod gets one of `times` requests that both may have, each with a prompt of its own."""
        for _ in range(times):
            answer = await bench.ask(mode, body=_prompt(next(_numbers)), hint=[pod, other])
            where = answer.routed()
            await answered(answer)
            if where == pod:
                return True
        return False

    if not await takes(_ASKED):
        raise NotApplicable(f"of {_ASKED} requests none goes to {pod}, cancelled ones or not")
    for _ in range(_MANY):
        answer = await bench.ask(mode, body=_prompt(next(_numbers)), hint=[pod])
        answer.routed()
        answer.stream.cancel()
    if not await takes(_ASKED):
        raise Failed(f"of {_ASKED} requests none goes to {pod}, where {_MANY} were cancelled")


_numbers = itertools.count()


def _prompt(number: int) -> bytes:
    text = " ".join(f"{number} and {word}" for word in range(200))
    return json.dumps({"model": MODEL, "prompt": text, "max_tokens": 8}).encode()


async def answered(answer: Answer) -> None:
    """Let the engine answer this request, and end its stream."""
    stream = answer.stream
    await stream.send(pb.ProcessingRequest(response_headers=messages.headers(_EVENTS, end=True)))
    await stream.expect("response_headers")
    await stream.end()


@case("streams.unfinished", MUST, "A half-closed stream whose request is not whole ends without harm to others.")
async def unfinished(bench: Bench, mode: Mode) -> None:
    stream = bench.proxy.open_stream()
    await stream.send(Asking(mode).headers_message())
    await stream.half_close()
    with contextlib.suppress(Failed):  # any end will do: the client has gone
        while await stream.receive("the end of the stream") is not None:
            pass
    (await bench.ask(mode)).routed()


@case("streams.many", MUST, f"{_MANY} requests on one connection are decided beside each other, all open at once.")
async def many(bench: Bench, mode: Mode) -> None:
    answers = await asyncio.gather(*(bench.ask(mode) for _ in range(_MANY)), return_exceptions=True)
    failed = [answer for answer in answers if isinstance(answer, BaseException)]
    if failed:
        raise Failed(f"{len(failed)} of {_MANY} were not answered, the first: {failed[0]}")
    for answer in answers:
        assert isinstance(answer, Answer)
        answer.routed()


@case("streams.waiting-bodies", MUST, "Requests whose bodies are slow to come do not keep the others waiting.")
async def waiting_bodies(bench: Bench, mode: Mode) -> None:
    for _ in range(50):
        stream = bench.proxy.open_stream()
        await stream.send(Asking(mode).headers_message())
    (await bench.ask(mode)).routed()


@case(
    "streams.slow-reader",
    MUST,
    "A proxy that does not read for a while gets everything, and others do not wait for it.",
)
async def slow_reader(bench: Bench, mode: Mode) -> None:
    body = json.dumps({"model": MODEL, "prompt": "slow " * 800_000}).encode()
    asking = Asking(mode, body=body)
    stream, reading = bench.proxy.open_stream(), RequestReading(mode, has_body=True)
    bodies = asking.body_messages()
    reading.sent_chunks = len(bodies)
    for message in [asking.headers_message(), *bodies]:
        await stream.send(message)
    for _ in range(3):
        async with bench.another_connection() as other:
            (await other.ask(Asking(mode))).routed()
        (await bench.ask(mode)).routed()
    while not reading.complete():
        said = await stream.receive("the rest of the body")
        if said is None:
            raise Failed("the stream ended before the whole body was returned")
        reading.take(said)
    answer = Answer(asking, reading, stream)
    answer.routed()
    if as_json(answer.upstream_body) != json.loads(body):
        raise Failed(f"{len(answer.upstream_body):,} of {len(body):,} bytes, or others")


@case("streams.slow-response-reader", MUST, "The same for a response: what is not read yet waits, and nothing is lost.")
async def slow_response_reader(bench: Bench, mode: Mode) -> None:
    answer = await bench.ask(mode)
    answer.routed()
    stream = answer.stream
    await stream.send(pb.ProcessingRequest(response_headers=messages.headers(_EVENTS, end=False)))
    pieces = [b"data: %06d %s\n\n" % (at, b"y" * 40_000) for at in range(50)]
    for at, piece in enumerate(pieces):
        await stream.send(pb.ProcessingRequest(response_body=messages.body(piece, end=at == len(pieces) - 1)))
    (await bench.ask(mode)).routed()
    await stream.expect("response_headers")
    sent, got = b"".join(pieces), b""
    while len(got) < len(sent):
        said = (await stream.expect("response_body")).response_body.response.body_mutation
        if said.WhichOneof("mutation") != "streamed_response":
            raise Failed("a piece of the response is answered without streamed_response, which Envoy refuses")
        got += said.streamed_response.body
    if got != sent:
        raise Failed("other bytes came back")


@case("streams.held", SHOULD, f"{_HELD} responses may be under way on one connection, and the next request is decided.")
async def held(bench: Bench, mode: Mode) -> None:
    for at in range(0, _HELD, _MANY):
        answers = await asyncio.gather(*(_under_way(bench, mode) for _ in range(_MANY)), return_exceptions=True)
        if failed := [answer for answer in answers if answer is not None]:
            raise Failed(f"after {at}, {len(failed)} of {_MANY} were not answered, the first: {failed[0]}")
        del bench.said[:]  # thousands of messages, all alike
    (await bench.ask(mode)).routed()


async def _under_way(bench: Bench, mode: Mode) -> None:
    answer = await bench.ask(mode)
    answer.routed()
    await answer.stream.send(pb.ProcessingRequest(response_headers=messages.headers(_EVENTS, end=False)))
    await answer.stream.expect("response_headers")


@case(
    "streams.lost-connection", MUST, "A connection that is lost in the middle of requests leaves other proxies alone."
)
async def lost_connection(bench: Bench, mode: Mode) -> None:
    async with bench.another_connection() as other:
        for _ in range(5):
            await other.open_stream().send(Asking(mode).headers_message())
            await other.ask(Asking(mode))
    (await bench.ask(mode)).routed()
