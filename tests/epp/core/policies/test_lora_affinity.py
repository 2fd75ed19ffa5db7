"""`lora_affinity`."""

from __future__ import annotations

import random
from collections import Counter

from support.candidates import candidates
from treeline_epp.picking.policies import create_policy
from treeline_epp.picking.request import Request
from treeline_wire.namespaces import join_namespace

COSTS = [0.3, 0.1, 0.2]


def for_adapter(name: str | None) -> Request:
    return Request("id", namespace=join_namespace(name, "salt"))


def test_an_adapter_stays_on_its_endpoint_until_waiting_costs_more() -> None:
    policy = create_policy("lora_affinity:load_s=0.5", random.Random(1))
    loaded = {"a": {"french"}}
    assert policy.rank(for_adapter("french"), candidates("abc", cost=COSTS, adapters=loaded), 3) == [0, 1, 2]
    assert policy.rank(for_adapter(None), candidates("abc", cost=COSTS, adapters=loaded), 1) == [1]
    assert policy.rank(for_adapter("french"), candidates("abc", cost=[0.9, 0.1, 0.2], adapters=loaded), 1) == [1]


def test_a_burst_for_a_new_adapter_stays_together_before_any_event() -> None:
    policy = create_policy("lora_affinity:load_s=1,remember_s=10", random.Random(1))
    names = [f"e{n}" for n in range(20)]
    chosen = {policy.rank(for_adapter("new"), candidates(names, now=at / 10), 1)[0] for at in range(50)}
    assert len(chosen) == 1
    others = {policy.rank(for_adapter(f"n{n}"), candidates(names, now=5.0), 1)[0] for n in range(40)}
    assert len(others) > 10
    later = Counter(policy.rank(for_adapter("new"), candidates(names, now=20.0 * n), 1)[0] for n in range(1, 30))
    assert len(later) > 5, "after a while it is forgotten"
