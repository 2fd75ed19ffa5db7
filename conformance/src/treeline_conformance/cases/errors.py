"""Requests that get no endpoint: each is an HTTP answer, never a gRPC status, which would hand it to fail-open."""

from __future__ import annotations

import json
from typing import Any, Final

from treeline_conformance.bench import Bench
from treeline_conformance.case import WITH_BODY, case
from treeline_conformance.messages import Mode
from treeline_conformance.pods import MODEL
from treeline_conformance.proxy import Answer, Asking
from treeline_conformance.verdict import Failed, Level

MUST, SHOULD, MAY = Level.MUST, Level.SHOULD, Level.MAY
_REASON: Final = "x-llm-d-request-dropped-reason"
_ASKED: Final = 4
_MEBI: Final = 1 << 20


async def _status(bench: Bench, mode: Mode, wanted: int, **asking: Any) -> None:
    refusal = (await bench.ask(mode, **asking)).refused()
    if refusal.status != wanted:
        raise Failed(f"{refusal.status} instead of {wanted}: {refusal.body[:200].decode(errors='replace')}")


@case("errors.bad-json", SHOULD, "A body that is no JSON is answered 400.", modes=WITH_BODY)
async def bad_json(bench: Bench, mode: Mode) -> None:
    await _status(bench, mode, 400, body=b"no healthy upstream")


@case("errors.cut-json", SHOULD, "A body that ends too early is answered 400.", modes=WITH_BODY)
async def cut_json(bench: Bench, mode: Mode) -> None:
    await _status(bench, mode, 400, body=b'{"model": "%s", "prompt": "What is' % MODEL.encode())


@case("errors.no-model", SHOULD, "A body without a model is answered 400.", modes=WITH_BODY)
async def no_model(bench: Bench, mode: Mode) -> None:
    await _status(bench, mode, 400, body=b'{"prompt": "What is the capital of France?"}')


@case("errors.model-is-no-text", SHOULD, "A model that is no text is answered 400.", modes=WITH_BODY)
async def model_is_no_text(bench: Bench, mode: Mode) -> None:
    await _status(bench, mode, 400, body=b'{"model": 7, "prompt": "x"}')


@case("errors.no-object", SHOULD, "JSON that is no object is answered 400.", modes=WITH_BODY)
async def no_object(bench: Bench, mode: Mode) -> None:
    await _status(bench, mode, 400, body=b'["model", "prompt"]')


@case("errors.empty-body", SHOULD, "A POST whose body is empty is answered 400.")
async def empty_body(bench: Bench, mode: Mode) -> None:
    await _status(bench, mode, 400, body=b"")


@case("errors.not-utf-8", SHOULD, "A body that is no UTF-8 is routed or answered 400.", modes=WITH_BODY)
async def not_utf8(bench: Bench, mode: Mode) -> None:
    _routed_or(await bench.ask(mode, body=b'{"model": "%s", "prompt": "\xff\xfe"}' % MODEL.encode()), {400})


@case("errors.deep", SHOULD, "A body of 100,000 nested lists is routed or answered 400.")
async def deep(bench: Bench, mode: Mode) -> None:
    body = b'{"model": "%s", "prompt": %s%s}' % (MODEL.encode(), b"[" * 100_000, b"]" * 100_000)
    _routed_or(await bench.ask(mode, body=body), {400})


@case("errors.large", SHOULD, "A body of 11 MB is routed or answered 413.")
async def large(bench: Bench, mode: Mode) -> None:
    body = json.dumps({"model": MODEL, "prompt": "large " * (11 * _MEBI // 6)}).encode()
    for _ in range(_ASKED):  # flow control windows grow meanwhile, at another place each time
        async with bench.another_connection() as proxy:
            _routed_or(await proxy.ask(Asking(mode, body=body)), {413})


def _routed_or(answer: Answer, statuses: set[int]) -> None:
    if answer.refusal is None:
        answer.routed()
    elif answer.refusal.status not in statuses:
        raise Failed(f"refused with {answer.refusal.status}")


@case("errors.shape", SHOULD, "A refusal has a body that says why, and its length is not left to chance.")
async def shape(bench: Bench, mode: Mode) -> None:
    refusal = (await bench.ask(mode, body=b"no healthy upstream")).refused()
    if not refusal.body.strip():
        raise Failed("the body is empty")
    if "transfer-encoding" in refusal.headers:
        raise Failed("it sets transfer-encoding")


@case(
    "errors.reason", SHOULD, f"A 503 for want of endpoints says rejected-no-endpoints in {_REASON}.", gie15="no reason"
)
async def reason(bench: Bench, mode: Mode) -> None:
    refusal = (await bench.ask(mode, hint=[])).refused()
    seen = refusal.headers.get(_REASON)
    bench.judge(seen, spec="rejected-no-endpoints", gie15=None, what="the reason")


_NOT_JSON: Final = (b"no healthy upstream", b"", b"null", b"\x00\xff" * 100, b'{"model": "m"', b"[" * 5_000)


@case(
    "errors.no-grpc-status",
    MUST,
    "Whatever a client sends, the stream does not end with a gRPC error.",
    modes=WITH_BODY,
)
async def no_grpc_status(bench: Bench, mode: Mode) -> None:
    for body in _NOT_JSON:
        answer = await bench.ask(mode, body=body)
        if answer.refusal is not None and not 400 <= answer.refusal.status < 500:
            raise Failed(f"{body[:20]!r} is answered {answer.refusal.status}")
        await answer.stream.end()


@case("errors.goes-on", MUST, "After bad requests the next one on the connection is routed.")
async def goes_on(bench: Bench, mode: Mode) -> None:
    for body in _NOT_JSON[:3]:
        await bench.ask(mode, body=body)
        (await bench.ask(mode)).routed()
