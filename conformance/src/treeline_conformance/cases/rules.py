"""Cases on P11, objectives, rewrites and load: the objects and headers of the extension."""

from __future__ import annotations

import json
from typing import Any, Final

from treeline_bench.api_server import OBJECTIVES, REWRITES

from treeline_conformance.bench import POOL, SETTLE_S, Bench
from treeline_conformance.case import ALL_MODES, case
from treeline_conformance.cases.bodies import as_json
from treeline_conformance.cases.streams import answered
from treeline_conformance.messages import Mode
from treeline_conformance.pods import MODEL, TARGET
from treeline_conformance.proxy import Answer
from treeline_conformance.verdict import Failed, Level, Need

MUST, SHOULD, MAY = Level.MUST, Level.SHOULD, Level.MAY
_OBJECTIVE: Final = "x-gateway-inference-objective"
_REWRITE: Final = "x-gateway-model-name-rewrite"
_POOL_REF: Final = {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": POOL}
_BEGINNINGS: Final = 3
_OVERLOAD: Final[dict[str, Any]] = {"waiting": 100_000, "kv_usage": 0.99, "running": 256}


def _body(model: str) -> bytes:
    return json.dumps({"model": model, "prompt": "What is the capital of France?", "max_tokens": 8}).encode()


@case(
    "P11.sheddable",
    MUST,
    "A request of negative priority is answered 429 while all pods are saturated, others are not.",
    modes=ALL_MODES[:2],
    needs=[Need.KUBERNETES],
)
async def sheddable(bench: Bench, mode: Mode) -> None:
    bench.api.put(OBJECTIVES, "sheddable", spec={"priority": -1, "poolRef": _POOL_REF})
    bench.api.put(OBJECTIVES, "important", spec={"priority": 4, "poolRef": _POOL_REF})
    try:
        async with bench.loaded(*bench.pods, **_OVERLOAD):

            async def shed() -> bool:
                return await bench.chosen(mode=mode, headers={_OBJECTIVE: "sheddable"}) == "429"

            await bench.until(shed, "the request is answered 429", SETTLE_S)
            for name in ("important", "unheard-of"):
                if (seen := await bench.chosen(mode=mode, headers={_OBJECTIVE: name})) not in bench.endpoints:
                    raise Failed(f"the objective {name} is answered {seen}")

        async def taken() -> bool:
            return await bench.chosen(mode=mode, headers={_OBJECTIVE: "sheddable"}) in bench.endpoints

        await bench.until(taken, "without load it is routed", SETTLE_S)
    finally:
        for name in ("sheddable", "important"):
            bench.api.delete(OBJECTIVES, name)


@case("rules.unknown-objective", MUST, "An objective that there is not counts as none.", modes=ALL_MODES)
async def unknown_objective(bench: Bench, mode: Mode) -> None:
    (await bench.ask(mode, headers={_OBJECTIVE: "unheard-of"})).routed()


@case("rules.rewrite-header", SHOULD, f"{_REWRITE} names the model that the pod is asked for.")
async def rewrite_header(bench: Bench, mode: Mode) -> None:
    answer = await bench.ask(mode, body=_body(MODEL), headers={_REWRITE: TARGET})
    _asked_for(answer, TARGET)


@case(
    "rules.rewrite-object",
    SHOULD,
    "An InferenceModelRewrite names the model that the pod is asked for.",
    needs=[Need.KUBERNETES],
)
async def rewrite_object(bench: Bench, mode: Mode) -> None:
    match = {"model": {"type": "Exact", "value": "public-name"}}
    rule = {"matches": [match], "targets": [{"modelRewrite": TARGET, "weight": 1}]}
    bench.api.put(REWRITES, "rewrite", spec={"poolRef": _POOL_REF, "rules": [rule]})
    try:

        async def rewritten() -> bool:
            answer = await bench.ask(mode, body=_body("public-name"))
            return answer.refusal is None and _model_in(answer) == TARGET

        await bench.until(rewritten, "the model is rewritten", SETTLE_S / 2)
    finally:
        bench.api.delete(REWRITES, "rewrite")


@case(
    "rules.rewrite-splices",
    SHOULD,
    "A rewrite changes the model's name and nothing else.",
    gie15="the body is written anew",
)
async def rewrite_splices(bench: Bench, mode: Mode) -> None:
    head, tail = b'{ "prompt":"%s",\n "model" : ' % MODEL.encode(), b', "b":1.0, "a":12345678901234567890 }'
    answer = await bench.ask(mode, body=head + b'"%s"' % MODEL.encode() + tail, headers={_REWRITE: TARGET})
    _asked_for(answer, TARGET)
    exact = answer.upstream_body == head + b'"%s"' % TARGET.encode() + tail
    seen = "spliced" if exact else "written anew"
    bench.judge(seen, spec="spliced", gie15="written anew", what="the body")
    told = answer.reading.set_headers.get("content-length")
    if told != str(len(answer.upstream_body)):
        raise Failed(f"content-length {told}, {len(answer.upstream_body)} bytes")


def _asked_for(answer: Answer, model: str) -> None:
    answer.routed()
    if (seen := _model_in(answer)) != model:
        raise Failed(f"the pod is asked for {seen!r} instead of {model!r}")


def _model_in(answer: Answer) -> Any:
    found = as_json(answer.upstream_body)
    return found.get("model") if isinstance(found, dict) else None


@case("rules.load", SHOULD, "A pod that is idle is chosen before those with long queues.")
async def load(bench: Bench, mode: Mode) -> None:
    idle, *busy = bench.pods[1], bench.pods[0], bench.pods[2]
    async with bench.loaded(*busy, waiting=200, kv_usage=0.9, running=100):

        async def avoids() -> bool:
            return {await bench.chosen(mode=mode, body=_distinct(at)) for at in range(6)} == {idle.endpoint}

        await bench.until(avoids, f"{idle.endpoint} is chosen six times in a row", SETTLE_S / 2)


def _distinct(at: int) -> bytes:
    """Return a prompt that shares no prefix with others, so that only load can count."""
    return json.dumps({"model": MODEL, "prompt": f"{at} sheep and no more"}).encode()


@case("rules.prefix", SHOULD, "A prompt goes where the one went with which it shares a long beginning.")
async def prefix(bench: Bench, mode: Mode) -> None:
    """Ask for three beginnings of 14 KB; by chance all others follow the first once in 20,000 runs."""
    went: dict[int, str] = {}
    for turn in range(4):
        for place in range(_BEGINNINGS):
            number = (place + turn) % _BEGINNINGS  # in changing order, so that a round robin over pods does not pass
            text = f"{number} of {_BEGINNINGS} beginnings. " * 700 + f"And then, in turn {turn}?"
            body = json.dumps({"model": MODEL, "prompt": text, "max_tokens": 8}).encode()
            answer = await bench.ask(mode, body=body)
            where = answer.routed()
            await answered(answer)
            if where != went.setdefault(number, where):
                raise Failed(f"{where} after {went[number]}, which has 14 KB of this prompt")


@case(
    "rules.test-selection", MAY, "test-epp-endpoint-selection chooses the endpoint (for conformance tests of Gateways)."
)
async def test_selection(bench: Bench, mode: Mode) -> None:
    for pod in bench.pods:
        seen = (await bench.ask(mode, headers={"test-epp-endpoint-selection": pod.ip})).routed()
        if seen != pod.endpoint:
            raise Failed(f"{seen} instead of {pod.endpoint}")
