"""Cases on the answers to messages, and their order, in each body mode."""

from __future__ import annotations

from treeline_wire import envoy_pb2 as pb

from treeline_conformance import messages
from treeline_conformance.bench import Bench
from treeline_conformance.case import ALL_MODES, case
from treeline_conformance.messages import Mode
from treeline_conformance.pods import MODEL
from treeline_conformance.proxy import Answer, Asking, Stalled
from treeline_conformance.verdict import Failed, Level

MUST, SHOULD, MAY = Level.MUST, Level.SHOULD, Level.MAY
_QUIET_S = 0.3
"""Seconds of silence that prove that no answer comes."""


def _faultless(answer: Answer, *rules: str) -> None:
    for rule in rules:
        if rule in answer.reading.faults:
            raise Failed(answer.reading.faults[rule])


@case(
    "modes.served", MUST, "Requests are decided in this body mode, each message answered in its turn.", modes=ALL_MODES
)
async def served(bench: Bench, mode: Mode) -> None:
    """Check that this mode is served; if it is not, the other cases of the mode do not apply."""
    answer = await bench.ask(mode)
    answer.routed()
    bench.served.add(mode)
    _faultless(answer, "order")


@case("modes.untold", MUST, "A proxy that tells no body modes is served in full duplex, which the protocol asks for.")
async def untold(bench: Bench, mode: Mode) -> None:
    (await bench.ask(mode, config=False)).routed()


@case(
    "flow.order", MUST, "Answers come as headers, body, trailers; each once, the body's as often as there are pieces."
)
async def order(bench: Bench, mode: Mode) -> None:
    answer = await bench.ask(mode, piece=20)
    answer.routed()
    _faultless(answer, "order")


@case("flow.withheld-headers", MUST, "In full duplex the headers are answered when the body has been seen, not before.")
async def withheld(bench: Bench, mode: Mode) -> None:
    stream, asking = bench.proxy.open_stream(), Asking(mode)
    await stream.send(asking.headers_message())
    if (early := await stream.silence(_QUIET_S)) is not None:
        raise Failed(f"{early.WhichOneof('response')} before the body has come")
    for message in asking.body_messages():
        await stream.send(message)
    await stream.expect("request_headers")


@case("flow.raw-value", MUST, "Values of headers are in raw_value, where Envoy looks for them.", modes=ALL_MODES)
async def raw_value(bench: Bench, mode: Mode) -> None:
    answer = await bench.ask(mode)
    answer.routed()
    _faultless(answer, "raw_value")


@case("flow.counts", MUST, "Headers are set only by answers whose header mutations take effect.", modes=ALL_MODES)
async def counts(bench: Bench, mode: Mode) -> None:
    answer = await bench.ask(mode)
    answer.routed()
    _faultless(answer, "late_header")


@case("flow.clear-route-cache", SHOULD, "The route is chosen anew (clear_route_cache) when the destination is set.")
async def clear_route_cache(bench: Bench, mode: Mode) -> None:
    answer = await bench.ask(mode)
    answer.routed()
    if not answer.reading.clears_route_cache:
        raise Failed("clear_route_cache is not set")


@case(
    "flow.content-length", MUST, "In full duplex content-length is set to the body's length: Envoy has taken it away."
)
async def content_length(bench: Bench, mode: Mode) -> None:
    answer = await bench.ask(mode)
    answer.routed()
    told = answer.reading.set_headers.get("content-length")
    if told != str(len(answer.upstream_body)):
        raise Failed(f"content-length {told}, {len(answer.upstream_body)} bytes")


@case(
    "flow.content-length-unchanged",
    MUST,
    "Elsewhere it is not set to anything but the body's length.",
    modes=ALL_MODES[1:],
)
async def content_length_unchanged(bench: Bench, mode: Mode) -> None:
    answer = await bench.ask(mode)
    answer.routed()
    told = answer.reading.set_headers.get("content-length", str(len(answer.upstream_body)))
    if told != str(len(answer.upstream_body)):
        raise Failed(f"content-length {told}, {len(answer.upstream_body)} bytes")


@case("flow.chunks", MUST, "A body is returned in pieces of at most 62,000 bytes; Envoy takes none of more than 64 KB.")
async def chunks(bench: Bench, mode: Mode) -> None:
    answer = await bench.ask(mode, body=_large(300_000), piece=1 << 18)
    answer.routed()
    _faultless(answer, "streamed", "chunk")
    longest = max(map(len, answer.reading.chunks), default=0)
    if longest > 62_000:
        raise Failed(f"a piece of {longest:,} bytes")


@case("flow.one-end", MUST, "The returned body ends once, with its last piece.")
async def one_end(bench: Bench, mode: Mode) -> None:
    answer = await bench.ask(mode, body=_large(200_000))
    answer.routed()
    while (more := await answer.stream.silence(_QUIET_S)) is not None:
        answer.reading.take(more)
    _faultless(answer, "streamed", "eos")
    if answer.reading.eos != 1:
        raise Failed(f"{answer.reading.eos} ends of the body")


