"""Tiers below the device: which blocks of host memory and disk a pod is known to hold, and what loading them costs."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.epp_core import KEYS, SCOPE, WIDTH, Block, NaiveTree, Prompt, hit, make_index
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.index.event_filter import Skip, Tier
from treeline_epp.index.index import Index
from treeline_epp.index.pods import NO_HIT, Hit, Pod
from treeline_epp.picking.decision import Decision, Outcome
from treeline_epp.picking.picker import Picker, PickerConfig
from treeline_epp.picking.request import Request
from treeline_wire.events import AllBlocksCleared, BlockRemoved, BlockStored, decode_batch, encode_batch
from treeline_wire.load import TreelineLoad

PROMPT = Prompt.random(1, 20)
LONGER = PROMPT.extended(2, 3)
"""The same with text behind it, which proves the end of its last block."""


def held(index: Index, pod: Pod, prompt: Prompt = LONGER) -> tuple[int, int, int]:
    """Return the blocks of the prompt on the device; there or in host memory; and in any tier."""
    found = hit(index, pod, prompt)
    return found.tokens // WIDTH, found.host // WIDTH, found.disk // WIDTH


def in_tier(pod: Pod, tier: Tier, index: Index) -> set[int]:
    return index.blocks_of(pod.lower[tier]) if tier in pod.lower else set()


def test_a_hit_goes_on_from_the_device_to_host_memory_to_disk() -> None:
    index, (pod, other) = make_index()
    index.apply(pod, PROMPT.stored(0, 5, medium="GPU"), KEYS)
    index.apply(pod, PROMPT.stored(3, 9, medium="CPU"), KEYS)
    index.apply(pod, PROMPT.stored(9, 14, medium="DISK"), KEYS)
    assert held(index, pod)[:2] == (5, 9)
    assert held(index, pod)[2] in (12, 13), "the last block counts only if eight more bytes match"
    index.apply(other, LONGER.stored(), KEYS)
    assert held(index, pod) == (5, 9, 14), "what follows proves the end of the last block, whoever holds it"
    assert hit(index, other, LONGER).host == 0
    index.apply(pod, BlockRemoved(PROMPT.hashes[4:5], medium="GPU"), KEYS)
    assert held(index, pod) == (4, 9, 14)
    index.apply(pod, BlockRemoved(PROMPT.hashes[4:5], medium="CPU"), KEYS)
    assert held(index, pod) == (4, 4, 4), "the fifth block is nowhere"
    assert (pod.blocks, pod.lower[Tier.HOST].blocks, pod.lower[Tier.DISK].blocks) == (4, 5, 5)
    index.check()


def test_a_prefix_may_be_in_host_memory_alone() -> None:
    index, (pod, other) = make_index()
    index.apply(pod, PROMPT.stored(0, 8, medium="CPU_PINNED"), KEYS)
    device, host, disk = held(index, pod)
    assert (device, disk) == (0, 0)
    assert host in (6, 7)
    found = index.match(SCOPE, None, LONGER.key, 0.0)
    assert found.longest.tokens == host * WIDTH
    assert found.hit(other) == NO_HIT
    assert pod.blocks == 0
    index.apply(pod, BlockRemoved(PROMPT.hashes[:8], medium="CPU_PINNED"), KEYS)
    assert index.totals()["blocks"] == 0


def test_vllms_events_without_tokens_mark_known_blocks_in_any_order() -> None:
    index, (pod, other) = make_index()
    index.apply(other, PROMPT.stored(0, 12), KEYS)
    shuffled = random.Random(3).sample(PROMPT.hashes[:14], 14)
    index.apply(pod, BlockStored(shuffled, None, [], 0, medium="CPU"), KEYS)
    assert in_tier(pod, Tier.HOST, index) == set(PROMPT.hashes[:12])
    assert pod.skipped == {Skip.NO_TEXT: 2}
    assert held(index, pod)[1] in (10, 11)
    index.apply(pod, BlockRemoved(shuffled, medium="CPU"), KEYS)
    assert in_tier(pod, Tier.HOST, index) == set()
    assert pod.skipped == {Skip.NO_TEXT: 2, Skip.UNKNOWN_REMOVAL: 2}
    index.check()


def test_events_without_tokens_find_salted_blocks() -> None:
    index, (pod,) = make_index(1)
    salted = Prompt.random(4, 9, namespace="salt")
    index.apply(pod, salted.stored(), KEYS)
    index.apply(pod, BlockStored(salted.hashes, None, [], 0, medium="STORAGE"), KEYS)
    index.apply(pod, salted.stored(0, 5, cache_salt=None, medium="CPU"), KEYS)
    index.apply(pod, BlockRemoved(salted.hashes, medium="GPU"), KEYS)
    assert held(index, pod, salted)[:2] == (0, 5)
    assert held(index, pod, salted)[2] >= 7
    index.check()


def test_each_announced_copy_takes_a_removal_from_its_own_tier() -> None:
    """vLLM announces the blocks that two chunks share twice, and removes them twice."""
    index, (pod,) = make_index(1)
    for part in (PROMPT.stored(0, 8, medium="CPU"), PROMPT.stored(4, 12, medium="CPU"), PROMPT.stored(0, 8)):
        index.apply(pod, part, KEYS)
    index.apply(pod, BlockRemoved(PROMPT.hashes[:8], medium="CPU"), KEYS)
    assert in_tier(pod, Tier.HOST, index) == set(PROMPT.hashes[4:12])
    index.apply(pod, BlockRemoved(PROMPT.hashes[4:12], medium="CPU"), KEYS)
    assert in_tier(pod, Tier.HOST, index) == set()
    assert index.blocks_of(pod) == set(PROMPT.hashes[:8])
    index.check()


def test_shared_stores_are_not_the_pods_own() -> None:
    index, (pod,) = make_index(1)
    index.apply(pod, PROMPT.stored(medium="STORAGE", locality="REMOTE"), KEYS)
    index.apply(pod, PROMPT.stored(0, 4, medium="STORAGE", locality="LOCAL"), KEYS)
    assert in_tier(pod, Tier.DISK, index) == set(PROMPT.hashes[:4])
    assert pod.skipped == {Skip.REMOTE: 20}


def test_a_removal_from_a_tier_that_never_was_is_counted() -> None:
    index, (pod,) = make_index(1)
    index.apply(pod, BlockRemoved([1, 2], medium="DISK"), KEYS)
    assert pod.skipped == {Skip.UNKNOWN_REMOVAL: 2}
    assert not pod.lower


def test_blocks_of_a_tier_wait_for_their_parents() -> None:
    index, (pod,) = make_index(1)
    index.apply(pod, PROMPT.stored(5, 9, medium="CPU"), KEYS)
    index.apply(pod, BlockRemoved(PROMPT.hashes[8:9], medium="CPU"), KEYS)
    assert in_tier(pod, Tier.HOST, index) == set(PROMPT.hashes[5:8])
    index.apply(pod, PROMPT.stored(0, 5), KEYS)
    assert held(index, pod)[0] == 5
    assert held(index, pod)[1] in (6, 7)
    index.apply(pod, PROMPT.stored(8, medium="CPU"), KEYS)
    assert held(index, pod)[1] in (18, 19)
    index.check()


def tiered(index: Index, pod: Pod) -> None:
    """Let the device hold 5 blocks, host memory 9 and the disk 14; another pod's blocks prove their ends."""
    prover = next((one for one in index._bits.owners.values() if str(one) == "prover"), None)
    index.apply(prover or index.add_pod("prover", SCOPE), LONGER.stored(), KEYS)
    index.apply(pod, PROMPT.stored(0, 5), KEYS)
    index.apply(pod, PROMPT.stored(0, 9, medium="CPU"), KEYS)
    index.apply(pod, PROMPT.stored(0, 14, medium="DISK"), KEYS)


