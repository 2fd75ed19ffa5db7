"""`prefix_hash`: the keys that move when endpoints come and go, and the balance between endpoints."""

from __future__ import annotations

import math
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.candidates import candidates
from treeline_epp.picking.endpoint import identity_of
from treeline_epp.picking.policies import create_policy
from treeline_epp.picking.policies.prefix_hash import key_of, weights
from treeline_epp.picking.request import Request

KEYS = 600
PINNED_IDENTITY = 2220268621099017.0
PINNED_KEY = 5666916665733659087
PINNED_WEIGHT = 2867326616646716218


def asking(key: int) -> Request:
    return Request("id", key=b"%08d and so on" % key)


def homes(names: list[str]) -> list[str]:
    made, group = create_policy("prefix_hash", random.Random(1)), candidates(names)
    return [names[made.rank(asking(key), group, 1)[0]] for key in range(KEYS)]


@settings(max_examples=12, deadline=None)
@given(size=st.integers(2, 24), leaving=st.integers(0, 23))
def test_only_the_keys_of_a_leaving_endpoint_move(size: int, leaving: int) -> None:
    names = [f"pod-{n}" for n in range(size)]
    gone = names[leaving % size]
    before, after = homes(names), homes([name for name in names if name != gone])
    assert all(old == new for old, new in zip(before, after, strict=True) if old != gone)
    moved = sum(old == gone for old in before)
    assert moved <= KEYS / size + 5 * math.sqrt(KEYS / size)
    if size > 4 and moved > 30:
        heirs = Counter(new for old, new in zip(before, after, strict=True) if old == gone)
        assert max(heirs.values()) < moved / 2, "they spread over all others"


def test_a_new_endpoint_takes_its_share_from_all_in_any_order() -> None:
    names = [f"pod-{n}" for n in range(9)]
    before, after = homes(names), homes(["new", *reversed(names)])
    moved = [old for old, new in zip(before, after, strict=True) if new != old]
    assert all(new == "new" for old, new in zip(before, after, strict=True) if new != old)
    assert len(moved) == pytest.approx(KEYS / 10, abs=4 * math.sqrt(KEYS / 10))
    assert len(set(moved)) == 9


@pytest.mark.parametrize("factor", [1.0, 1.25, 2.0])
def test_loads_stay_bounded_for_any_keys(factor: float) -> None:
    policy = create_policy(f"prefix_hash:load_factor={factor}", random.Random(1))
    names, rng = [f"pod-{n}" for n in range(7)], random.Random(4)
    loads = [0.0] * 7
    for _ in range(700):
        key = min(int(rng.expovariate(0.7)), 4)  # a few hot keys
        at = policy.rank(asking(key), candidates(names, load=loads), 1)[0]
        loads[at] += 1
        assert max(loads) <= math.ceil(factor * sum(loads) / 7)


def test_a_hot_key_overflows_to_the_same_next_one() -> None:
    policy = create_policy("prefix_hash", random.Random(1))
    names = [f"pod-{n}" for n in range(6)]
    first, second, third = policy.rank(asking(7), candidates(names), 3)
    loads = [0.0] * 6
    loads[first] = 12
    assert policy.rank(asking(7), candidates(names, load=loads), 2) == [second, third]
    loads[second] = 12
    assert policy.rank(asking(7), candidates(names, load=loads), 1) == [third]


def test_only_a_prompts_beginning_and_namespace_count() -> None:
    policy = create_policy("prefix_hash:prefix_token_count=4", random.Random(1))
    group = candidates([f"pod-{n}" for n in range(50)])

    def home(key: bytes, namespace: str | None = None) -> int:
        return policy.rank(Request("id", key=key, namespace=namespace), group, 1)[0]

    assert home(b"sixteen letters!" + b"a") == home(b"sixteen letters!" + b"b")
    assert home(b"sixteen letters!") != home(b"Sixteen letters!")
    assert home(b"sixteen letters!", "salt") != home(b"sixteen letters!")


def test_without_a_key_the_lightest_gets_it() -> None:
    group = candidates("abc", load=[2, 1, 3])
    assert create_policy("prefix_hash", random.Random(1)).rank(Request("id"), group, 3) == [1, 0, 2]


def test_weights_are_even_and_the_same_everywhere() -> None:
    identity = np.array([identity_of(f"pod-{n}") for n in range(1000)])
    seen = Counter(int(weights(key_of(b"%d" % key), identity).argmax()) for key in range(5000))
    assert max(seen.values()) < 20  # five each; Poisson
    # Written down once: pickers of other releases must agree.
    assert (identity_of("pod-0"), key_of(b"a", b"b")) == (PINNED_IDENTITY, PINNED_KEY)
    assert weights(PINNED_KEY, np.array([PINNED_IDENTITY])).tolist() == [PINNED_WEIGHT]
