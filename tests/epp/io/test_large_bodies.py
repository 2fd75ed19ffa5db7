"""Large and hostile request bodies: other requests run meanwhile, and the result is that of the whole body."""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.cpu import reference_s
from support.proxy import head
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.extproc.session import ExtProcSession, SessionLimits
from treeline_epp.keyers.prompt_keyer import MAX_MESSAGES
from treeline_epp.metrics import Metrics
from treeline_epp.picking.picker import Picker
from treeline_epp.picking.request import Request
from treeline_epp.requests import outline
from treeline_epp.requests.body import CHUNK_BYTES, Body, BodyBudget, RouteRequest
from treeline_epp.requests.model_registry import ModelRegistry
from treeline_epp.requests.outline import MAX_MEMBERS, Outline
from treeline_epp.requests.parse import is_large, parse
from treeline_epp.requests.router import Router
from treeline_runtime.templates.pool import TemplatePool
from treeline_wire import envoy_pb2 as pb
from treeline_wire.chat import ChatTemplate
from treeline_wire.json_values import MAX_SLOW, outside_strings, slow_numbers
from treeline_wire.models import ModelRule, PoolClaim
from treeline_wire.prompt import prompt_of_chat
from treeline_wire.tokenizer import TokenizerBundle

BUFFERED, DUPLEX = 2, 4
TURN = 15
"""The most that one turn of the loop may take, in units of `reference_s`."""
"""No request may hold the event loop for longer."""
MB = 1 << 20
TINY = TokenizerBundle.from_dir(Path("models/tiny"))
CATALOG = ModelRegistry()
CATALOG.set_endpoint("a", "default", ("tiny",), CATALOG.add_keyer(TINY).fingerprint)


def new_router() -> Router:
    picker = Picker()
    picker.add_endpoint(EndpointSpec("a", "10.0.0.1:8000", models=("tiny",)))
    return Router(picker, CATALOG, Metrics())


def messages_of(path: str, body: bytes, mode: int, piece: int = 48_000) -> Iterator[bytes]:
    """Yield a proxy's messages for a request."""
    yield head({":path": path, ":method": "POST"}, mode).SerializeToString()
    size = len(body) if mode == BUFFERED else piece
    for start in range(0, len(body), size):
        part = pb.HttpBody(body=body[start : start + size], end_of_stream=start + size >= len(body))
        yield pb.ProcessingRequest(request_body=part).SerializeToString()


def longest_turn(router: Router, path: str, body: bytes, mode: int) -> tuple[float, list[pb.ProcessingResponse]]:
    """Return the longest processor time, in seconds, between two turns of other tasks, and all replies."""
    stream = ExtProcSession(router, SessionLimits(64 * MB))
    replies: list[bytes] = []
    longest = 0.0
    try:
        for message in messages_of(path, body, mode):
            began = time.thread_time()
            steps = stream.answers(message)
            while True:
                reply = next(steps, b"end")
                longest = max(longest, time.thread_time() - began)
                if reply == b"end":
                    break
                if reply is not None:
                    replies.append(reply)
                began = time.thread_time()
    finally:
        stream.close()
    return longest, [pb.ProcessingResponse.FromString(reply) for reply in replies]


def chat(content: Any, **more: Any) -> bytes:
    return json.dumps(
        {"messages": [{"role": "user", "content": content}], "model": "tiny", **more}, ensure_ascii=False
    ).encode()


def wide(count: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "x"}] * count


def calling(arguments: str) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}


SLOW_MEMBERS = ("metadata", "messages", "prompt", "tools", "max_tokens")