def test_a_clear_a_restart_and_a_new_tokenizer_forget_the_tiers() -> None:
    index, (pod, other) = make_index()
    for forget in (lambda: index.apply(pod, AllBlocksCleared(), KEYS), lambda: index.respell(SCOPE)):
        tiered(index, pod)
        assert held(index, pod) == (5, 9, 14)
        forget()
        assert (held(index, pod), pod.lower, pod.blocks) == ((0, 0, 0), {}, 0)
        index.check()
    index.apply(pod, PROMPT.stored(medium="CPU"), KEYS)
    index.remove_pod(pod)
    index.respell(SCOPE)
    for _ in range(3):
        index.tick(0.0)
    index.check()
    assert index.totals()["blocks"] == 0
    tiered(index, other)
    assert held(index, other) == (5, 9, 14)


def test_a_snapshot_replaces_the_tiers_too() -> None:
    index, (pod,) = make_index(1)
    tiered(index, pod)
    index.begin_snapshot(pod)
    index.stage(pod, PROMPT.stored(0, 6), KEYS)
    index.stage(pod, PROMPT.stored(0, 8, medium="CPU"), KEYS)
    assert held(index, pod) == (5, 9, 14), "it counts when it is complete"
    index.end_snapshot(pod)
    assert held(index, pod) == (6, 8, 0)
    assert set(pod.lower) == {Tier.HOST}
    assert (pod.blocks, pod.lower[Tier.HOST].blocks) == (6, 8)
    index.check()
    index.begin_snapshot(pod)
    index.stage(pod, PROMPT.stored(0, 14, medium="DISK"), KEYS)
    index.drop_snapshot(pod)
    for _ in range(3):
        index.tick(0.0)
    assert held(index, pod)[:2] == (6, 8)
    index.apply(pod, BlockRemoved(PROMPT.hashes[:8], medium="CPU"), KEYS)
    assert held(index, pod)[:2] == (6, 6)
    index.check()


