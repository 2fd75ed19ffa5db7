"""Templates that take quadratic time in the messages do not block the picker, and chats still get a key."""

from __future__ import annotations

import gc
import json
from typing import Any

import pytest
from epp.io.test_large_bodies import BUFFERED, longest_turn
from support.cpu import reference_s
from support.epp_io import small_bundle
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.keyers.prompt_keyer import MAX_MESSAGES, BoundedRenderer, Bounds
from treeline_epp.metrics import Metrics
from treeline_epp.picking.picker import Picker
from treeline_epp.picking.request import Request
from treeline_epp.requests.body import RouteRequest
from treeline_epp.requests.model_registry import ModelRegistry
from treeline_epp.requests.parse import parse
from treeline_epp.requests.router import Router
from treeline_wire.chat import ChatTemplate
from treeline_wire.dialects import TREELINE
from treeline_wire.prompt import prompt_of_chat
from treeline_wire.tokenizer import TokenizerBundle

QUADRATIC = (
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% set ns = namespace(name='?') %}{% for other in messages %}{% for call in other.tool_calls or [] %}"
    "{% if call.id == m.tool_call_id %}{% set ns.name = call.function.name %}{% endif %}{% endfor %}{% endfor %}"
    "result of {{ ns.name }}: {{ m.content }};{% else %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}!{{ call.function.name }}{% endfor %};{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Each result is looked up among the calls of all messages."""
