"""The picker chooses as the slow reference picker does, after any history."""

from __future__ import annotations

import contextlib
import random
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from support import slow_pick
from support.epp_core import KEYS, WIDTH, Prompt
from treeline_epp.endpoints.load import EngineLoad
from treeline_epp.endpoints.scraped import ScrapedLoad
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.index.index import Index
from treeline_epp.index.limits import IndexLimits
from treeline_epp.index.pods import NO_HIT
from treeline_epp.picking.decision import Lease, NoEndpoints, Outcome, Saturated
from treeline_epp.picking.filters import Saturation, rows_left
from treeline_epp.picking.picker import Picker, PickerConfig
from treeline_epp.picking.request import Request
from treeline_epp.picking.score import Work, waits_and_costs
from treeline_wire.events import AllBlocksCleared, BlockRemoved, BlockStored
from treeline_wire.load import LoadStat, TreelineLoad

MEDIA = (None, None, None, "CPU", "DISK")
MODELS = (("m",), ("m", "n"), ("n",), ())
PROMPTS = [Prompt([head] * 4 * WIDTH + [tail] * 3 * WIDTH) for head in range(3) for tail in range(3)]


class World:
    """A picker with a random history, by a seed."""

    def __init__(self, seed: int, size: int, limit_s: float | None, limit: int | None) -> None:
        """Set at most one limit: a wait from which an endpoint is full, or a number of requests."""
        self.rng = random.Random(seed)
        limits = IndexLimits(prediction_life_s=1.0, eventless_life_s=3.0, aged_life_s=1.0, hit_cap_life_s=1.0)
        self.limits = limit_s, limit
        by_requests = None if limit is None else Saturation(False, limit)
        saturation = by_requests if limit_s is None else Saturation(True, limit_s)
        config = PickerConfig(fallbacks=2, max_ttft_s=0.5, seed=seed, saturation=saturation, scored=4)
        self.picker = Picker(config, Index(limits))
        self.now = 100.0
        self.made = 0
        self.leases: list[Lease] = []
        for _ in range(size):
            self.join()

    def join(self) -> None:
        rng, number = self.rng, self.made
        self.made += 1
        spec = EndpointSpec(
            f"e{number}",
            f"10.0.{number // 250}.{number % 250}:{rng.choice((8000, 8001))}",
            pool=rng.choice(("p", "q")),
            models=rng.choice(MODELS),
        )
        self.picker.add_endpoint(spec, ready=rng.random() < 0.9, ranks=rng.choice((1, 1, 3)))

    def any(self) -> str:
        return self.rng.choice(list(self.picker.endpoints) or ["nobody"])

    def happen(self) -> None:
        rng, picker = self.rng, self.picker
        self.now += rng.choice((0.0, 0.001, 0.04, 0.3))
        name = self.any()
        endpoint = picker.endpoints.get(name)
        what = rng.randrange(16)
        if what == 0:
            self.join()
        elif what == 1 and rng.random() < 0.3:
            picker.remove_endpoint(name)
        elif what == 2:
            picker.set_ready(name, rng.random() < 0.8)
        elif what == 3:
            picker.set_draining(name, rng.random() < 0.2)
        elif what in (4, 5, 6):
            if endpoint is not None:
                endpoint.load.train_hits(rng.randrange(3), 3)
            picker.on_load(name, self.report(), self.now)
        elif what == 7:
            picker.on_tick(self.now)
        elif what in (8, 9) and endpoint is not None:
            picker.index.apply(rng.choice(endpoint.pods), self.stored(), KEYS)
        elif what == 10 and endpoint is not None:
            gone = rng.choice(PROMPTS).hashes[-2:]
            picker.index.apply(rng.choice(endpoint.pods), BlockRemoved(gone, rng.choice(MEDIA)), KEYS)
        elif what == 11 and endpoint is not None:
            self.upset(endpoint)
        elif what in (12, 13) and self.leases:
            self.finish_one()
        else:
            with contextlib.suppress(NoEndpoints, Saturated):
                self.leases.append(picker.reserve(picker.pick(self.ask(), self.now), self.now))

    def stored(self) -> BlockStored:
        """Return an event that a prompt, or its beginning, is on the device or in a tier."""
        rng = self.rng
        return rng.choice(PROMPTS).stored(0, rng.choice((2, 5, None)), medium=rng.choice(MEDIA))

    def upset(self, endpoint) -> None:  # type: ignore[no-untyped-def]
        index, pod = self.picker.index, self.rng.choice(endpoint.pods)
        match self.rng.choice((0, 1, 2, 2, 2, 3, 4)):
            case 0:
                index.apply(pod, AllBlocksCleared(), KEYS)
            case 1:
                index.age(pod, self.now)
            case 2:
                prompt = self.rng.choice(PROMPTS)
                index.cap_hit(pod, None, prompt.key, WIDTH, self.now)
            case 3:
                index.begin_snapshot(pod)
                index.stage(pod, self.stored(), KEYS)
            case 4 if pod.staging:
                index.end_snapshot(pod)

    def finish_one(self) -> None:
        lease = self.leases.pop(self.rng.randrange(len(self.leases)))
        self.picker.close(
            lease,
            self.now,
            self.rng.choice(list(Outcome)),
            ttft_s=self.rng.choice((None, 0.1)),
            cached_tokens=self.rng.choice((None, 3 * WIDTH)),
            prompt_tokens=7 * WIDTH,
        )

    def report(self) -> EngineLoad:
        rng = self.rng
        if rng.random() < 0.3:
            steps = (1000.0 * self.now, self.now * rng.choice((4.0, 9.0)))
            usage, total = rng.random(), rng.choice((0, 1600))
            return ScrapedLoad(rng.choice((0, 3)), rng.choice((0, 0, 2)), usage, total, steps=steps)
        if rng.random() < 0.3:
            return LoadStat(num_running=rng.randrange(5), num_waiting_uncached_tokens=rng.choice((0, 0, 900)))
        return TreelineLoad(
            page_size=16,
            running=rng.choice((0, 0, 3, 8)),
            waiting=rng.choice((0, 0, 2)),
            max_running=rng.choice((0, 4, 8)),
            waiting_uncached_tokens=rng.choice((0, 0, 0, 5, 700, 20_000)),
            decode_step_ms=rng.choice((0.0, 4.0, 9.0)),
            decode_step_tokens=rng.choice((0.0, 1.0, 2.5)),
            prefill_tokens_per_s=rng.choice((0.0, 9_000.0, 10_000.0)),
            pages_total=rng.choice((0, 2, 100)),
            pages_used=rng.randrange(100),
            pages_cached=rng.randrange(40),
            host_tokens_per_s=rng.choice((0.0, 5_000.0, 90_000.0)),
            disk_tokens_per_s=rng.choice((0.0, 5_000.0, 30_000.0)),
            draining=rng.random() < 0.05,
        )

    def ask(self) -> Request:
        rng = self.rng
        prompt = rng.choice((None, *PROMPTS))
        subset = None
        if rng.random() < 0.2:
            specs = [endpoint.spec.address for endpoint in self.picker.endpoints.values()]
            some = rng.sample(specs, min(len(specs), rng.randrange(5)))
            subset = frozenset(address if rng.random() < 0.5 else address[:-5] for address in some)
        return Request(
            "id",
            model=rng.choice((None, "m", "n", "x")),
            key=prompt.key if prompt is not None else None,
            prompt_tokens_estimate=rng.choice((0, 50, 7 * WIDTH, 900)),
            key_tokens_estimate=rng.choice((None, 30)),
            max_output_tokens=rng.choice((None, 1, 500)),
            subset=subset,
            pool=rng.choice((None, None, "p", "q")),
            sheddable=rng.random() < 0.2,
            fork=rng.choice((0, 0, 1, 3, 200)),
        )


