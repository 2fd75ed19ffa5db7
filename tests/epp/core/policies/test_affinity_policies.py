"""`session_affinity`, `lora_affinity` and `manual`."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.candidates import candidates
from treeline_epp.picking.decision import NoEndpoints
from treeline_epp.picking.endpoint import identity_of
from treeline_epp.picking.policies import create_policy
from treeline_epp.picking.request import PickRequest
from treeline_wire.namespaces import join_namespace

COSTS = [0.3, 0.1, 0.2]


def with_headers(**headers: str) -> PickRequest:
    return PickRequest("id", headers={name.replace("_", "-"): value for name, value in headers.items()})


@pytest.mark.parametrize("carrier", ["cookie", "header"])
def test_a_token_brings_a_client_back(carrier: str) -> None:
    policy = create_policy(f"session_affinity:carrier={carrier}", random.Random(1))
    told = policy.tell(with_headers(), identity_of("c"))
    assert told is not None
    name, value = told
    sent = {"cookie": f"theme=dark; {value.partition(';')[0]}"} if carrier == "cookie" else {name: value}
    again = PickRequest("id", headers=sent)
    assert policy.rank(again, candidates("abc", cost=COSTS), 2) == [2, 1]
    assert policy.tell(again, identity_of("c")) is None
    # Its endpoint has gone: another is chosen, and told.
    assert policy.rank(again, candidates("ab", cost=COSTS[:2]), 2) == [1, 0]
    assert policy.tell(again, identity_of("b")) not in (None, told)


def test_the_cookie_is_as_upstream_sets_it() -> None:
    policy = create_policy("session_affinity:max_age=60", random.Random(1))
    assert policy.tell(with_headers(), 15.0) == (
        "set-cookie",
        "llm-d-session=000000000000f; Path=/; Max-Age=60; HttpOnly; SameSite=Lax",
    )
    policy = create_policy("session_affinity:carrier=header", random.Random(1))
    assert policy.tell(with_headers(), 15.0) == ("x-session-token", "000000000000f")


@given(token=st.text(max_size=30) | st.from_regex(r"[0-9a-f]{13}", fullmatch=True))
def test_any_token_is_survived(token: str) -> None:
    policy = create_policy("session_affinity:carrier=header", random.Random(1))
    request = with_headers(x_session_token=token)
    assert policy.rank(request, candidates("abc", cost=COSTS), 3) == [1, 2, 0]


def for_adapter(name: str | None) -> PickRequest:
    return PickRequest("id", namespace=join_namespace(name, "salt"))


def test_an_adapter_stays_where_it_is_loaded_until_waiting_costs_more() -> None:
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


def test_manual_is_the_endpoint_that_the_header_names() -> None:
    policy = create_policy("manual:header=x-pod", random.Random(1))
    assert policy.rank(with_headers(x_pod="c"), candidates("abc", cost=COSTS), 3) == [2]
    assert policy.rank(with_headers(), candidates("abc", cost=COSTS), 3) == [1, 2, 0]
    with pytest.raises(NoEndpoints, match="x-pod names 'd', which is no ready endpoint"):
        policy.rank(with_headers(x_pod="d"), candidates("abc"), 1)
    with pytest.raises(NoEndpoints) as caught:
        policy.rank(with_headers(x_pod="d" * 100_000), candidates("abc"), 1)
    assert len(str(caught.value)) < 300
