"""Each policy chosen by name, on a picker with endpoints, load reports, prefixes and leases."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from support.epp_core import KEYS, WIDTH, Prompt
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.picking.decision import Decision, Lease, Outcome
from treeline_epp.picking.picker import Picker, PickerConfig
from treeline_epp.picking.policies import POLICIES
from treeline_epp.picking.request import Request
from treeline_wire.load import TreelineLoad
from treeline_wire.namespaces import join_namespace

PROMPT = Prompt([1] * 8 * WIDTH)
OTHER = Prompt([2] * 8 * WIDTH)


class World:
    def __init__(self, policy: str, size: int = 4, fallbacks: int = 2) -> None:
        self.picker = Picker(PickerConfig(policy, fallbacks=fallbacks, seed=7))
        self.now = 0.0
        for number in range(size):
            spec = EndpointSpec(f"e{number}", f"10.0.0.{number}:8000", pool="p", models=("m",))
            self.picker.add_endpoint(spec)
            self.report(spec.name)

    def report(self, name: str, **fields: object) -> None:
        load = TreelineLoad(prefill_tokens_per_s=10_000.0, **fields)  # type: ignore[arg-type]
        self.picker.on_load(name, load, self.now)

    def ask(self, prompt: Prompt | None = None, **fields: object) -> Decision:
        if prompt is not None:
            fields |= {"key": prompt.key, "prompt_tokens_estimate": len(prompt.tokens)}
        request = Request("id", model="m", pool="p", **fields)  # type: ignore[arg-type]
        return self.picker.pick(request, self.now)

    def take(self, prompt: Prompt | None = None, **fields: object) -> Lease:
        return self.picker.reserve(self.ask(prompt, **fields), self.now)

    def store(self, name: str, prompt: Prompt) -> None:
        self.picker.index.apply(self.picker.endpoints[name].pod, prompt.stored(), KEYS)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_choices_are_ready_endpoints_with_distinct_fallbacks_and_say_their_policy(policy: str) -> None:
    world = World(policy, size=6)
    world.picker.set_ready("e3", False)
    for at in range(30):
        world.now = at * 0.3
        decision = world.ask(PROMPT, subset=frozenset({f"10.0.0.{n}" for n in range(1, 6)}))
        assert decision.policy == policy
        assert len(decision.destinations) == len(set(decision.destinations)) == 3
        assert not {"10.0.0.3:8000", "10.0.0.0:8000"} & set(decision.destinations)
        assert decision.terms[decision.endpoint.name]["cost_s"] > 0
        world.picker.reserve(decision, world.now)


@pytest.mark.parametrize("policy", ["least_load", "power_of_two", "consistent_hashing", "prefix_hash", "round_robin"])
def test_a_burst_sees_its_own_reservations(policy: str) -> None:
    world = World(policy, size=5)
    seen = Counter(world.take(Prompt([at] * WIDTH)).endpoint.spec.name for at in range(100))
    most = {"least_load": 20, "round_robin": 20, "power_of_two": 23}.get(policy, math.ceil(1.25 * 101 / 5) + 1)
    assert max(seen.values()) <= most


def test_least_load_counts_running_and_unreported_requests() -> None:
    world = World("least_load", size=3)
    world.now = 10.0
    world.report("e0", running=2, waiting=1)
    world.report("e1", running=1, waiting=1)
    world.report("e2", running=9)
    assert world.take().endpoint.spec.name == "e1"
    leases = [world.take() for _ in range(5)]
    assert Counter(lease.endpoint.spec.name for lease in leases) == {"e0": 2, "e1": 3} or Counter(
        lease.endpoint.spec.name for lease in leases
    ) == {"e0": 3, "e1": 2}
    # The reports have grown old: our own reservations are all that is known, and e2 has none.
    world.now = 20.0
    assert world.take().endpoint.spec.name == "e2"
    for lease in leases:
        world.picker.close(lease, world.now, Outcome.CANCELLED)


def test_cache_aware_follows_the_index_until_loads_are_uneven() -> None:
    world = World("cache_aware:balance_abs_threshold=2,balance_rel_threshold=1", size=3)
    world.store("e1", PROMPT)
    world.store("e2", Prompt(PROMPT.tokens[: 2 * WIDTH]))
    seen = [world.take(PROMPT).endpoint.spec.name for _ in range(4)]
    assert seen[:3] == ["e1"] * 3
    assert seen[3] != "e1"


def test_an_adapters_requests_go_to_endpoints_whose_events_named_it() -> None:
    world = World("lora_affinity", size=4)
    namespace = join_namespace("french", None)
    stored = OTHER.stored(lora_name="french")
    world.picker.index.apply(world.picker.endpoints["e2"].pod, stored, KEYS)
    assert world.picker.endpoints["e2"].pod.adapters == {"french"}
    assert {world.ask(PROMPT, namespace=namespace).endpoint.name for _ in range(10)} == {"e2"}
    assert len({world.ask(PROMPT).endpoint.name for _ in range(40)}) == 4


def test_buckets_keep_short_prompts_off_the_endpoints_of_long_ones() -> None:
    world = World("bucket:balance_abs_threshold=100000000", size=2)
    prompts = [Prompt([5] * size * WIDTH) for size in range(1, 60)]
    for at, prompt in enumerate(prompts):
        world.now = at * 0.2
        world.ask(prompt)
    assert world.ask(prompts[-1]).endpoint != world.ask(prompts[0]).endpoint
