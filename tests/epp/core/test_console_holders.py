"""The console's list of a prefix's holders agrees with asking each endpoint."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support.epp_core import KEYS, SCOPE, Prompt, make_index
from treeline_epp.console.view import MOST_HOLDERS, Holders
from treeline_epp.index.index import Index
from treeline_epp.index.pods import NO_HIT

PROMPT = Prompt.random(1, 6)


@given(st.lists(st.integers(0, 6), max_size=12), st.sets(st.integers(0, 11), max_size=3), st.integers(1, 6))
def test_the_largest_holders_are_named_and_all_are_counted(held: list[int], expecting: set[int], asked: int):
    """The endpoints hold `held` blocks; those of `expecting` were sent the whole prompt."""
    index = Index()
    pods = [index.add_pod(f"e{row}", SCOPE, row) for row in range(len(held))]
    for pod, blocks in zip(pods, held, strict=True):
        if blocks:
            index.apply(pod, PROMPT.stored(0, blocks), KEYS)
    for row in expecting & set(range(len(held))):
        index.predict(pods[row], None, PROMPT.key, NO_HIT, 0.0)
    key = PROMPT.key[: PROMPT.end(asked)]
    count, named = Holders(index, SCOPE, None, {pod.row: pod.name for pod in pods}, 1.0).of(key)
    match = index.match(SCOPE, None, key, 1.0)
    reach = {pod.name: match.hit(pod).reach for pod in pods if match.hit(pod).reach}
    assert count == len(reach)
    assert len(named) == min(len(reach), MOST_HOLDERS)
    for name, end in named:
        assert reach[name] <= end <= reach[name] + 8
        assert end <= len(key)
    least = min((end for _, end in named), default=0)
    assert all(end <= least for name, end in reach.items() if name not in dict(named))


def test_an_unknown_prefix_has_no_holders():
    index, _ = make_index(2)
    assert Holders(index, SCOPE, None, {}, 0.0).of(b"x") == (0, [])
