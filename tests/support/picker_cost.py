"""What a request costs the picker above its transport, in CPU time: messages in as bytes, answers out as bytes.

    PYTHONPATH=tests python -m support.picker_cost

prints requests per CPU-second of `ExtProcSession.answers`, a table of its parts (each without those in it), and chunks
of response bodies per CPU-second. Bodies are chats of 1 KB, sent as our Envoy does (buffered) and over and over: the
prompts are known to the index by prediction. Bias: one process that does nothing else, so caches are warm.
"""

from __future__ import annotations

import functools
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from treeline_epp import metrics
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.extproc import convert, session, state
from treeline_epp.extproc.session import ExtProcSession, SessionLimits
from treeline_epp.metrics import Metrics
from treeline_epp.picking import picker as picking
from treeline_epp.picking.picker import Picker
from treeline_epp.requests import parse
from treeline_epp.requests import router as routing
from treeline_epp.requests.model_registry import ModelRegistry
from treeline_epp.requests.router import Router
from treeline_wire import headers as names
from treeline_wire.tokenizer import TokenizerBundle

BUFFERED, STREAMED, DUPLEX = 2, 1, 4
LIMITS = SessionLimits(1 << 26)

PARTS: list[tuple[str, Any, str]] = [
    ("read messages", convert.Reader, "read"),
    ("state machine", state.ExtProcState, "receive"),
    ("JSON", parse, "_read"),
    ("prompt and key", parse, "chat"),
    ("parse, the rest", routing, "parse"),
    ("match", picking.Picker, "_match"),
    ("filter", picking, "rows_left"),
    ("score", picking, "score"),
    ("pick, the rest", picking.Picker, "pick"),
    ("reserve and predict", picking.Picker, "reserve"),
    ("metrics: counters", metrics.Count, "inc"),
    ("metrics: histograms", metrics.Histogram, "observe"),
    ("route, the rest", routing.Router, "route"),
    ("response", routing.Router, "response"),
    ("release", routing.Router, "release"),
    ("write answers", session, "to_response"),
]
"""Names of parts, and the functions that do them."""


def new_router(endpoints: int = 2) -> Router:
    """A router over so many endpoints of the tiny model."""
    registry, picker = ModelRegistry(), Picker()
    fingerprint = registry.add_keyer(TokenizerBundle.from_dir(Path("models/tiny"))).fingerprint
    for index in range(endpoints):
        registry.set_endpoint(f"e{index}", "default", ("tiny",), fingerprint)
        picker.add_endpoint(EndpointSpec(f"e{index}", f"10.0.0.{index + 1}:8000", models=("tiny",)))
    return Router(picker, registry, Metrics())


