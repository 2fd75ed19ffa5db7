"""Cases on a request's body and headers on the way through the picker."""

from __future__ import annotations

import json
from typing import Final

from treeline_conformance.bench import Bench
from treeline_conformance.case import ALL_MODES, WITH_BODY, case
from treeline_conformance.messages import Mode
from treeline_conformance.pods import MODEL
from treeline_conformance.proxy import Answer
from treeline_conformance.verdict import Failed, Level

MUST, SHOULD, MAY = Level.MUST, Level.SHOULD, Level.MAY
_SIZES: Final = {"1kb": 1_000, "220kb": 220_000, "4mb": 4_000_000}
_ANEW: Final = "write it anew"


def _body(size: int) -> bytes:
    """Return a body with unordered keys, white space and escapes, which decoding and encoding would change."""
    head = (
        b'{ "stream":false,\t"prompt":"caf\\u00e9 \\/ caf\xc3\xa9 ", "model" : "%s" ,"b":1.0,\n"a":[1e2], "pad":"'
        % MODEL.encode()
    )
    return head + b"x" * (size - len(head) - 2) + b'"}'


def as_json(data: bytes) -> object:
    """Decode JSON; None for invalid JSON, which no body here is."""
    try:
        return json.loads(data)
    except ValueError:
        return None


@case("bodies.1kb", MUST, "A body of 1 KB reaches the pod whole.", modes=ALL_MODES)
async def small(bench: Bench, mode: Mode) -> None:
    _whole(await bench.ask(mode, body=_body(_SIZES["1kb"]), piece=300))


@case("bodies.220kb", MUST, "So does one of 220 KB.", modes=(*WITH_BODY, Mode.STREAMED))
async def middle(bench: Bench, mode: Mode) -> None:
    _whole(await bench.ask(mode, body=_body(_SIZES["220kb"])))


@case("bodies.4mb", MUST, "So does one of 4 MB.", modes=WITH_BODY)
async def large(bench: Bench, mode: Mode) -> None:
    _whole(await bench.ask(mode, body=_body(_SIZES["4mb"])))


def _whole(answer: Answer) -> None:
    answer.routed()
    sent, got = answer.asking.body or b"", answer.upstream_body
    if got != sent and as_json(got) != as_json(sent):
        raise Failed(f"{len(got):,} of {len(sent):,} bytes, or others")


@case(
    "bodies.bytes",
    SHOULD,
    "And it is what was sent, byte for byte: the order of keys, white space, escapes.",
    gie15=_ANEW,
)
async def unchanged(bench: Bench, mode: Mode) -> None:
    for size in _SIZES.values():
        answer = await bench.ask(mode, body=_body(size))
        answer.routed()
        seen = "unchanged" if answer.upstream_body == answer.asking.body else "written anew"
        if as_json(answer.upstream_body) is None:
            raise Failed("it is no JSON any more")
        bench.judge(seen, spec="unchanged", gie15="written anew", what="the body")


@case("bodies.numbers", SHOULD, "Numbers keep their digits.", gie15="12345678901234567890 becomes 12345678901234567000")
async def numbers(bench: Bench, mode: Mode) -> None:
    digits = ("12345678901234567890", "0.1000000000000000055511151231257827", "1.0", "-0")
    members = ", ".join(f'"n{at}": {number}' for at, number in enumerate(digits))
    answer = await bench.ask(mode, body=f'{{"model": "{MODEL}", "prompt": "x", {members}}}'.encode())
    answer.routed()
    if as_json(answer.upstream_body) is None:
        raise Failed("no JSON has come out")
    lost = [number for number in digits if number.encode() not in answer.upstream_body]
    seen = "kept" if not lost else "other digits"
    bench.judge(seen, spec="kept", gie15="other digits", what="numbers")


@case(
    "bodies.duplicate-keys", SHOULD, "A key that is there twice reaches the pod twice, or the request is answered 400."
)
async def duplicate_keys(bench: Bench, mode: Mode) -> None:
    body = b'{"model": "%s", "prompt": "one", "prompt": "two"}' % MODEL.encode()
    answer = await bench.ask(mode, body=body)
    if answer.refusal is not None and answer.refusal.status == 400:
        return
    answer.routed()
    if answer.upstream_body.count(b'"prompt"') != 2:
        raise Failed("one of them is lost")


@case("bodies.one-byte-pieces", SHOULD, "It does not matter how the body is cut, in characters of UTF-8 too.")
async def one_byte_pieces(bench: Bench, mode: Mode) -> None:
    body = f'{{"model": "{MODEL}", "prompt": "Grüße, 東京"}}'.encode()
    answer = await bench.ask(mode, body=body, piece=1)
    answer.routed()
    if as_json(answer.upstream_body) != json.loads(body):
        raise Failed("another text has come out")


@case("bodies.chat", MUST, "A chat completion is routed as a completion is.", modes=ALL_MODES)
async def chat(bench: Bench, mode: Mode) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "stream": True}
    (await bench.ask(mode, path="/v1/chat/completions", body=json.dumps(chat).encode())).routed()


@case("bodies.other-paths", SHOULD, "Embeddings, /v1/responses and a query behind the path are routed.")
async def other_paths(bench: Bench, mode: Mode) -> None:
    asked = {
        "/v1/embeddings": {"model": MODEL, "input": "Hello"},
        "/v1/responses": {"model": MODEL, "input": "Hello"},
        "/v1/completions?api-version=1": {"model": MODEL, "prompt": "Hello"},
    }
    for path, members in asked.items():
        answer = await bench.ask(mode, path=path, body=json.dumps(members).encode())
        if answer.refusal is not None:
            raise Failed(f"{path} is refused with {answer.refusal.status}")


@case("headers.only-what-changed", SHOULD, "The client's headers are not written back.", gie15="all are echoed")
async def only_what_changed(bench: Bench, mode: Mode) -> None:
    answer = await bench.ask(mode, headers={"hi": "mom", "accept": "*/*"})
    answer.routed()
    echoed = {"hi", "accept", "content-type"} & set(answer.reading.set_headers)
    seen = "echoed" if echoed else "left alone"
    bench.judge(seen, spec="left alone", gie15="echoed", what="headers")


@case("headers.none-of-the-system", MUST, "Headers that the gateway owns are never written back.")
async def none_of_the_system(bench: Bench, mode: Mode) -> None:
    owned = {
        "x-gateway-inference-objective": "none",
        "x-gateway-inference-fairness-id": "me",
        "x-gateway-destination-endpoint-subset": "192.0.2.1:80",
    }
    answer = await bench.ask(mode, headers=owned)
    answer.routed()
    if echoed := set(owned) & set(answer.reading.set_headers):
        raise Failed(f"{', '.join(sorted(echoed))} set again")


@case("headers.pseudo", MUST, "Method, path and authority stay what they are.")
async def pseudo(bench: Bench, mode: Mode) -> None:
    for asking in ({}, {"body": None, "method": "GET"}):
        answer = await bench.ask(mode, **asking)
        answer.routed()
        reading, fields = answer.reading, answer.asking.headers_message().request_headers.headers.headers
        sent = {field.key: field.raw_value.decode() for field in fields if field.key.startswith(":")}
        changed = [name for name, value in sent.items() if reading.set_headers.get(name, value) != value]
        if lost := [*changed, *(name for name in sent if name in reading.removed_headers)]:
            raise Failed(f"{', '.join(lost)} changed or removed")
