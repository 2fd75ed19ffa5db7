"""P13 and the response half: every answer of the pod reaches the client, at once and unchanged."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final

from treeline_wire import envoy_pb2 as pb

from treeline_conformance import messages
from treeline_conformance.bench import Bench
from treeline_conformance.case import ALL_MODES, case
from treeline_conformance.messages import LB, SERVED, Mode
from treeline_conformance.pods import MODEL
from treeline_conformance.proxy import Answer, Asking, Stalled, Stream
from treeline_conformance.verdict import Failed, Level

MUST, SHOULD, MAY = Level.MUST, Level.SHOULD, Level.MAY
JSON: Final = {":status": "200", "content-type": "application/json"}
EVENTS: Final = {":status": "200", "content-type": "text/event-stream"}
_TOLD: Final = "x-conformance-test-served-endpoint"
_LONGEST: Final = 62_000


def _response_headers(fields: Mapping[str, str], *, served: str = "", end: bool = False) -> pb.ProcessingRequest:
    message = pb.ProcessingRequest(response_headers=messages.headers(fields, end=end))
    return messages.with_metadata(message, LB, SERVED, served) if served else message


def _chunk(data: bytes, *, end: bool = False) -> pb.ProcessingRequest:
    return pb.ProcessingRequest(response_body=messages.body(data, end=end))


async def _begun(bench: Bench, fields: Mapping[str, str], mode: Mode = Mode.DUPLEX) -> Answer:
    """Return a routed request whose response headers have been answered."""
    answer = await bench.ask(mode)
    endpoint = answer.routed()
    await answer.stream.send(_response_headers(fields, served=endpoint))
    await answer.stream.expect("response_headers")
    return answer


async def _returned(stream: Stream, wanted: int) -> tuple[bytes, bool]:
    """Return the body that comes back, up to `wanted` bytes or its end."""
    got, ended = b"", False
    while len(got) < wanted and not ended:
        part = (await stream.expect("response_body")).response_body.response.body_mutation
        if part.WhichOneof("mutation") != "streamed_response":
            raise Failed("a piece of the response is answered without streamed_response, which Envoy refuses")
        piece = part.streamed_response
        if len(piece.body) > _LONGEST:
            raise Failed(f"a piece of {len(piece.body):,} bytes")
        got, ended = got + piece.body, piece.end_of_stream
    return got, ended


async def _whole(bench: Bench, fields: Mapping[str, str], pieces: Sequence[bytes]) -> None:
    """Send all pieces, then read: the same bytes must come back, with one end."""
    answer = await _begun(bench, fields)
    for at, piece in enumerate(pieces):
        await answer.stream.send(_chunk(piece, end=at == len(pieces) - 1))
    sent = b"".join(pieces)
    got, ended = await _returned(answer.stream, len(sent) + 1)
    if got != sent:
        raise Failed(f"{len(got):,} of {len(sent):,} bytes, or others")
    if not ended:
        raise Failed("no end of the body")
    await answer.stream.end()


@case("P13.served", MUST, "Response headers that name the endpoint that served are answered.", modes=ALL_MODES)
async def served(bench: Bench, mode: Mode) -> None:
    answer = await bench.ask(mode, response_mode=Mode.NONE)
    await answer.stream.send(_response_headers(JSON, served=answer.routed()))
    await answer.stream.expect("response_headers")
    await answer.stream.end()


@case("P13.served-by-another", MUST, "An endpoint that was not chosen, or is none, changes nothing about the response.")
async def served_by_another(bench: Bench, mode: Mode) -> None:
    for endpoint in (bench.pods[2].endpoint, "192.0.2.9:8000", "no address", ""):
        answer = await bench.ask(mode)
        answer.routed()
        await answer.stream.send(_response_headers(JSON, served=endpoint))
        await answer.stream.expect("response_headers")


@case("P13.told", MAY, f"{_TOLD} tells the client who served (for conformance tests of Gateways).")
async def told(bench: Bench, mode: Mode) -> None:
    answer = await bench.ask(mode)
    answer.routed()
    await answer.stream.send(_response_headers(JSON, served=bench.pods[2].endpoint))
    said = (await answer.stream.expect("response_headers")).response_headers.response.header_mutation
    fields = {option.header.key.lower(): option.header.raw_value.decode() for option in said.set_headers}
    if fields.get(_TOLD) != bench.pods[2].endpoint:
        raise Failed(f"{_TOLD}: {fields.get(_TOLD)}")


@case("responses.events", MUST, "Each event of a stream is returned before the next one comes.")
async def events(bench: Bench, _mode: Mode) -> None:
    answer = await _begun(bench, EVENTS)
    for at in range(5):
        event = b'data: {"choices": [{"index": 0, "text": " word %d"}]}\n\n' % at
        await answer.stream.send(_chunk(event))
        got, _ = await _returned(answer.stream, len(event))
        if got != event:
            raise Failed(f"{got[:80]!r} instead of {event!r}")
    await answer.stream.send(_chunk(b"data: [DONE]\n\n", end=True))
    _, ended = await _returned(answer.stream, 1 << 20)
    if not ended:
        raise Failed("no end of the body")


@case(
    "responses.json-at-once",
    SHOULD,
    "So is each piece of a response that is no event stream.",
    gie15="kept until its end",
)
async def json_at_once(bench: Bench, _mode: Mode) -> None:
    answer = await _begun(bench, JSON)
    await answer.stream.send(_chunk(b'{"id": "1", "choices": ['))
    try:
        await _returned(answer.stream, 10)
        seen = "at once"
    except Stalled:
        seen = "kept until its end"
    bench.judge(seen, spec="at once", gie15="kept until its end", what="the first piece")


@case("responses.json", MUST, "A response in pieces comes back as it was, with one end.")
async def json_whole(bench: Bench, _mode: Mode) -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 10, "total_tokens": 17}
    body = json.dumps({"id": "1", "model": MODEL, "choices": [{"text": f'"model":"{MODEL}"'}], "usage": usage}).encode()
    await _whole(bench, JSON, [body[:20], body[20:], b""])


@case("responses.no-json", MUST, "A response that is no JSON, or an error of the pod's, comes back as it was.")
async def no_json(bench: Bench, _mode: Mode) -> None:
    await _whole(bench, JSON, [b"no JSON at all {", b"\xff\x00", b""])
    await _whole(bench, {":status": "500", "content-type": "text/plain"}, [b"upstream connect error", b""])


@case("responses.large", MUST, "Pieces of 200 KB come back in pieces of at most 62,000 bytes.")
async def large(bench: Bench, _mode: Mode) -> None:
    await _whole(bench, JSON, [b'{"text": "' + b"y" * 200_000, b"z" * 200_000 + b'"}', b""])


@case("responses.empty", MUST, "A response without a body is answered, and the stream ends well.")
async def empty(bench: Bench, mode: Mode) -> None:
    answer = await bench.ask(mode)
    answer.routed()
    await answer.stream.send(_response_headers({":status": "204"}, end=True))
    await answer.stream.expect("response_headers")
    await answer.stream.end()


@case("responses.trailers", MUST, "Trailers of a response are answered.", gie15="")
async def trailers(bench: Bench, _mode: Mode) -> None:
    answer = await _begun(bench, EVENTS)
    await answer.stream.send(_chunk(b"data: [DONE]\n\n"))
    await answer.stream.send(pb.ProcessingRequest(response_trailers=pb.HttpTrailers()))
    seen = []
    while "response_trailers" not in seen:
        said = await answer.stream.receive("the answer to response_trailers")
        if said is None:
            raise Failed("the stream ended before the answer to response_trailers")
        seen.append(said.WhichOneof("response"))
    await answer.stream.end()


@case("responses.headers-not-echoed", SHOULD, "The pod's headers are not written back.", gie15="all are echoed")
async def headers_not_echoed(bench: Bench, mode: Mode) -> None:
    answer = await bench.ask(mode)
    answer.routed()
    fields = {**JSON, "content-length": "12", "x-engine": "1"}
    await answer.stream.send(_response_headers(fields, served=answer.routed()))
    said = (await answer.stream.expect("response_headers")).response_headers.response
    names = {option.header.key.lower() for option in said.header_mutation.set_headers}
    seen = "echoed" if names & {"content-type", "x-engine", "content-length"} else "left alone"
    bench.judge(seen, spec="left alone", gie15="echoed", what="headers")


@case(
    "responses.transport-headers",
    MUST,
    "transfer-encoding is not set: over HTTP/2 it cuts responses off.",
    gie15="echo it",
)
async def transport_headers(bench: Bench, mode: Mode) -> None:
    answer = await bench.ask(mode)
    answer.routed()
    await answer.stream.send(_response_headers({**JSON, "transfer-encoding": "chunked"}))
    said = (await answer.stream.expect("response_headers")).response_headers.response
    names = {o.header.key.lower(): o.header.raw_value for o in said.header_mutation.set_headers}
    if names.get(":status", b"200") != b"200":
        raise Failed(f":status is set to {names[':status']!r}")
    seen = "set" if "transfer-encoding" in names else "left alone"
    bench.judge(seen, spec="left alone", gie15="set", what="transfer-encoding")


@case("responses.without-headers", SHOULD, "A response's body whose headers are not shown (SKIP) is returned.")
async def without_headers(bench: Bench, mode: Mode) -> None:
    answer = await bench.ask(mode)
    answer.routed()
    await answer.stream.send(_chunk(b"data: 1\n\n", end=True))
    got, ended = await _returned(answer.stream, 1 << 20)
    if got != b"data: 1\n\n" or not ended:
        raise Failed(f"{got!r} came back")


@case(
    "responses.other-modes", SHOULD, "Pieces of a response in STREAMED and BUFFERED mode are answered without a body."
)
async def other_modes(bench: Bench, mode: Mode) -> None:
    for response_mode in (Mode.STREAMED, Mode.BUFFERED):
        answer = await bench.ask(mode, response_mode=response_mode)
        answer.routed()
        await answer.stream.send(_response_headers(EVENTS))
        await answer.stream.expect("response_headers")
        await answer.stream.send(_chunk(b"data: 1\n\n", end=True))
        said = (await answer.stream.expect("response_body")).response_body.response
        which = said.body_mutation.WhichOneof("mutation")
        if which == "streamed_response":
            raise Failed(f"streamed_response in {response_mode.name}, where Envoy refuses it")
        if which == "body" and said.body_mutation.body != b"data: 1\n\n":
            raise Failed("another body")


@case(
    "responses.before-body", SHOULD, "A pod that answers before it has the whole body (413) does not break the stream."
)
async def before_body(bench: Bench, _mode: Mode) -> None:
    stream = bench.proxy.open_stream()
    await stream.send(Asking().headers_message())
    await stream.send(_response_headers({":status": "413"}, end=True))
    await stream.expect("response_headers")


@case("responses.many-pieces", SHOULD, "1,000 events go through within the time that one may take.")
async def many_pieces(bench: Bench, _mode: Mode) -> None:
    await _whole(bench, EVENTS, [*(b"data: %d\n\n" % at for at in range(1_000)), b""])