AHEAD = (
    "{% for m in messages %}{% if m.role != 'tool' %}{{ m.role }}: {{ m.content }}"
    "{% set ns = namespace(open=true) %}{% for k in range(loop.index0 + 1, messages | length) %}"
    "{% if messages[k].role != 'tool' %}{% set ns.open = false %}{% elif ns.open %}<{{ messages[k].content }}>"
    "{% endif %}"
    "{% endfor %};{% endif %}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Each message searches all following ones for its results."""


def body(rounds: int, questions: int = 1) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for i in range(rounds):
        if i % max(1, rounds // questions) == 0:
            messages.append({"role": "user", "content": f"question {i}"})
        call = {"id": f"c{i}", "type": "function", "function": {"name": f"f{i}", "arguments": "{}"}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{i}", "content": f"answer {i}"})
    return {"model": "tiny", "messages": messages}


def registry(source: str) -> ModelRegistry:
    made = ModelRegistry()
    bundle = TokenizerBundle.build(small_bundle().tokenizer_json, chat_template=source)
    made.set_endpoint("a", "default", ("tiny",), made.add_keyer(bundle).fingerprint)
    return made


def key_of(body: dict[str, Any], served: ModelRegistry) -> bytes | None:
    request = RouteRequest({":path": "/v1/chat/completions", ":method": "POST"}, json.dumps(body).encode(), None)
    found = parse(request, served)
    assert isinstance(found, Request)
    return found.key


def whole(body: dict[str, Any], source: str) -> bytes:
    patient = ChatTemplate(source, special_tokens={}, inline_seconds=60)
    return (prompt_of_chat(body, patient).text or "").encode()


@pytest.mark.parametrize("source", [QUADRATIC, AHEAD], ids=["looks up", "looks ahead"])
def test_a_quadratic_template_holds_the_loop_for_milliseconds_and_gives_a_key(source: str) -> None:
    served = registry(source)
    picker = Picker()
    picker.add_endpoint(EndpointSpec("a", "10.0.0.1:8000", models=("tiny",)))
    router = Router(picker, served, Metrics())
    asked = body(400)
    data = json.dumps(asked).encode()
    gc.collect()
    # What a processor that is shared adds is not ours: the third of the turns counts.
    turns = sorted(longest_turn(router, "/v1/chat/completions", data, BUFFERED)[0] for _ in range(6))
    assert turns[2] < 10 * reference_s(), turns
    key, full = key_of(asked, served), whole(asked, source)
    assert key  # how long it is depends on how fast this machine renders
    assert full.startswith(key)


@pytest.mark.parametrize("source", [QUADRATIC, AHEAD], ids=["looks up", "looks ahead"])
def test_keys_of_truncated_chats_are_beginnings_of_the_whole_key(source: str) -> None:
    served = registry(source)
    keyer = served.keyer_of("default")
    assert keyer is not None
    assert isinstance(keyer.renderer, BoundedRenderer)
    asked = body(10, questions=3)
    full = whole(asked, source)
    for most in range(1, 24):
        keyer.renderer.bounds.keep(asked["messages"], most)
        key = key_of(asked, served)
        assert key is not None
        assert full.startswith(key)
        if most < 23:
            keyer.renderer.bounds.keep(asked["messages"], most + 1)
            assert len(key_of(asked, served) or b"") >= len(key)


def test_reasoning_before_the_last_question_is_in_no_key() -> None:
    source = (
        "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{{ m.role }}:"
        "{% if m.reasoning_content and loop.index0 > ns.last %}({{ m.reasoning_content }}){% endif %}{{ m.content }};"
        "{% endfor %}"
    )
    served = registry(source)
    keyer = served.keyer_of("default")
    assert keyer is not None
    assert isinstance(keyer.renderer, BoundedRenderer)
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "reasoning_content": "hm"}]
    asked = {"model": "tiny", "messages": [*turns * 4, {"role": "user", "content": "r"}]}
    full = whole(asked, source)
    for most in range(1, 10):
        keyer.renderer.bounds.keep(asked["messages"], most)
        assert full.startswith(key_of(asked, served) or b"?"), most


ENDLESS = "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}"


def test_how_many_messages_fit_is_learnt_and_forgotten() -> None:
    renderer = BoundedRenderer(ChatTemplate(ENDLESS, special_tokens={}, inline_seconds=0.001))
    long = body(400)["messages"]
    seen = []
    for _ in range(5):
        assert renderer.whole({"messages": long}, TREELINE) is None
        seen.append(renderer.most(long))
    assert seen == [MAX_MESSAGES // 4, 16, 16, 16, 16]
    renderer.bounds.keep(long, MAX_MESSAGES)
    assert renderer.whole({"messages": long[:11]}, TREELINE) is None
    assert renderer.most(long) == MAX_MESSAGES, "eleven messages are not too many"

    now = 0.0
    easy = BoundedRenderer(ChatTemplate("{{ messages | length }}", special_tokens={}, inline_seconds=10), lambda: now)
    chat = [{"role": "user", "content": "x"}] * 2 * MAX_MESSAGES
    easy.bounds.keep(chat, 8)
    assert easy.whole({"messages": chat[:2]}, TREELINE) is not None
    assert easy.most(chat) == 8, "two messages say nothing of nine"
    seen = []
    for _ in range(10):
        assert easy.whole({"messages": chat[: easy.most(chat)]}, TREELINE) is not None
        seen.append(easy.most(chat))
    assert seen == [12, 18, 27, 40, 60, 90, 135, 202, MAX_MESSAGES, MAX_MESSAGES]


def test_slow_chats_of_one_client_do_not_shorten_anothers_keys() -> None:
    served = registry(
        "{% for m in messages %}{{ m.role }}: {{ m.content }};{% if m.content == 'slow' %}"
        "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}{% endif %}{% endfor %}"
    )
    chat = [{"role": "user" if i % 2 == 0 else "assistant", "content": f"turn {i}"} for i in range(41)]
    other = {"model": "tiny", "messages": chat}
    mine = key_of(other, served)
    assert mine is not None
    assert mine.count(b"turn") == 41
    for i in range(5):
        began = {"role": "user", "content": f"client {i}"}
        key_of({"model": "tiny", "messages": [began, *chat, {"role": "user", "content": "slow"}]}, served)
    keyer = served.keyer_of("default")
    assert keyer is not None
    assert isinstance(keyer.renderer, BoundedRenderer)
    assert keyer.renderer.most([began, *chat]) < 41, "of a chat that begins so it is known"
    assert key_of(other, served) == mine


def test_the_number_of_remembered_chats_is_bounded() -> None:
    bounds = Bounds()
    chats: list[list[Any]] = [[{"role": "user", "content": f"c{i}"}] for i in range(2000)]
    chats += [[{"content": [{"text": "t"}]}], [{"content": [1, {}]}], ["?"], []]
    for chat in chats:
        bounds.keep(chat, 16)
        assert bounds.of(chat) == 16
    assert sum(bounds.of(chat) < MAX_MESSAGES for chat in chats) <= 1025
    assert bounds.of(chats[0]) == MAX_MESSAGES


def test_slow_messages_leave_a_key_of_fewer_messages() -> None:
    source = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }};{% if loop.index > 4 %}"
        "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}{% endif %}{% endfor %}"
    )
    asked = {"model": "tiny", "messages": [{"role": "user", "content": f"q{i}"} for i in range(9)]}
    assert key_of(asked, registry(source)) == b"user: q0;user: q1"


def test_a_slow_rendering_gets_no_larger_chats() -> None:
    ticks = iter(range(100))
    renderer = BoundedRenderer(ChatTemplate("{{ messages | length }}", special_tokens={}), lambda: next(ticks) * 0.002)
    long = body(400)
    renderer.bounds.keep(long["messages"], 8)
    assert renderer.whole(long, TREELINE) is not None
    assert renderer.most(long["messages"]) == 8
