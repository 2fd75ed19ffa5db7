"""Clients share the keyers' memory of chats."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from treeline_epp.keyers import learnt_chats, prompt_keyer
from treeline_epp.keyers.base import Shares
from treeline_epp.keyers.learnt_chats import LearntTemplate
from treeline_epp.keyers.prompt_keyer import MAX_MESSAGES, BoundedRenderer, Bounds
from treeline_epp.requests.isolation import Isolation
from treeline_epp.requests.model_registry import ModelRegistry
from treeline_wire import headers as names
from treeline_wire.dialects import dialect_of

OWNERS = st.sampled_from(["a", "b", "c", None])
CHATML = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
TREELINE = dialect_of("treeline")


@given(st.lists(st.tuples(OWNERS, st.integers(0, 12), st.booleans()), max_size=80))
def test_entries_are_bounded_together_and_the_largest_client_loses_some(
    steps: list[tuple[str | None, int, bool]],
) -> None:
    shares, model = Shares[int, int](8), dict[str | None, dict[int, int]]()
    for at, (owner, key, drops) in enumerate(steps):
        own = model.setdefault(owner, {})
        own.pop(key, None)
        if drops:
            shares.drop(owner, key)
        else:
            shares.put(owner, key, at)
            own[key] = at
        if sum(map(len, model.values())) > 8:
            most = max(map(len, model.values()))
            (loser,) = [who for who, entries in model.items() if list(entries) != list(shares.of(who))]
            assert len(model[loser]) == most
            del model[loser][next(iter(model[loser]))]
        assert {who: dict(shares.of(who)) for who in model} == model
        assert len(shares) == sum(map(len, model.values()))


def chat(role: str) -> dict[str, object]:
    return {"messages": [{"role": role, "content": "A"}]}


def test_one_clients_chats_make_no_other_clients_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learnt_chats, "MAX_SHAPES", 16)
    renderer = BoundedRenderer(LearntTemplate(CHATML, special_tokens={}, inline_seconds=60.0))

    def joins(client: str | None, role: str = "user") -> bool:
        before = renderer.joined
        renderer.whole(chat(role), TREELINE, client)
        return renderer.joined > before

    assert [joins("ada") for _ in range(3)] == [False, False, True]
    assert [joins("bob") for _ in range(3)] == [False, False, True]
    assert [joins(None) for _ in range(3)] == [False, False, True]
    for number in range(100):
        for _ in range(2):
            joins("ada", f"role{number}")
    assert joins("bob"), "who learns more than there is room for forgets its own"
    assert not joins("ada")


def test_the_fitting_number_of_messages_is_learnt_for_each_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_keyer, "_REMEMBERED", 4)
    bounds = Bounds()
    bounds.keep(["x"], 20, "ada")
    assert [bounds.of(["x"], who) for who in ("ada", "bob", None)] == [20, MAX_MESSAGES, MAX_MESSAGES]
    for number in range(20):
        bounds.keep([{"content": str(number)}], 30, "eve")
    assert bounds.of(["x"], "ada") == 20


def test_the_client_is_identified_apart_from_the_namespace() -> None:
    asked = {names.CLIENT: "ada", names.ISOLATION: names.PER_KEY}
    for trusted, client in ((True, "ada"), (False, None)):
        isolation = Isolation(trust_edge=trusted)
        for salt in ("x", "y"):
            cache = isolation.cache({"cache_salt": salt}, "/v1/completions", asked, ModelRegistry(), "default")
            assert cache.client == client
