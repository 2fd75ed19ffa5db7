"""`bucket`: long prompts and short ones go to different endpoints, and no endpoint gets far more than another."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from support.candidates import candidates
from treeline_epp.picking.endpoint import identity_of
from treeline_epp.picking.policies import create_policy
from treeline_epp.picking.policies.bucket import MOST_REQUESTS, Bucket
from treeline_epp.picking.request import Request


def rank(policy: object, chars: int, names: list[str], now: float) -> str:
    group = candidates(names, now=now)
    return names[policy.rank(Request("id", key=b"a" * chars), group, 1)[0]]  # type: ignore[attr-defined]


def test_short_prompts_have_their_own_endpoints() -> None:
    policy = create_policy("bucket:balance_abs_threshold=1000000,bucket_adjust_interval_secs=50", random.Random(1))
    names = sorted((f"pod-{n}" for n in range(4)), key=identity_of)
    rng = random.Random(2)
    for at in range(400):
        rank(policy, rng.choice((100, rng.randrange(4000, 8000))), names, at * 0.1)
    assert rank(policy, 100, names, 40.0) == names[0]
    assert {rank(policy, chars, names, 40.0) for chars in range(6000, 8000, 100)} == set(names[1:])


def test_the_endpoint_with_the_fewest_characters_is_next_when_loads_are_uneven() -> None:
    policy = create_policy("bucket:balance_abs_threshold=32", random.Random(1))
    names = sorted("abc", key=identity_of)
    assert rank(policy, 33, names, 0.0) == names[0]
    assert {rank(policy, 33, names, 0.0), rank(policy, 33, names, 0.0)} == set(names[1:])
    policy = create_policy("bucket:balance_abs_threshold=33", random.Random(1))
    assert [rank(policy, 33, names, 0.0), rank(policy, 8, names, 0.0)] == [names[0], names[0]]
    assert rank(policy, 8, names, 0.0) != names[0]


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=40), size=st.integers(1, 9))
def test_longer_prompts_never_go_to_an_endpoint_before_that_of_shorter_ones(lengths: list[int], size: int) -> None:
    names = sorted((f"pod-{n}" for n in range(size)), key=identity_of)
    chosen = []
    for asked in sorted(lengths):
        policy = create_policy("bucket:balance_abs_threshold=1000000", random.Random(1))
        for at, length in enumerate(lengths):
            rank(policy, length, names, at * 0.01)
        chosen.append(names.index(rank(policy, asked, names, 1.0)))
    assert chosen == sorted(chosen)


def test_old_requests_do_not_count_and_a_flood_is_kept_in_part() -> None:
    policy = create_policy("bucket", random.Random(1))
    assert isinstance(policy, Bucket)
    for _ in range(MOST_REQUESTS + 10):
        rank(policy, 10, ["a", "b"], 0.0)
    (lately,) = policy._lately._values.values()
    assert len(lately) == MOST_REQUESTS
    rank(policy, 10, ["c"], 5.1)
    (lately,) = policy._lately._values.values()
    assert [owner for _, _, owner in lately] == [identity_of("c")], "nothing is kept of who is gone"
