"""Requests in three forms on a simulated fleet: whole, with a prompt computed apart, with pages of another endpoint."""

import random
from collections.abc import Sequence

import pytest
from treeline_sim.model.engine import Engine, EngineConfig
from treeline_sim.model.speed import LLAMA_8B_H200
from treeline_sim.model.text import Text
from treeline_sim.routers import Answer, Route, Router, TraceRequest
from treeline_sim.run import Plan, simulate
from treeline_sim.simulation import Faults, FleetConfig, Outcome, Sharing, Simulation
from treeline_sim.traces import TRACES

ENGINE = EngineConfig(kv_tokens=60_000, block_size=16)
RNG = random.Random(1)
LONG = Text(16).extended(8000, RNG)


class Scripted(Router):
    """Routes by a list, and remembers what it hears."""

    def __init__(self, *routes: Route) -> None:
        self.routes, self.prefilled, self.answers = list(routes), list[float | None](), list[Answer]()

    def route(self, request: TraceRequest, now: float) -> Route:
        return self.routes.pop(0)

    def on_prefilled(self, ticket: object, took_s: float | None, now: float) -> None:
        self.prefilled.append(took_s)

    def on_answer(self, ticket: object, answer: Answer, now: float) -> None:
        self.answers.append(answer)


def ask(prompt: Text, at: float = 0.0, output: int = 100) -> TraceRequest:
    return TraceRequest(at, prompt, prompt.extended(output, RNG), output)


def play(
    requests: Sequence[TraceRequest],
    *routes: Route,
    sharing: Sharing | None = None,
    faults: Faults | None = None,
    engine: EngineConfig = ENGINE,
) -> tuple[Simulation, Outcome, Scripted]:
    router = Scripted(*routes)
    config = FleetConfig(engine, 2, sharing=sharing or Sharing(), faults=faults or Faults())
    simulation = Simulation(config, lambda _engines, _number: router)
    return simulation, simulation.run(requests), router


def test_a_prompt_apart_is_computed_by_one_engine_and_answered_by_the_other() -> None:
    simulation, outcome, router = play([ask(LONG)], Route(1, None, "apart", 0))
    prefill, decode = simulation.engines
    assert prefill is not None
    assert decode is not None
    assert (prefill.computed_tokens, prefill.output_tokens) == (8000, 1)
    assert decode.computed_tokens == 16, "the last block, since a request needs a token to compute"
    (served,) = outcome.served
    assert (served.endpoint, served.form, served.cached_tokens) == (1, "apart", 7984)
    assert router.prefilled == [pytest.approx(LLAMA_8B_H200.prefill_s(8000) + 0.001)]
    assert [answer.ttft_s for answer in router.answers] == [served.ttft_s]
    decode.check()


def ttft_s(form: str, **sharing: float) -> float:
    if form == "pull":
        _, outcome, _ = play(
            [ask(LONG), ask(LONG, 5.0)],
            Route(0),
            Route(1, None, "pull", 0),
            sharing=Sharing(**sharing),  # type: ignore[arg-type]
        )
    else:
        _, outcome, _ = play([ask(LONG)], Route(1, None, "apart", 0), sharing=Sharing(**sharing))  # type: ignore[arg-type]
    found = outcome.served[-1].ttft_s
    assert found is not None
    return found


def test_only_the_last_pages_of_a_prompt_apart_travel_after_it() -> None:
    whole, tail = ttft_s("apart", tail_tokens=8000), ttft_s("apart", tail_tokens=1000)
    assert whole - tail == pytest.approx(20e-6 * 7000)
    slow = ttft_s("apart", tail_tokens=1000, transfer_s=1e-3)
    assert slow > 8.0, "pages cannot leave before the request came"


def test_pages_that_are_pulled_all_travel() -> None:
    assert ttft_s("pull", tail_tokens=0) == ttft_s("pull")
    assert ttft_s("pull", transfer_s=120e-6) - ttft_s("pull") == pytest.approx(100e-6 * 8000)


def test_an_endpoint_sends_the_pages_of_one_prompt_after_another() -> None:
    other = Text(16).extended(8000, RNG)
    both = [ask(LONG), ask(other, 2.0), ask(LONG, 5.0), ask(other, 5.0)]
    pull = Route(1, None, "pull", 0)
    _, outcome, _ = play(both, Route(0), Route(0), pull, pull)
    first, second = (served.ttft_s for served in outcome.served[2:])
    assert first is not None
    assert second == pytest.approx(first + 20e-6 * 8000, rel=0.1)


def test_an_engine_answers_a_pull_twice_between_its_steps() -> None:
    busy = [ask(LONG), *(ask(Text(16).extended(8000, RNG), 5.0 + 0.001 * n, 2) for n in range(3)), ask(LONG, 5.01)]
    _, outcome, _ = play(busy, Route(0), Route(0), Route(0), Route(0), Route(1, None, "pull", 0))
    late = outcome.served[-1].ttft_s
    assert late is not None
    assert late > 0.01 + 20e-6 * 7984 + 1.5 * LLAMA_8B_H200.prefill_s(8000)


def test_a_prompt_whose_engine_dies_is_computed_by_the_one_that_answers() -> None:
    _, outcome, router = play([ask(LONG)], Route(1, None, "apart", 0), faults=Faults(engines=((0, 0.01),)))
    assert router.prefilled == [None]
    (served,) = outcome.served
    assert (served.error, served.cached_tokens) == ("", 0)
    assert served.ttft_s is not None


@pytest.mark.parametrize("mixed", [True, False])
def test_the_time_between_tokens_shows_what_a_long_prompt_does_to_running_requests(mixed: bool) -> None:
    engine = EngineConfig(kv_tokens=60_000, block_size=16, mixed=mixed)
    long_s = LLAMA_8B_H200.prefill_s(8000)
    short = ask(Text(16).extended(100, RNG), output=200)
    for form, least, most in ((Route(1), 0.9, 1.2), (Route(1, None, "apart", 0), 0.0, 0.2)):
        _, outcome, _ = play([short, ask(LONG, 0.1, 2)], Route(1), form, engine=engine)
        assert least < max(outcome.gaps) / 1e5 / long_s < most
        assert sum(outcome.gaps.values()) == 200, "all tokens but the first of each request"


def test_held_blocks_are_as_many_as_have_room() -> None:
    engine = Engine(EngineConfig(kv_tokens=160, block_size=16))
    engine.hold(LONG, 4)
    assert engine.cache.cached == 4
    engine.hold(LONG, len(LONG.blocks))
    assert engine.cache.cached == 10
    engine.check()


def test_the_pickers_own_code_chooses_the_forms() -> None:
    plan = Plan(TRACES["zipf"], requests=300, sharing=Sharing(2))
    found = simulate(plan, "predicted_ttft")
    assert found == simulate(plan, "predicted_ttft")
    assert found.errors == 0
    assert min(found.forms["apart"], found.forms["whole"]) > 10, "long prompts apart, cached ones whole"
    always = simulate(Plan(TRACES["zipf"], requests=300, sharing=Sharing(2, always=True)), "predicted_ttft")
    assert always.forms == {"apart": 300}
    assert always.itl_p99_ms < found.itl_p99_ms < simulate(Plan(TRACES["zipf"], requests=300), "random").itl_p99_ms