def costs_in_arrays(picker: Picker, request: Request, now: float) -> dict[str, tuple[float, ...]]:
    """Return cached tokens, waits and costs as a choice among many endpoints computes them."""
    picker._refresh(now)
    table, matches = picker._table, picker._match(request, now)
    rows, work = rows_left(request, table), Work.of(request, matches.values())
    columns = table.take(rows)
    cached, loads = work.held_at(picker.index, matches, rows, table)
    rates, uncached = picker._rates(columns, now), work.prompt_tokens - cached
    found = waits_and_costs(columns, rates, uncached, work.output_tokens, now, work.fork, loads)
    names = [table.at_row(row).spec.name for row in rows.tolist()]
    return dict(zip(names, zip(cached.tolist(), *(one.tolist() for one in found), strict=True), strict=True))


def check(world: World) -> None:
    picker, now, request = world.picker, world.now, world.ask()
    try:
        scored = slow_pick.scores(picker, request, now)
    except NoEndpoints:
        with pytest.raises(NoEndpoints):
            picker.pick(request, now)
        return
    assert costs_in_arrays(picker, request, now) == {
        s.candidate.spec.name: (s.candidate.cached_tokens, s.wait_s, s.later_s, s.cost_s) for s in scored
    }
    soonest_s = min(s.wait_s for s in scored)
    roomy = slow_pick.roomy(picker, scored, *world.limits, now)
    later_s = 0.0 if not roomy else picker.config.max_ttft_s
    if not roomy or (request.sheddable and soonest_s > later_s):
        with pytest.raises(Saturated) as caught:
            picker.pick(request, now)
        assert caught.value.retry_after_s == soonest_s - later_s
        return
    if world.limits[1] is not None:  # a full one is never chosen
        scored = roomy
    scored = slow_pick.with_all_followers(scored, now)
    decision = picker.pick(request, now)
    by_name = {s.candidate.spec.name: s for s in scored}
    assert decision.endpoint.name in slow_pick.equals_of(scored, now)
    for ranked in decision.ranked:
        slow = by_name[ranked.candidate.spec.name]
        assert ranked == replace(slow, follow_s=ranked.follow_s, cost_s=ranked.cost_s)
        assert (ranked.follow_s, ranked.cost_s) == pytest.approx((slow.follow_s, slow.cost_s))
    rest = sorted(s.cost_s for s in scored if s.candidate.spec.name != decision.endpoint.name)
    assert [s.cost_s for s in decision.ranked[1:]] == pytest.approx(rest[: len(decision.ranked) - 1])
    assert len(decision.ranked) == min(len(scored), 4)
    others = list(dict.fromkeys(s.candidate.spec.address for s in decision.ranked[1:]))
    assert [spec.address for spec in decision.fallbacks] == others[:2]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.integers(0, 1 << 32),
    st.integers(0, 90),
    st.sampled_from([(None, None), (0.2, None), (None, 2)]),
)
def test_the_choice_equals_the_slow_pickers(seed: int, size: int, limits: tuple[float | None, int | None]) -> None:
    world = World(seed, size, *limits)
    for _ in range(60):
        world.happen()
        check(world)
    world.picker.index.check()