def slow(member: str, size: int) -> bytes:
    """Return a body with a list of numbers that take a thousand times as long as others."""
    many = b"[" + b"9.092e300," * (size // 10) + b"1]"
    return b'{"%s":%s,"model":"tiny"}' % (member.encode(), many)


HOSTILE: dict[str, Callable[[], bytes]] = {
    "24 MB of text": lambda: chat("hello world " * (2 * MB)),
    "24 MB of escapes": lambda: chat('"\\' * (6 * MB)),
    "24 MB of quotes": lambda: b'{"messages":[' + b'"",' * (8 * MB) + b'""],"model":"tiny"}',
    "24 MB of brackets": lambda: b'{"messages":[' + b"[]," * (8 * MB) + b'[]],"model":"tiny"}',
    "24 MB of opening brackets": lambda: b'{"messages":' + b"[" * (24 * MB),
    "24 MB of members": lambda: b"{" + b'"a":1,' * (4 * MB) + b'"model":"tiny"}',
    "24 MB of messages": lambda: chat("x", messages=wide(16_000)).replace(
        b'"messages": [', b'"messages": [' + b'{"role":"user","content":"x"},' * (24 * MB // 30), 1
    ),
    "24 MB of token ids": lambda: b'{"prompt":[' + b"1," * (12 * MB) + b'1],"model":"tiny"}',
    "24 MB of blanks": lambda: b'{"messages":[{"role":"user","content":"x"}]' + b" " * (24 * MB) + b',"model":"tiny"}',
    "24 MB of special tokens": lambda: chat("<|im_end|>" * (24 * MB // 10)),
    "8 MB of combining marks": lambda: chat("a" + "\u0300\u0316" * (2 * MB)),
    "240 KB of combining marks": lambda: chat("a" + "\u0300\u0316" * 60_000),
    "240 KB of marks, 30 in a row": lambda: chat(("a" + "\u0300\u0316" * 15) * 4_000),
    "240 KB of CJK": lambda: chat("漢字仮名" * 20_000),
    "240 KB of unknown characters": lambda: chat("\u0378\U0001fbfa" * 40_000),
    "240 KB of special tokens": lambda: chat("<|im_end|>" * 24_000),
    "240 KB of messages": lambda: chat("x", messages=wide(7_000)),
    "240 KB of brackets": lambda: b'{"messages":[' + b"[]," * 80_000 + b'[]],"model":"tiny"}',
    "240 KB of members": lambda: chat("x", **{f"k{i}": i for i in range(18_000)}),
    "240 KB of tools": lambda: chat("x", tools=[{"type": "function", "function": {"name": "x"}}] * 4_500),
    "4,000 values in tools": lambda: chat("x", tools=[{"a": [1] * 15}] * 250),
    "190 KB of arguments": lambda: chat("x", messages=[calling('{"a": [' + "[]," * 64_000 + "[]]}")]),
    "190 KB of arguments of many calls": lambda: chat("x", messages=[calling('{"a": [' + "[]," * 270 + "[]]}")] * 200),
    **{f"190 KB of slow numbers in {member}": partial(slow, member, 190_000) for member in SLOW_MEMBERS},
    **{f"30 KB of slow numbers in {member}": partial(slow, member, 30_000) for member in SLOW_MEMBERS},
    "slow numbers in calls": lambda: chat("x", messages=[calling("[" + "9e300," * 14 + "9e300]")] * 1000),
    "12 KB of prompts": lambda: json.dumps({"model": "tiny", "prompt": ["x"] * 4_000}).encode(),
    "5.4 KB of nested kwargs": lambda: chat("x", chat_template_kwargs={"a": 0}).replace(
        b'"a": 0', b'"a": ' + b"[" * 2_700 + b"]" * 2_700
    ),
    "nested kwargs that decode": lambda: chat("x", chat_template_kwargs={"a": 0}).replace(
        b'"a": 0', b'"a": ' + b"[" * 400 + b"]" * 400
    ),
}


@pytest.mark.parametrize("shape", [shape for shape in HOSTILE if "slow numbers" in shape])
def test_a_few_slow_numbers_are_read(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def decode(data: bytes | str, **how: Any) -> Any:
        read.append(slow_numbers(outside_strings(data.encode() if isinstance(data, str) else data)))
        return msgspec.json.decode(data, **how)

    for module in (outline, sys.modules[parse.__module__]):
        monkeypatch.setattr(module, "_decode", decode)
    body = HOSTILE[shape]()
    path = "/v1/completions" if b'"prompt"' in body[:20] else "/v1/chat/completions"
    longest_turn(new_router(), path, body, BUFFERED)
    assert read
    assert max(read) <= MAX_SLOW


@pytest.mark.parametrize("mode", [pytest.param(BUFFERED, marks=pytest.mark.deep), DUPLEX], ids=["buffered", "duplex"])
@pytest.mark.parametrize("shape", HOSTILE)
def test_no_body_holds_the_loop_for_longer_than_a_turn(shape: str, mode: int) -> None:
    router, body = new_router(), HOSTILE[shape]()
    path = "/v1/completions" if b'"prompt"' in body[:20] else "/v1/chat/completions"
    turns, most_s = [], TURN * reference_s()
    for _ in range(4):  # a processor that is shared makes some of them longer
        gc.collect()
        turn, replies = longest_turn(router, path, body, mode)
        turns.append(turn)
        if turn < most_s:
            break
    assert min(turns) < most_s, turns
    assert replies, "an answer, whichever"
    last = replies[-1]
    if last.WhichOneof("response") == "immediate_response":
        assert last.immediate_response.status.code == 400
    assert router.metrics.registry.get_sample_value("treeline_epp_internal_errors_total") == 0


def parsed(body: bytes, path: str = "/v1/chat/completions", pieces: int = CHUNK_BYTES) -> Any:
    whole = Body([body[start : start + pieces] for start in range(0, len(body), pieces)])
    outline = Outline()
    for piece in whole.pieces():
        outline.feed(piece)
    outline.finish(whole)
    headers = {":path": path, ":method": "POST"}
    return parse(RouteRequest(headers, whole, None), CATALOG, outline=outline)


def key_of(body: bytes, path: str = "/v1/chat/completions") -> bytes:
    found = parsed(body, path)
    assert isinstance(found, Request), found
    assert found.key is not None
    return found.key


def whole_key(body: bytes, path: str = "/v1/chat/completions") -> bytes:
    found = parse(RouteRequest({":path": path, ":method": "POST"}, body, None), CATALOG)
    assert isinstance(found, Request), found
    assert found.key is not None
    return found.key


WORDS = 'The quick brown fox said "no" to the lazy dog \\ and went home.\n'


@pytest.mark.parametrize(
    "body",
    [
        chat(WORDS * 5_000),
        chat([{"type": "text", "text": WORDS * 5_000}, {"type": "text", "text": "end"}]),
        chat("x", messages=[{"role": "system", "content": WORDS}, {"role": "user", "content": WORDS * 5_000}]),
        chat("x", messages=[{"role": "user", "content": WORDS}, {"role": "assistant", "content": WORDS}] * 90),
        chat("x", messages=[{"role": "user", "content": "é漢" + WORDS}] * 4_000),
        chat(WORDS * 5_000, tools=[{"type": "function", "function": {"name": "f"}}], max_tokens=5),
    ],
    ids=["text", "parts", "system", "turns", "many", "tools"],
)
def test_the_key_of_a_large_chat_is_the_beginning_of_its_whole_key(body: bytes) -> None:
    key = key_of(body)
    members = msgspec.json.decode(body)
    keyer = CATALOG.keyer_of("default")
    assert keyer is not None
    with contextlib.closing(TemplatePool()) as pool:  # all of it is more than is rendered inline
        template = ChatTemplate.from_bundle(TINY, pool)
        assert template is not None
        prompt = prompt_of_chat(members, template)
    full = keyer.key(prompt)
    assert full is not None
    assert full.startswith(key)
    assert len(key) > min(len(full) * 0.9, 60_000) or len(members["messages"]) > MAX_MESSAGES
    assert len(key) > 10_000


def test_a_message_whose_role_comes_too_late_ends_the_key_before_it() -> None:
    first = {"role": "user", "content": WORDS * 300}
    body = chat("x", messages=[first, {"content": WORDS * 4_000, "role": "user"}])
    key = key_of(body)
    assert 18_000 < len(key) < 20_000
    assert whole_key(chat("x", messages=[first])).startswith(key)


@pytest.mark.parametrize("prompt", [WORDS * 8_000, [WORDS * 8_000, "b"], list(range(5, 900)) * 200])
def test_the_key_of_a_large_completion_is_the_beginning_of_its_whole_key(prompt: Any) -> None:
    body = json.dumps({"prompt": prompt, "model": "tiny", "max_tokens": 3}).encode()
    found = parsed(body, "/v1/completions")
    keyer = CATALOG.keyer_of("default")
    assert keyer is not None
    assert keyer.keys is not None
    keys = keyer.keys
    first = prompt if isinstance(prompt, str) else prompt[0]
    full = keys.prompt_key(first, True) if isinstance(first, str) else keys.block_key(prompt)
    assert full.startswith(found.key)
    assert len(found.key) > (40_000 if isinstance(first, int) else 100_000)
    assert found.max_output_tokens == 3
    estimate = found.prompt_tokens_estimate
    truth = len(prompt) if isinstance(first, int) else len(body) / keyer.bytes_per_token
    assert 0.8 * truth < estimate < 1.2 * truth
    assert found.key_tokens_estimate < estimate


def test_members_after_a_large_prompt_count() -> None:
    body = chat(WORDS * 20_000, max_tokens=7, cache_salt="s", lora_path="l")
    assert body.index(b'"model"') > MB
    found = parsed(body)
    assert (found.model, found.max_output_tokens) == ("tiny", 7)
    assert found.namespace == parsed(chat("x", cache_salt="s", lora_path="l")).namespace
    refused = parsed(chat(WORDS * 20_000, model="nobody"))
    assert (refused.status, refused.code) == (404, "model_not_found")


def test_many_messages_or_tools_of_a_small_body_are_bounded_too() -> None:
    many = chat("x", messages=wide(1_000))
    found = parse(RouteRequest({":path": "/v1/chat/completions"}, many, None), CATALOG)
    assert isinstance(found, Request)
    assert found.key_tokens_estimate is not None
    few = chat("x", messages=wide(200))
    assert whole_key(few).startswith(found.key[:1_000] if found.key else b"?")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"[1]" + b" " * 300_000, "must be a JSON object"),
        (b" " * 300_000, "not JSON"),
        (b'{"model":"tiny"' + b" " * 300_000, "not JSON"),
        (b'{"model":"tiny"}' + b" " * 300_000 + b"x", "not JSON"),
        (b'{"model":"tiny",}' + b" " * 300_000, "not JSON"),
        (b'{"model" "tiny"}' + b" " * 300_000, "not JSON"),
        (b'{"a":' + b"[" * 1_000 + b"]" * 1_000 + b"}" + b" " * 300_000, "levels deep"),
        (
            b"{" + b'"a":1,' * (MAX_MEMBERS + 1) + b'"b":2}' + b" " * 300_000,
            f"more than {MAX_MEMBERS} members",
        ),
        (b'{"model":tiny}' + b" " * 300_000, "not JSON"),
    ],
)
def test_a_large_body_that_is_no_request_is_a_400_that_says_why(body: bytes, says: str) -> None:
    refused = parsed(body)
    assert refused.status == 400
    assert says in refused.message


@pytest.mark.parametrize(
    "more",
    [
        {"chat_template_kwargs": "DEEP"},
        {"tools": ["DEEP"]},
        {"documents": ["DEEP"]},
        {"messages": [{"role": "user", "content": "x", "extra": "DEEP"}]},
    ],
)
@pytest.mark.parametrize("size", [0, MB])
def test_too_deep_nesting_for_a_template_is_a_400_at_the_picker(more: dict[str, Any], size: int) -> None:
    deep = '{"a":' * 100 + "1" + "}" * 100
    body = chat("x", user="u" * size, **more).replace(b'"DEEP"', deep.encode())
    if is_large(body) or size:
        refused = parsed(body)
    else:
        refused = parse(RouteRequest({":path": "/v1/chat/completions"}, body, None), CATALOG)
    assert (refused.status, refused.code) == (400, "invalid_request")
    assert "levels deep" in refused.message
    assert refused.param


@pytest.mark.parametrize("mode", [BUFFERED, DUPLEX], ids=["buffered", "duplex"])
def test_a_large_body_is_sent_on_as_it_came_or_with_another_model(mode: int) -> None:
    registry = ModelRegistry()
    registry.set_endpoint("a", "default", ("tiny",), None)
    picker = Picker()
    picker.add_endpoint(EndpointSpec("a", "10.0.0.1:8000", models=("tiny",)))
    rule = ModelRule("alias", "alias", "default", targets=(("tiny", 1),))
    registry.set_pools({"default": PoolClaim("here")}, [rule])
    for model in ("tiny", "alias"):
        data = chat(WORDS * 10_000, model=model)
        _, replies = longest_turn(Router(picker, registry, Metrics()), "/v1/chat/completions", data, mode)
        want = data.replace(b'"alias"', b'"tiny"')
        if mode == DUPLEX:
            chunks = [r.request_body.response.body_mutation.streamed_response for r in replies[1:]]
            assert b"".join(chunk.body for chunk in chunks) == want
            assert [chunk.end_of_stream for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        else:
            common = replies[-1].request_body.response
            assert common.body_mutation.body == (want if model == "alias" else b"")
            assert common.header_mutation.set_headers[0].header.raw_value == b"10.0.0.1:8000"


def test_waiting_bodies_are_bounded_and_small_ones_pass() -> None:
    router, waiting = new_router(), BodyBudget(MB)
    half = chat("y" * MB)[: MB // 2]

    def open_stream(data: bytes) -> tuple[ExtProcSession, list[bytes | None]]:
        stream, replies = ExtProcSession(router, SessionLimits(64 * MB, waiting=waiting)), []
        for message in messages_of("/v1/chat/completions", data, DUPLEX):
            request = pb.ProcessingRequest.FromString(message)
            if request.HasField("request_body") and data is half:
                request.request_body.end_of_stream = False
            replies += list(stream.answers(request.SerializeToString()))
        return stream, replies

    held = [open_stream(half)[0], open_stream(half)[0]]
    assert 0 < waiting.bytes <= waiting.limit
    third, replies = open_stream(half)
    refusal = pb.ProcessingResponse.FromString(replies[-1] or b"").immediate_response
    assert refusal.status.code == 503
    assert b"too_many_bodies" in refusal.body
    assert b"1048576 bytes" in refusal.body
    small, replies = open_stream(chat("hello"))
    assert pb.ProcessingResponse.FromString(replies[0] or b"").HasField("request_headers")
    for stream in (*held, third, small):
        stream.close()
    assert waiting.bytes == 0


def test_an_answered_body_is_freed() -> None:
    router, waiting = new_router(), BodyBudget(4 * MB)
    stream = ExtProcSession(router, SessionLimits(64 * MB, waiting=waiting))
    for message in messages_of("/v1/chat/completions", chat("y" * MB), BUFFERED):
        list(stream.answers(message))
    assert waiting.bytes == 0
    stream.close()
