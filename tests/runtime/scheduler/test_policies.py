"""Schedule policies: each gives a permutation, none starves a request, and the answers do not depend on them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from support.runtime_engine import Harness, Recorder, prompt
from treeline_operator.api.engine import WORDS
from treeline_runtime.config import ConfigError, SchedulerConfig
from treeline_runtime.core import Req
from treeline_runtime.kvcache import Match, RadixCache, key_of
from treeline_runtime.kvcache.node import EVICTION_POLICIES
from treeline_runtime.messages import GenerateReq, SamplingParams
from treeline_runtime.scheduler.waiting import MATCH_LIMIT, WaitingOrder

POLICIES = list(get_args(get_type_hints(SchedulerConfig)["schedule_policy"]))


class Timed(Recorder):
    """Its clock counts the steps."""

    def __init__(self, model: Path, **settings: Any) -> None:
        super().__init__(model, clock=lambda: float(self.steps), **settings)


def request(
    ids: list[int],
    arrival: int = 0,
    *,
    priority: int = 0,
    since: float = 0.0,
    waited: float = 0.0,
    client: str | None = None,
) -> Req:
    message = GenerateReq(str(arrival), ids, SamplingParams(), client=client)
    req = Req.of(message, seed=0, eos_ids=(), max_new_tokens=8, arrival=arrival, priority=priority)
    req.key, req.waiting_since, req.waited_s = key_of(ids), since, waited
    return req


def tree_of(*cached: list[int]) -> Callable[[Req], Match]:
    """Return the match function of a cache with pages of one token."""
    tree, page = RadixCache(1), 0
    for tokens in cached:
        tree.insert(key_of(tokens), np.arange(page, page + len(tokens)), prompt_tokens=len(tokens))
        page += len(tokens)
    return lambda req: tree.match(req.key)


def order_of(policy: str, match: Callable[[Req], Match], starvation_bound: float = 1e9) -> WaitingOrder:
    cached = (lambda req: match(req).num_pages) if policy == "lpm" else None
    return WaitingOrder(starvation_bound, by_priority=policy == "priority", cached=cached)


def in_order(waiting: list[Req], match: Callable[[Req], Match]) -> list[Req]:
    """Return the requests by the longest cached prefix, after they arrived one by one."""
    order = order_of("lpm", match)
    for req in waiting:
        order.put(req)
    return list(order.in_order(0.0))


# ---- each policy ----------------------------------------------------------------------------------------


def test_a_long_queue_is_first_come_first_served() -> None:
    waiting = [request([i], i) for i in range(MATCH_LIMIT + 1)]
    match = tree_of(*([i] for i in range(MATCH_LIMIT, MATCH_LIMIT // 2, -1)))
    assert in_order(waiting, match) == waiting
    assert in_order(waiting[1:], match) != waiting[1:]


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=6)


def test_an_unknown_policy_is_refused(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="schedule_policy must be fcfs, lpm or priority, got 'magic'"):
        Harness(tiny, schedule_policy="magic")


def test_pools_may_name_the_existing_policies() -> None:
    assert sorted(WORDS["schedulePolicy"]) == sorted(POLICIES)
    assert sorted(WORDS["evictionPolicy"]) == sorted(EVICTION_POLICIES)
    assert get_args(get_type_hints(SchedulerConfig)["eviction_policy"]) == tuple(EVICTION_POLICIES)


# ---- all of them ----------------------------------------------------------------------------------------


def by_definition(
    waiting: list[Req], policy: str, match: Callable[[Req], Match], now: float, bound: float
) -> list[Req]:
    """Sort all waiting requests from scratch. `waiting`: requests put at the front, then the others by arrival."""
    overdue = [req for req in waiting if now - (req.waiting_since - req.waited_s) >= bound]
    others = [req for req in waiting if req not in overdue]
    if policy == "priority":
        others.sort(key=lambda req: -req.priority)
    elif policy == "lpm" and len(others) <= MATCH_LIMIT:
        others.sort(key=lambda req: -match(req).num_pages)
    return sorted(overdue, key=lambda req: req.arrival) + others


def one_of_each(orders: list[list[Req]]) -> list[Req]:
    """Interleave the orders: the first of each, then the second of each that has one, and so on."""
    return [req for turn in zip_longest(*orders) for req in turn if req is not None]


class Comings(RuleBasedStateMachine):
    """Requests come, leave, are admitted in order and retracted, and time passes."""

    policy = "fcfs"

    def __init__(self) -> None:
        super().__init__()
        self.match = tree_of([1, 1, 1], [1, 2], [2, 2])
        self.order = order_of(self.policy, self.match, 10.0)
        self.waiting: list[Req] = []
        self.running: list[Req] = []
        self.turns: list[str | None] = []
        self.now, self.count = 0.0, 0

    @rule(ids=TOKENS, priority=st.integers(-2, 2), client=st.sampled_from([None, "ada", "bob"]))
    def come(self, ids: list[int], priority: int, client: str | None) -> None:
        self.count += 1
        req = request(ids, self.count, priority=priority, since=self.now, client=client)
        self.order.put(req)
        self.waiting.append(req)
        self.turns += [client] if client not in self.turns else []

    @rule(which=st.integers(0, 20))
    def leave(self, which: int) -> None:
        if self.waiting:
            req = self.waiting.pop(which % len(self.waiting))
            self.order.leave(req)
            self.had_its_turn(req.client)

    def had_its_turn(self, client: str | None) -> None:
        self.turns.remove(client)
        self.turns += [client] if any(req.client == client for req in self.waiting) else []

    @rule(skipped=st.lists(st.booleans(), min_size=1, max_size=6))
    def admit(self, skipped: list[bool]) -> None:
        """Admit requests in order, except the skipped ones; each leaves the queue as soon as it is yielded."""
        for req, skip in zip(self.order.in_order(self.now), skipped, strict=False):
            if not skip:
                req.waited_s += self.now - req.waiting_since
                self.order.leave(req)
                self.waiting.remove(req)
                self.had_its_turn(req.client)
                self.running.append(req)

    @rule(which=st.integers(0, 20))
    def retract(self, which: int) -> None:
        if self.running:
            req = self.running.pop(which % len(self.running))
            req.waiting_since = self.now
            self.order.put(req, front=True)
            self.waiting.insert(0, req)
            self.turns += [req.client] if req.client not in self.turns else []

    @rule(seconds=st.integers(1, 4))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @invariant()
    def the_order_is_what_sorting_says(self) -> None:
        own = [[req for req in self.waiting if req.client == client] for client in self.turns]
        wanted = one_of_each([by_definition(reqs, self.policy, self.match, self.now, 10.0) for reqs in own])
        assert list(self.order.in_order(self.now)) == wanted


@pytest.mark.parametrize("policy", POLICIES)
def test_the_order_stays_right_as_requests_come_and_leave(policy: str) -> None:
    machine = type("ComingsBy", (Comings,), {"policy": policy})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=25, stateful_step_count=40, deadline=None, derandomize=True)
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_a_client_with_a_long_queue_delays_another_by_one_of_its_requests(tiny: Path, policy: str) -> None:
    """It holds even when all of its requests have waited longer than the bound."""
    engine = Timed(tiny, schedule_policy=policy, starvation_bound=1.0, max_running_requests=1, overlap_depth=0)
    for i in range(20):
        hostile(engine, policy, i, client="ada")
    for _ in range(5):
        engine.step()
    before = len(engine.prefills)
    engine.submit("other", prompt(1, 30), max_new_tokens=2, client="bob")
    while not any("other" in rids for rids in engine.prefills):
        engine.step()
    assert len(engine.prefills) - before <= 2
    assert len(engine.prefill.waiting) >= 10


@pytest.mark.deep
@pytest.mark.parametrize("rows", [True, False], ids=["rows", "pages"])
def test_long_answers_of_one_client_do_not_block_another(tiny: Path, rows: bool) -> None:
    """The long answers take all rows, or all pages, except those reserved for clients without a running request."""
    engine = Timed(tiny, max_running_requests=16, max_total_tokens=16384 if rows else 4096)
    for i in range(40):
        engine.submit(f"long-{i}", prompt(i, 30), max_new_tokens=400, ignore_eos=True, client="ada")
    for _ in range(20):
        engine.step()
    most = len(engine.decode.running)
    assert most == 14 if rows else 6 <= most <= 12
    for i in range(3):
        engine.submit(f"short-{i}", prompt(100 + i, 30), max_new_tokens=4, ignore_eos=True, client="bob")
    begun = engine.steps
    while not all(ended(engine, f"short-{i}") for i in range(3)):
        engine.step()
        assert engine.steps < begun + 60
    assert not any(ended(engine, f"long-{i}") for i in range(40))
    engine.submit("nobody's", prompt(200, 30), max_new_tokens=4)
    engine.run()


@pytest.mark.parametrize("fits", [True, False])
def test_a_large_prompt_beside_its_clients_long_answer_is_not_starved(tiny: Path, fits: bool) -> None:
    """Small prompts of another client come without end. A prompt that would not fit without them either holds up no
    other."""
    engine = Timed(tiny, max_total_tokens=512, starvation_bound=5.0, max_running_requests=16)
    engine.submit("long", prompt(1, 30), max_new_tokens=150, ignore_eos=True, client="ada")
    small = 0
    for step in range(60):
        running = [req for req in engine.decode.running.values() if req.client == "bob"]
        waiting = [req for req in engine.prefill.waiting.values() if req.client == "bob"]
        for _ in range(8 - len(running) - len(waiting)):
            engine.submit(f"small {small}", prompt(100 + small, 30), max_new_tokens=8, client="bob")
            small += 1
        if step == 5:
            engine.submit("large", prompt(2, 200 if fits else 300), max_new_tokens=8, client="ada")
        engine.step()
        if ended(engine, "large"):
            break
    assert ended(engine, "large") == fits
    assert not ended(engine, "long")
    if not fits:
        assert engine.last(f"small {small - 12}").finish is not None
    engine.abort()
    engine.run()


def ended(engine: Timed, rid: str) -> bool:
    return bool(engine.outs.get(rid)) and engine.last(rid).finish is not None


def hostile(engine: Timed, policy: str, i: int, **options: Any) -> None:
    """Return a request that `policy` prefers to one without priority and without cached tokens."""
    priority = 5 if policy == "priority" else 0
    engine.submit(str(i), [*prompt(9, 40), i % 90], max_new_tokens=2, priority=priority, **options)


def steps_until_served(tiny: Path, policy: str, *, bound: float, depth: int, limit: int = 250) -> int | None:
    """Count the steps until an unlucky request is served, while preferred requests never stop coming."""
    engine = Timed(tiny, schedule_policy=policy, starvation_bound=bound, max_running_requests=1, overlap_depth=depth)
    for i in range(4):
        hostile(engine, policy, i)
    for _ in range(4):
        engine.step()
    engine.submit("unlucky", prompt(1, 30), max_new_tokens=2)
    begun = engine.steps
    while engine.steps < begun + limit:
        while len(engine.prefill.waiting) + len(engine.inbox) < 4:
            i += 1
            hostile(engine, policy, i)
        engine.step()
        if any("unlucky" in rids for rids in engine.prefills):
            return engine.steps - begun
    return None


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_stream_of_preferred_requests_starves_no_other(tiny: Path, policy: str, depth: int) -> None:
    """Each step takes a second: at the bound of 30 s one request runs, which takes less than 5 s more."""
    steps = steps_until_served(tiny, policy, bound=30.0, depth=depth)
    assert steps is not None
    assert steps <= 35


@pytest.mark.parametrize("policy", ["lpm", pytest.param("priority", marks=pytest.mark.deep)])
def test_without_the_bound_preferred_requests_starve_others(tiny: Path, policy: str) -> None:
    assert steps_until_served(tiny, policy, bound=1e9, depth=0) is None


@pytest.mark.parametrize("policy", POLICIES)
def test_one_computes_a_shared_prefix_and_the_others_hit(tiny: Path, policy: str) -> None:
    engine = Timed(tiny, schedule_policy=policy)
    shared = prompt(1, 64)
    for i in range(6):
        engine.submit(str(i), shared + prompt(10 + i, 5), max_new_tokens=3, priority=i if policy == "priority" else 0)
    engine.submit("other", prompt(2, 50), max_new_tokens=3)
    engine.run()
    assert len(engine.prefills[0]) == 2
    assert "other" in engine.prefills[0]
    assert sorted(engine.last(str(i)).cached_tokens for i in range(6)) == [0] + [64] * 5
    assert engine.stats.total_prefill_tokens == 69 + 5 * 5 + 50


@pytest.mark.parametrize("mixed_chunk", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_answers_do_not_depend_on_the_policy(tiny: Path, policy: str, mixed_chunk: bool) -> None:
    asked = {str(i): (prompt(i % 3, 20 + 9 * (i % 3)) + prompt(50 + i, 1 + i), 3 + i % 5) for i in range(14)}
    quiet = Harness(tiny, max_total_tokens=4096)
    alone = {rid: quiet.generate(rid, ids, max_new_tokens=new) for rid, (ids, new) in asked.items()}
    engine = Harness(
        tiny,
        schedule_policy=policy,
        mixed_chunk=mixed_chunk,
        max_total_tokens=160,
        max_running_requests=4,
        chunked_prefill_size=16,
        overlap_depth=1,
    )
    for rid, (ids, new) in asked.items():
        engine.submit(rid, ids, max_new_tokens=new, priority=int(rid) % 4 if policy == "priority" else 0)
        engine.step()
    engine.run()
    assert {rid: engine.tokens(rid) for rid in asked} == alone