def test_equal_endpoints_share_the_load_however_many_there_are() -> None:
    picker = Picker(PickerConfig(seed=3))
    for number in range(500):
        picker.add_endpoint(EndpointSpec(f"e{number}", f"10.0.0.1:{number + 1}"))
    request = Request("id", prompt_tokens_estimate=10)
    chosen = {picker.pick(request, 0.0).endpoint.name for _ in range(1_000)}
    assert len(chosen) > 400


@pytest.mark.parametrize("announced", [True, False])
def test_a_pick_among_hundreds_calls_hardly_more_functions_than_one_among_two(*, announced: bool) -> None:
    calls = {2: 0, 64: 0, 300: 0}
    for size in calls:
        picker = Picker(PickerConfig(seed=3))
        for number in range(size):
            picker.add_endpoint(EndpointSpec(f"e{number}", f"10.0.0.{number}:80", models=("m",)))
            picker.on_load(f"e{number}", TreelineLoad(running=number % 3, decode_step_ms=4.0 + number), 0.0)
            for prompt in PROMPTS[: 2 + number % 2]:
                pod = picker.endpoints[f"e{number}"].pod
                if announced:
                    picker.index.apply(pod, prompt.stored(), KEYS)
                else:
                    picker.index.predict(pod, None, prompt.key, NO_HIT, 0.0)
        request = Request("id", model="m", key=PROMPTS[2].key, prompt_tokens_estimate=7 * WIDTH)
        picker.pick(request, 0.1)

        def called(_frame: object, event: str, _of: object, size: int = size) -> None:
            calls[size] += event in ("call", "c_call")

        sys.setprofile(called)
        try:
            picker.pick(request, 0.2)
        finally:
            sys.setprofile(None)
    assert calls[64] < 2 * calls[2], calls
    assert calls[300] <= calls[64] + 5, calls


def test_a_free_row_is_reused_by_another_endpoint() -> None:
    picker = Picker()
    for number in range(200):
        picker.add_endpoint(EndpointSpec("old", f"10.0.0.1:{number + 1}", uid=str(number)))
    assert picker.pick(Request("id"), 0.0).endpoint.address == "10.0.0.1:200"
    picker.remove_endpoint("old")
    with pytest.raises(NoEndpoints):
        picker.pick(Request("id"), 0.0)
