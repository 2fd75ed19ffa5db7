"""A gateway with a thousand pools: the work grows with the pools, not with their square."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from treeline_operator.api.parts import API_VERSION
from treeline_operator.api.pool import InferencePool
from treeline_operator.controller.observe import Observer
from treeline_operator.controller.store import Store
from treeline_operator.world import Observed, Platform, Ref

NOW = datetime(2026, 1, 1, tzinfo=UTC)
COUNT = 1_000


class CountingStore(Store):
    """Counts the pools that were handed out."""

    handed = 0

    def gateway_pools(self, namespace: str, gateway: str) -> list[Observed]:
        found = super().gateway_pools(namespace, gateway)
        self.handed += len(found)
        return found


def pool(name: str, version: int, *, generation: int = 1, gateway: str = "g", **more: Any) -> dict[str, Any]:
    return {
        "apiVersion": API_VERSION,
        "kind": "InferencePool",
        "metadata": {
            "name": name,
            "namespace": "n",
            "uid": f"uid-{name}",
            "resourceVersion": str(version),
            "generation": generation,
        },
        "spec": {"model": {"uri": "builtin://tiny"}, "gateway": {"name": gateway}, "replicas": generation},
        **more,
    }


def test_looking_at_all_pools_of_a_gateway_is_linear_in_them_while_statuses_change() -> None:
    store = CountingStore()
    observer = Observer(store, Platform())
    for number in range(COUNT):
        store.put(pool(f"p{number}", number + 1))
    for number in range(COUNT):
        typed = observer.pool("n", f"p{number}")
        assert isinstance(typed, InferencePool)
        assert len(observer.pool_world(typed, NOW).gateway.pools) == COUNT
        store.put(pool(f"p{number}", COUNT + number + 1, status={"replicas": 1}))
    assert store.handed == COUNT
    store.put(pool("p7", 3 * COUNT, generation=2))
    assert observer.gateway_world("n", "g", NOW).pools != ()
    assert store.handed == 2 * COUNT


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abcdef"), st.booleans()), max_size=30))
def test_cached_pools_equal_those_of_an_observer_without_a_cache(
    steps: list[tuple[int, str, bool]],
) -> None:
    store = Store()
    observer = Observer(store, Platform())
    for version, (what, name, first) in enumerate(steps, 1):
        gateway = "g" if first else "h"
        if what == 0:
            known = store.get(Ref(API_VERSION, "InferencePool", "n", name))
            if known is not None:
                store.remove(known.ref, known.uid, str(version))
        else:
            store.put(pool(name, version, generation=version if what < 3 else 1, gateway=gateway))
        for each in ("g", "h"):
            fresh = Observer(store, Platform()).gateway_world("n", each, NOW)
            kept = observer.gateway_world("n", each, NOW)
            assert [p.name for p in kept.pools] == [p.name for p in fresh.pools]
            assert [p.spec for p in kept.pools] == [p.spec for p in fresh.pools]
            assert [p.deleting for p in kept.pools] == [p.deleting for p in fresh.pools]
