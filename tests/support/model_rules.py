"""InferenceModels as rules, for the tests of the owners of names and of routing."""

from __future__ import annotations

from hypothesis import strategies as st
from treeline_wire.models import ModelRule, PoolClaim

POOLS = {"a": PoolClaim("east"), "b": PoolClaim("east"), "c": PoolClaim("west")}


def rule(name, model_name="chat", pool="a", created="2026-11-01T00:00:00Z", **more):
    return ModelRule(name, model_name, pool, created=created, uid=f"uid-{name}", **more)


weights = st.one_of(
    st.just(()),
    st.lists(st.integers(1, 40), min_size=1, max_size=6).map(
        lambda found: tuple((f"t{n}", weight) for n, weight in enumerate(found))
    ),
    st.integers(1, 6).map(lambda count: tuple((f"t{n}", None) for n in range(count))),
    st.just((("t0", 1), ("t1", None))),
    st.just((("t0", 0),)),
)


@st.composite
def rule_sets(draw):
    count = draw(st.integers(0, 8))
    return [
        ModelRule(
            f"rule-{n}",
            draw(st.sampled_from(["chat", "code", "own-a"])),
            draw(st.sampled_from(["a", "b", "c", "gone"])),
            draw(st.sampled_from(["Critical", "Standard", "Sheddable"])),
            draw(weights),
            tuple(draw(st.lists(st.sampled_from(["a", "b", "c", "gone"]), max_size=2))),
            f"2026-11-01T00:00:0{draw(st.integers(0, 3))}Z",
            f"uid-{n}",
        )
        for n in range(count)
    ]