def chat_body(rng: random.Random, size: int = 1000) -> bytes:
    """A chat of about `size` bytes; two thirds of its text are the system prompt."""
    text = " ".join(rng.choices(["alpha", "beta", "gamma", "delta", "epsilon", "zeta"], k=size // 3))[: size - 150]
    cut = len(text) * 2 // 3
    messages = [{"role": "system", "content": text[:cut]}, {"role": "user", "content": text[cut:]}]
    return json.dumps({"model": "tiny", "max_tokens": 1, "messages": messages}).encode()


def messages_of(body: bytes, request_id: str) -> list[bytes]:
    """The three messages of a request through our Envoy: headers, the body, the response's headers."""
    head, answer = pb.ProcessingRequest(), pb.ProcessingRequest()
    head.protocol_config.request_body_mode = BUFFERED
    fields = {
        ":authority": "127.0.0.1:8080",
        ":path": "/v1/chat/completions",
        ":method": "POST",
        ":scheme": "http",
        "content-type": "application/json",
        "accept": "application/json",
        "user-agent": "OpenAI/Python 1.109.1",
        "authorization": "Bearer sk-0123456789",
        "x-stainless-lang": "python",
        "x-stainless-os": "Linux",
        "accept-encoding": "gzip, deflate",
        "x-forwarded-for": "10.1.2.3",
        "x-forwarded-proto": "http",
        "x-envoy-internal": "true",
        names.EDGE: "1",
        names.REQUEST_ID: request_id,
        "content-length": str(len(body)),
    }
    for key, value in fields.items():
        head.request_headers.headers.headers.add(key=key, raw_value=value.encode())
    answered = {":status": "200", "content-type": "application/json", "content-length": "300", "date": "today"}
    told = {names.CACHED_TOKENS: "10", names.PROMPT_TOKENS: "300", "x-envoy-upstream-service-time": "3"}
    for key, value in {**answered, **told}.items():
        answer.response_headers.headers.headers.add(key=key, raw_value=value.encode())
    served = answer.metadata_context.filter_metadata[names.LB].fields[names.SERVED]
    served.string_value = "10.0.0.1:8000"
    whole = pb.ProcessingRequest(request_body=pb.HttpBody(body=body, end_of_stream=True))
    return [message.SerializeToString() for message in (head, whole, answer)]


def serve(router: Router, streams: Sequence[list[bytes]]) -> list[bytes]:
    """Each stream from its first message to its end; the last stream's answers."""
    answers: list[bytes] = []
    for messages in streams:
        stream = ExtProcSession(router, LIMITS)
        answers = [reply for data in messages for reply in stream.answers(data) if reply is not None]
        stream.close()
    return answers


def chunks_per_cpu_second(router: Router, mode: int, count: int) -> float:
    """Chunks of a response body, each answered."""
    head = pb.ProcessingRequest()
    head.protocol_config.response_body_mode = mode
    head.response_headers.headers.headers.add(key=":status", raw_value=b"200")
    chunk = b'data: {"id":"x","choices":[{"delta":{"content":"hello"}}]}\n\n'
    data = pb.ProcessingRequest(response_body=pb.HttpBody(body=chunk)).SerializeToString()
    stream = ExtProcSession(router, LIMITS)
    answers = list(stream.answers(head.SerializeToString()))
    began = time.thread_time()
    for _ in range(count):
        answers = list(stream.answers(data))
    took = time.thread_time() - began
    stream.close()
    assert len(answers) == 1, "each is answered"
    return count / took


@contextmanager
def timed_parts() -> Iterator[Counter[str]]:
    """CPU-nanoseconds by part while it is entered, without what other parts took inside, nor the clock itself."""
    spent: Counter[str] = Counter()
    inner = [0]
    clock = time.thread_time_ns
    within, around = 0, 0  # what timing a call costs, inside what is timed and outside of it

    def timing(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            inner.append(0)
            start = clock()
            try:
                return function(*args, **kwargs)
            finally:
                took = clock() - start
                spent[part] += took - within - inner.pop()
                inner[-1] += took + around

        return timed

    count = 20_000
    nothing = timing("", int)
    began = clock()
    for _ in range(count):
        nothing()
    whole, within = (clock() - began) // count, spent.pop("") // count
    around = whole - within
    kept = [(owner, name, getattr(owner, name)) for _, owner, name in PARTS]
    try:
        for part, owner, name in PARTS:
            setattr(owner, name, timing(part, getattr(owner, name)))
        yield spent
    finally:
        for owner, name, function in kept:
            setattr(owner, name, function)


def report(count: int = 2000, rounds: int = 5) -> Iterator[str]:
    """All of it, a line at a time."""
    rng = random.Random(1)
    bodies = [chat_body(rng) for _ in range(256)]
    streams = [messages_of(bodies[index % len(bodies)], f"{index:032}") for index in range(count)]
    router = new_router()
    serve(router, streams)
    best = float("inf")
    for _ in range(rounds):
        began = time.thread_time()
        serve(router, streams)
        best = min(best, time.thread_time() - began)
    yield f"{count / best:10,.0f} requests per CPU-second: {best / count * 1e6:.1f} us each"
    for name, mode in (("streamed", STREAMED), ("full duplex", DUPLEX)):
        yield f"{chunks_per_cpu_second(router, mode, 20_000):10,.0f} chunks per CPU-second, {name}"
    with timed_parts() as spent:
        serve(router, streams)
    for part, _, _ in PARTS:
        yield f"{spent[part] / count / 1000:8.1f} us  {part}"


if __name__ == "__main__":
    for line in report():
        sys.stdout.write(line + "\n")