def test_blocks_of_tiers_age_after_a_gap() -> None:
    index, (pod,) = make_index(1, aged_life_s=100.0)
    tiered(index, pod)
    index.age(pod, now=0.0)
    assert held(index, pod) == (5, 9, 14)
    index.apply(pod, PROMPT.stored(4, 7, medium="CPU"), KEYS)
    index.apply(pod, BlockRemoved(PROMPT.hashes[8:9], medium="CPU"), KEYS)
    assert held(index, pod) == (5, 8, 14)
    index.apply(pod, PROMPT.stored(0, 4), KEYS)
    index.check()
    index.tick(101.0, budget=0)  # they do not count, although nothing is swept yet
    assert held(index, pod) == (4, 7, 7)
    index.check()


def test_a_reported_hit_caps_lower_tiers_as_well() -> None:
    index, (pod,) = make_index(1)
    tiered(index, pod)
    index.cap_hit(pod, None, LONGER.key, 7 * WIDTH, now=0.0)
    assert held(index, pod) == (5, 7, 7)
    index.cap_hit(pod, None, LONGER.key, 2 * WIDTH, now=0.0)
    assert held(index, pod) == (2, 0, 0)


PROMPTS = [Prompt([head] * 3 * WIDTH + [tail] * 4 * WIDTH) for head in range(3) for tail in range(3)]
MEDIA = {None: 0, "GPU": 0, "CPU": 1, "CPU_PINNED": 1, "DISK": 2, "EXTERNAL": 2}