@case("flow.second-end", SHOULD, "An end of the body that Envoy delivers twice is not answered twice.")
async def second_end(bench: Bench, mode: Mode) -> None:
    answer = await bench.ask(mode, ends_twice=True)
    answer.routed()
    _faultless(answer, "streamed", "eos")
    if (more := await answer.stream.silence(_QUIET_S)) is not None:
        raise Failed(f"{more.WhichOneof('response')} after the end")


@case(
    "flow.header-only", MUST, "A request without a body is answered at its headers, with an endpoint.", modes=ALL_MODES
)
async def header_only(bench: Bench, mode: Mode) -> None:
    answer = await bench.ask(mode, body=None, method="GET")
    if answer.routed() not in bench.endpoints:
        raise Failed(f"{answer.routed()} is no endpoint of the pool")
    if answer.reading.kinds != ["request_headers"]:
        raise Failed(f"answers: {', '.join(answer.reading.kinds)}")


@case("flow.models", SHOULD, "GET /v1/models is routed, or answered with the list of models.")
async def models(bench: Bench, mode: Mode) -> None:
    answer = await bench.ask(mode, body=None, method="GET", path="/v1/models")
    if answer.refusal is None or answer.refusal.status != 200 or b'"data"' not in answer.refusal.body:
        answer.routed()


@case("flow.options", SHOULD, "OPTIONS on a path of inference (a browser asks so before it posts) is routed.")
async def options(bench: Bench, mode: Mode) -> None:
    asked = {"origin": "https://example.com", "access-control-request-method": "POST"}
    answer = await bench.ask(mode, body=None, method="OPTIONS", path="/v1/chat/completions", headers=asked)
    answer.routed()


@case("flow.request-trailers", MUST, "Trailers of a request are answered.", modes=ALL_MODES[:3], gie15="they are not")
async def request_trailers(bench: Bench, mode: Mode) -> None:
    try:
        answer = await bench.ask(mode, trailers=True)
    except Stalled:
        bench.judge("no answer", spec="an answer", gie15="no answer", what="trailers")
        return
    answer.routed()
    answered = "request_trailers" in answer.reading.kinds
    bench.judge("an answer" if answered else "no answer", spec="an answer", gie15="no answer", what="trailers")


@case("flow.starts-at-response", MUST, "A stream may begin with response headers: a reply that the proxy made itself.")
async def starts_at_response(bench: Bench, _mode: Mode) -> None:
    stream = bench.proxy.open_stream()
    message = pb.ProcessingRequest(response_headers=messages.headers({":status": "503"}, end=True))
    message.protocol_config.CopyFrom(messages.config(Mode.DUPLEX, Mode.DUPLEX))
    await stream.send(message)
    await stream.expect("response_headers")
    await stream.end()


@case("flow.no-request-headers", MAY, "A proxy that sends no request headers (SKIP) gets an answer to the body.")
async def no_request_headers(bench: Bench, _mode: Mode) -> None:
    stream = bench.proxy.open_stream()
    message = pb.ProcessingRequest(request_body=messages.body(Asking().body or b"", end=True))
    message.protocol_config.CopyFrom(messages.config(Mode.BUFFERED, Mode.NONE))
    await stream.send(message)
    await stream.expect("request_body")


@case("flow.unknown-fields", SHOULD, "Attributes and metadata that nobody knows do no harm.")
async def unknown_fields(bench: Bench, mode: Mode) -> None:
    stream, asking = bench.proxy.open_stream(), Asking(mode)
    first = asking.headers_message()
    first.attributes["envoy.filters.http.ext_proc"].fields["request.path"].string_value = "/v1/completions"
    messages.with_metadata(first, "com.example.filter", "anything", {"deep": [1, None, {"x": True}]})
    messages.with_metadata(first, messages.LB, "somebody-else", "value")
    await stream.send(first)
    for message in asking.body_messages():
        await stream.send(message)
    await stream.expect("request_headers")


@case("flow.odd-headers", SHOULD, "Headers that are there twice, empty, long or no UTF-8 do no harm.")
async def odd_headers(bench: Bench, mode: Mode) -> None:
    stream, asking = bench.proxy.open_stream(), Asking(mode)
    first = asking.headers_message()
    for key, value in (("x-a", b"1"), ("x-a", b"2"), ("x-b", b""), ("x-c", b"\xff\xfe"), ("x-d", b"d" * 50_000)):
        first.request_headers.headers.headers.add(key=key, raw_value=value)
    await stream.send(first)
    for message in asking.body_messages():
        await stream.send(message)
    await stream.expect("request_headers")


@case("flow.observability", SHOULD, "In observability_mode nothing is answered, and nothing fails.")
async def observability(bench: Bench, _mode: Mode) -> None:
    stream, asking = bench.proxy.open_stream(), Asking(Mode.STREAMED)
    for message in [asking.headers_message(), *asking.body_messages()]:
        message.observability_mode = True
        await stream.send(message)
    if (said := await stream.silence(_QUIET_S)) is not None:
        raise Failed(f"{said.WhichOneof('response')} is answered")
    await stream.half_close()


def _large(size: int) -> bytes:
    """Return a completion of about `size` bytes."""
    return b'{"model": "%s", "prompt": "%s"}' % (MODEL.encode(), b"lorem ipsum " * (size // 12))
