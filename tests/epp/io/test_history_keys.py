"""Keys without a tokenizer: a conversation's key begins with that of the turn before."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.index.matching import GUARD_BYTES
from treeline_epp.keyers.history import HistoryKeyer
from treeline_epp.picking.decision import Outcome
from treeline_epp.picking.picker import Picker
from treeline_epp.picking.request import Request
from treeline_epp.requests.body import Body, RouteRequest
from treeline_epp.requests.model_registry import ModelRegistry
from treeline_epp.requests.outline import Outline
from treeline_epp.requests.parse import parse
from treeline_wire.dialects import TREELINE
from treeline_wire.keys import escape
from treeline_wire.prompt import TooDeep

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
parts = st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=20)}) | json_values
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool"])},
    optional={
        "content": st.text(max_size=40) | st.lists(parts, max_size=3) | st.none(),
        "name": st.text(max_size=5),
        "tool_calls": json_values,
        "reasoning_content": st.text(max_size=5),
    },
)
bodies = st.fixed_dictionaries({}, optional={"tools": json_values, "documents": json_values})


def served(pool: str = "p") -> ModelRegistry:
    made = ModelRegistry()
    made.set_endpoint("a", pool, ("m",), None)
    return made


def key_of(body: dict[str, Any], registry: ModelRegistry, path: str = "/v1/chat/completions") -> Request:
    headers = {":path": path, ":method": "POST"}
    parsed = parse(RouteRequest(headers, json.dumps({"model": "m", **body}).encode(), None), registry)
    assert isinstance(parsed, Request), parsed
    return parsed


@settings(max_examples=300, deadline=None)
@given(turns=st.lists(st.lists(messages, min_size=1, max_size=3), min_size=2, max_size=4), body=bodies)
def test_each_turn_extends_the_one_before(turns: list[list[dict[str, Any]]], body: dict[str, Any]) -> None:
    keyer, chat, before = HistoryKeyer(), list[dict[str, Any]](), b""
    for turn in turns:
        chat = [*chat, *turn]
        prompt = keyer.renderer.whole({**body, "messages": chat}, TREELINE)
        if prompt is None:
            return  # numbers that do not fit into 64 bits
        key = keyer.key(prompt)
        assert key.startswith(before)
        assert key == keyer.key(keyer.renderer.whole({"messages": chat, **body}, TREELINE) or prompt), (
            "whatever the order of members"
        )
        before = key


plain_chats = st.lists(
    st.tuples(st.sampled_from(["user", "system"]), st.text("ab\n|<é", max_size=6)), min_size=1, max_size=3
)


@settings(max_examples=200, deadline=None)
@given(first=plain_chats, second=plain_chats)
def test_other_roles_or_texts_have_another_key(first: list[tuple[str, str]], second: list[tuple[str, str]]) -> None:
    keyer = HistoryKeyer()

    def rendered(chat: list[tuple[str, str]]) -> object:
        return keyer.renderer.whole({"messages": [{"role": role, "content": text} for role, text in chat]}, TREELINE)

    assert (rendered(first) == rendered(second)) == (first == second)


def test_reasoning_does_not_change_a_key_but_tools_and_names_do() -> None:
    registry = served()
    hello = {"role": "user", "content": "hello"}
    plain = key_of({"messages": [hello]}, registry).key
    assert key_of({"messages": [{**hello, "reasoning_content": "hm"}]}, registry).key == plain
    for other in (
        {"messages": [hello], "tools": [{"type": "function"}]},
        {"messages": [{**hello, "name": "bob"}]},
        {"messages": [{**hello, "role": "system"}]},
    ):
        assert key_of(other, registry).key not in (None, plain)
    unused = {"messages": [hello], "tools": [{"type": "function"}], "tool_choice": "none"}
    assert key_of(unused, registry).key == plain
    as_parts = {"messages": [{**hello, "content": [{"type": "text", "text": "hello"}]}]}
    assert key_of(as_parts, registry).key == plain


@pytest.mark.parametrize(
    ("path", "body", "key"),
    [
        ("/v1/completions", {"prompt": "abc"}, b"abc"),
        ("/v1/completions", {"prompt": [[1, 2], [3]]}, escape(1) + escape(2)),
        ("/generate", {"input_ids": [7]}, escape(7)),
        ("/generate", {"text": "é"}, "é".encode()),
    ],
)
def test_texts_and_ids_are_their_own_keys(path: str, body: dict[str, Any], key: bytes) -> None:
    assert key_of(body, served(), path).key == key


def test_the_key_of_a_long_conversation_begins_with_the_key_of_its_beginning() -> None:
    """A body that is too large to be parsed is keyed by its first messages."""
    registry = served()
    chat = [{"role": "user", "content": f"{i} " + "word " * 4000} for i in range(20)]
    whole = json.dumps({"model": "m", "messages": chat}).encode()
    body, outline = Body([whole]), Outline()
    outline.feed(whole)
    outline.finish(body)
    headers = {":path": "/v1/chat/completions", ":method": "POST"}
    parsed = parse(RouteRequest(headers, body, None), registry, outline=outline)
    assert isinstance(parsed, Request)
    assert parsed.key is not None
    first = key_of({"messages": chat[:5]}, registry).key
    assert first is not None
    assert parsed.key.startswith(first)


def test_an_invalid_prompt_has_no_key_and_a_too_deep_one_is_refused() -> None:
    keyer = HistoryKeyer()
    bodies: list[dict[str, Any]] = [
        {},
        {"messages": []},
        {"messages": "x"},
        {"messages": [{"role": "user", "content": 2**70}]},
    ]
    for body in bodies:
        assert keyer.renderer.whole(body, TREELINE) is None
    deep: Any = "x"
    for _ in range(100):
        deep = [deep]
    with pytest.raises(TooDeep):
        keyer.renderer.whole({"messages": [{"role": "user", "content": deep}]}, TREELINE)


def test_a_conversation_stays_on_its_endpoint() -> None:
    """Two engines that publish nothing and have no tokenizer: the second turn goes where the first went."""
    registry, picker = ModelRegistry(), Picker()
    for name in "ab":
        picker.add_endpoint(EndpointSpec(name, f"127.0.0.1:{ord(name)}", "p", ("m",)))
        registry.set_endpoint(name, "p", ("m",), None)
    chats = [[{"role": "user", "content": f"{i} {'words ' * 200}"}] for i in range(8)]
    homes: list[str] = []
    keys = [b""] * len(chats)
    for turn in range(3):
        for i, chat in enumerate(chats):
            request = key_of({"messages": chat}, registry)
            decision = picker.pick(request, now=float(turn))
            picker.close(picker.reserve(decision, now=float(turn)), float(turn), Outcome.HEADERS)
            if turn == 0:
                homes.append(decision.endpoint.name)
            else:
                assert decision.endpoint.name == homes[i]
                assert decision.best.candidate.hit.reach >= len(keys[i]) - GUARD_BYTES
            keys[i] = request.key or b""
            chat += [{"role": "assistant", "content": f"answer {turn}"}, {"role": "user", "content": f"more {turn}"}]
    assert set(homes) == {"a", "b"}