class World:
    """An index, and a naive model in which each tier of a pod is a pod."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.index, self.pods = make_index(3, max_edge=rng.choice((5, 8192)))
        self.naive = NaiveTree()
        self.copies: list[list[Counter[int]]] = [[Counter() for _ in range(3)] for _ in self.pods]

    def step(self) -> None:
        rng = self.rng
        number, medium = rng.randrange(3), rng.choice(list(MEDIA))
        pod, copies = self.pods[number], self.copies[number]
        prompt, tier = rng.choice(PROMPTS), MEDIA[medium]
        what = rng.randrange(12)
        if what < 6:
            event = prompt.stored(0, rng.choice((1, 3, 5, None)), medium=medium)
            self.index.apply(pod, event, KEYS)
            copies[tier].update(event.block_hashes)
        elif what < 8:
            hashes = rng.sample(prompt.hashes, 4)
            self.index.apply(pod, BlockStored(hashes, None, [], 0, medium=medium), KEYS)
            known = {block for every in self.copies for each in every for block in each}
            copies[tier].update(block for block in hashes if block in known)
        elif what < 11:
            gone = prompt.hashes[: rng.choice((1, 4, None))][:: rng.choice((1, -1))]
            self.index.apply(pod, BlockRemoved(gone, medium=medium), KEYS)
            copies[tier].subtract(block for block in gone if copies[tier][block])
        else:
            self.replace(pod, copies)
        for every in self.copies:
            for at, each in enumerate(every):
                every[at] = +each

    def replace(self, pod: Pod, copies: list[Counter[int]]) -> None:
        """Clear a pod, or replace it by a snapshot, which counts no copies."""
        copies[:] = [Counter() for _ in copies]
        if self.rng.random() < 0.5:
            self.index.apply(pod, AllBlocksCleared(), KEYS)
        else:
            self.index.begin_snapshot(pod)
            for medium in ("GPU", "CPU", "DISK")[: self.rng.randrange(4)]:
                event = self.rng.choice(PROMPTS).stored(medium=medium)
                self.index.stage(pod, event, KEYS)
                copies[MEDIA[medium]].update(event.block_hashes)
            self.index.end_snapshot(pod)
        for _ in range(4):  # what is swept only later is known by its hash until then
            self.index.tick(0.0)

    def compare(self) -> None:
        naive = NaiveTree()
        for prompt in PROMPTS:
            for at, block in enumerate(prompt.hashes):
                parent = prompt.hashes[at - 1] if at else None
                naive.ever[block] = Block(parent, prompt.key[: prompt.end(at + 1)], (at + 1) * WIDTH)
        for number, every in enumerate(self.copies):
            for tier, each in enumerate(every):
                naive.held[3 * number + tier] = set(each)
        alive = set().union(*naive.held.values())
        naive.blocks = {block: known for block, known in naive.ever.items() if block in alive}
        for number, pod in enumerate(self.pods):
            assert self.index.blocks_of(pod) == set(self.copies[number][0])
            assert in_tier(pod, Tier.HOST, self.index) == set(self.copies[number][1])
            assert in_tier(pod, Tier.DISK, self.index) == set(self.copies[number][2])
        prompt = self.rng.choice(PROMPTS)
        for key in (prompt.key, prompt.key + b"something else", prompt.key[:-3]):
            match = self.index.match(SCOPE, None, key, 0.0)
            for number, pod in enumerate(self.pods):
                found, first = match.hit(pod), 3 * number
                together = [[first], [first, first + 1], [first, first + 1, first + 2]]
                bounds = naive.match(key, together)
                deepest = found.tokens
                for tokens, (least, most) in zip((found.tokens, found.host, found.disk), bounds, strict=True):
                    deepest = max(deepest, tokens)
                    assert least <= deepest <= most


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 32))
def test_hits_through_tiers_equal_the_naive_models(seed: int) -> None:
    world = World(random.Random(seed))
    for step in range(60):
        world.step()
        if step % 4 == 3:
            world.compare()
    world.index.check()


# What they cost

TOKENS = LONGER.tokens
RATE = 1000.0


def a_picker(*loads: TreelineLoad) -> tuple[Picker, list[Pod]]:
    picker = Picker(PickerConfig(seed=1))
    pods = []
    for number, load in enumerate(loads):
        endpoint = picker.add_endpoint(EndpointSpec(f"e{number}", f"10.0.0.{number}:80", models=("m",)))
        picker.on_load(f"e{number}", load, 0.0)
        pods.append(endpoint.pod)
    return picker, pods


def pick(picker: Picker, now: float = 0.1) -> Decision:
    return picker.pick(Request("id", model="m", key=LONGER.key, prompt_tokens_estimate=len(TOKENS)), now)


LOAD = TreelineLoad(prefill_tokens_per_s=RATE)


def test_loading_costs_less_than_computing_and_more_than_nothing() -> None:
    picker, (device, host, disk, _) = a_picker(LOAD, LOAD, LOAD, LOAD)
    picker.index.apply(device, PROMPT.stored(0, 12), KEYS)
    picker.index.apply(host, PROMPT.stored(0, 12, medium="CPU"), KEYS)
    picker.index.apply(disk, PROMPT.stored(0, 12, medium="DISK"), KEYS)
    told = {one.endpoint: one.terms for one in picker.explain(pick(picker).request, 0.1).endpoints}
    costs = [told[f"e{number}"]["cost_s"] for number in range(4)]
    assert costs == sorted(set(costs))
    assert pick(picker).endpoint.name == "e0"
    assert [told[f"e{n}"]["cached_tokens"] for n in range(4)] == [11 * WIDTH, 11 * WIDTH, 11 * WIDTH, 0]
    assert (told["e1"]["host_tokens"], told["e1"]["disk_tokens"]) == (11 * WIDTH, 0)
    assert (told["e2"]["host_tokens"], told["e2"]["disk_tokens"]) == (0, 11 * WIDTH)
    assert (told["e0"]["load_s"], told["e3"]["load_s"]) == (0, 0)


@pytest.mark.parametrize("count", [2, 40], ids=["one by one", "in arrays"])
@pytest.mark.parametrize(
    ("told", "expected_s"),
    [(0.0, 5 / 8.0), (2.0, 5 / 2.0), (100.0, 5 / 100.0), (0.5, 5 / 1.0)],
    ids=["unknown", "told", "fast", "slower than computing: it may compute"],
)
def test_an_engines_own_rate_counts(count: int, told: float, expected_s: float) -> None:
    load = TreelineLoad(prefill_tokens_per_s=RATE, host_tokens_per_s=told * RATE)
    picker, pods = a_picker(*[load] * count)
    picker.index.apply(pods[0], PROMPT.stored(0, 3), KEYS)
    picker.index.apply(pods[0], PROMPT.stored(0, 8, medium="CPU"), KEYS)
    picker.index.apply(pods[1], PROMPT.stored(8), KEYS)  # proves the end of the eighth block
    best = pick(picker).best
    assert (best.candidate.cached_tokens, best.candidate.host_tokens) == (8 * WIDTH, 5 * WIDTH)
    assert best.load_s == pytest.approx(expected_s * WIDTH / RATE)
    assert best.ttft_s == best.prefill_s + best.load_s


@pytest.mark.parametrize("reported", [3, 7], ids=["it computed them anew", "it loaded them"])
def test_neither_loading_nor_computing_what_is_in_host_memory_is_an_error(reported: int) -> None:
    picker, (pod,) = a_picker(LOAD)
    long = PROMPT.extended(5, 40)
    picker.index.apply(pod, long.stored(0, 3), KEYS)
    picker.index.apply(pod, long.stored(0, 40, medium="CPU"), KEYS)
    for _ in range(20):
        request = Request("id", model="m", key=long.key, prompt_tokens_estimate=len(long.tokens))
        decision = picker.pick(request, 0.1)
        lease = picker.reserve(decision, 0.1)
        picker.index.withdraw(pod, None, long.key, lease.answer.predicted_until or 0.0)
        found = 3 * WIDTH if reported == 3 else decision.best.candidate.cached_tokens
        assert decision.best.candidate.cached_tokens == 39 * WIDTH
        picker.close(lease, 0.1, Outcome.HEADERS, cached_tokens=found, prompt_tokens=len(long.tokens))
    assert [error for _, error in picker.endpoints["e0"].audit._seen] == [None] * 20


def test_what_a_routed_request_will_leave_on_the_device_is_not_loaded_twice() -> None:
    picker, (pod,) = a_picker(LOAD)
    picker.index.apply(pod, PROMPT.stored(0, 12, medium="CPU"), KEYS)
    decision = pick(picker)
    assert decision.best.candidate.host_tokens == 11 * WIDTH
    picker.reserve(decision, 0.1)
    again = pick(picker, 0.2).best.candidate
    assert (again.host_tokens, again.hit.host) == (0, 11 * WIDTH)


def test_loaded_tokens_need_room_on_the_device() -> None:
    full = TreelineLoad(prefill_tokens_per_s=RATE, page_size=WIDTH, pages_total=30, pages_used=28)
    picker, (pod,) = a_picker(full)
    picker.endpoints["e0"].load.train_hits(1, 2)
    before = pick(picker).best
    picker.index.apply(pod, PROMPT.stored(0, 12, medium="CPU"), KEYS)
    after = pick(picker).best
    assert after.evict_s == before.evict_s > 0
    assert after.prefill_s < before.prefill_s


def test_sglangs_events_of_host_memory() -> None:
    """SGLang's HiCache tells the tokens, and calls host memory CPU_PINNED."""
    index, (pod,) = make_index(1)
    events = [PROMPT.stored(0, 4, medium="GPU"), PROMPT.stored(0, 4, medium="CPU_PINNED"), PROMPT.stored(0, 4)]
    for event in decode_batch(encode_batch(1.0, events)).events:
        index.apply(pod, event, KEYS)
    index.apply(pod, BlockRemoved(PROMPT.hashes[:4], medium="GPU"), KEYS)
    index.apply(pod, BlockRemoved(PROMPT.hashes[:4], medium="GPU"), KEYS)
    assert index.blocks_of(pod) == set()
    assert in_tier(pod, Tier.HOST, index) == set(PROMPT.hashes[:4])
    assert hit(index, pod, PROMPT) == Hit(host=3 * WIDTH)


def test_lower_tiers_leave_room_in_the_index_for_devices() -> None:
    index, (pod, other) = make_index(2, max_blocks=40)
    long = Prompt.random(9, 60)
    for at in range(60):
        index.apply(pod, long.stored(at, at + 1, medium="DISK"), KEYS)
    assert (pod.lower[Tier.DISK].blocks, pod.skipped[Skip.FULL]) == (31, 29)
    index.apply(other, Prompt.random(10, 5).stored(), KEYS)
    assert other.blocks == 5
