"""The suite itself: a picker without flaws passes, and each flaw is found by its own case."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest
import treeline_conformance.cases  # noqa: F401
from support.flawed_picker import FlawedPicker, serving
from treeline_bench.api_server import ApiServer
from treeline_conformance.bench import Bench
from treeline_conformance.case import CASES, select
from treeline_conformance.messages import Mode
from treeline_conformance.picker import Picker, Target
from treeline_conformance.pods import pods
from treeline_conformance.run import judged
from treeline_conformance.verdict import Level, Outcome, Verdict, When

WORLD = ("pods", "P10", "P12", "end")  # what changes the world or ends the picker, which this one does not follow


async def outcomes(*names: str, flaws: tuple[str, ...] = (), patience_s: float = 60.0) -> dict[str, Outcome]:
    """Run some cases and return their outcomes. The pods do not listen: this picker never asks them."""
    everyone = pods()
    async with serving(FlawedPicker([pod.endpoint for pod in everyone], *flaws)) as port:
        target = Target("flawed", address=f"127.0.0.1:{port}")
        bench = Bench(Picker(target, target.address, "", ""), everyone, ApiServer(), patience_s)
        bench.served.add(Mode.DUPLEX)
        return {one.name: await judged(one, bench) for one in select(names)}


async def test_a_picker_without_flaws_passes_all_cases_of_its_mode() -> None:
    names = [
        one.name
        for one in CASES
        if (one.level is Level.MUST or one.name in ("rules.prefix", "streams.cancelled-load"))
        and one.mode is Mode.DUPLEX
        and one.when is When.RUNNING
        and one.name.partition(".")[0] not in WORLD
    ]
    found = await outcomes(*names)
    failed = {name: outcome.why for name, outcome in found.items() if outcome.verdict is Verdict.FAIL}
    assert failed == {}
    passed = [name for name, outcome in found.items() if outcome.verdict is Verdict.PASS]
    assert len(passed) > 30


FLAWS = {
    "answers early": ("flow.withheld-headers", "flow.order"),
    "ignores subsets": ("P4.list@duplex", "P5.empty-list@duplex", "P5.header-only"),
    "grpc status": ("P5.empty-list@duplex",),
    "writes anew": ("bodies.bytes",),
    "forgets trailers": ("flow.request-trailers@duplex",),
    "wrong order": ("flow.order",),
    "value": ("flow.raw-value@duplex",),
    "appends": ("P7.overwrites",),
    "metadata differs": ("P9.equal@duplex",),
    "no metadata": ("P7.header-and-metadata@duplex",),
    "long chunks": ("flow.chunks",),
    "ends often": ("flow.one-end",),
    "adds if absent": ("P7.action@duplex",),
    "overwrites if there": ("P7.action@duplex",),
    "no affinity": ("rules.prefix",),
    "leaks leases": ("streams.cancelled-load",),
    "loses a byte": ("bodies.1kb@duplex", "flow.withheld-headers"),
}


@pytest.mark.parametrize("flaw", FLAWS)
async def test_a_flaw_is_found_by_its_case_and_the_exchange_is_kept(flaw: str) -> None:
    names = FLAWS[flaw]
    found = await outcomes(*names, flaws=(flaw,), patience_s=0.3)
    about = names[0]
    assert found[about].verdict is Verdict.FAIL, found
    assert found[about].why
    assert {"proxy", "picker"} <= {entry["who"] for entry in found[about].exchange}


@pytest.mark.parametrize(
    ("flaw", "words"),
    [
        ("silent", "waited 0.3 s"),
        ("hangs up", "ended before|the stream ended with"),
        ("endless", "does not end"),
        ("garbage", "no ProcessingResponse|INTERNAL"),
    ],
)
async def test_a_silent_or_broken_picker_fails_in_time_with_a_message(flaw: str, words: str) -> None:
    (found,) = (await outcomes("P1.process", flaws=(flaw,), patience_s=0.3)).values()
    assert found.verdict is Verdict.FAIL
    assert re.search(words, found.why), found.why


async def test_a_picker_that_has_ended_gets_no_more_cases() -> None:
    everyone = pods()
    picker = Picker(Target("ended", command="true"), "127.0.0.1:1", "", "")
    with tempfile.TemporaryDirectory() as folder:
        await picker.start(["false"], Path(folder, "kubeconfig"), Path(folder, "log"))
        assert await picker.ended(10)
    bench = Bench(picker, everyone, ApiServer(), 0.3)
    (case,) = select(["P1.process"])
    found = await judged(case, bench)
    assert (found.verdict, found.why) == (Verdict.FAIL, "the picker has ended, with status 1")


async def test_known_behaviour_of_gie_fails_the_protocol_but_not_its_own_column() -> None:
    (found,) = (await outcomes("bodies.bytes", flaws=("writes anew",))).values()
    assert (found.verdict, found.gie15) == (Verdict.FAIL, Verdict.PASS)
    (found,) = (await outcomes("bodies.bytes")).values()
    assert (found.verdict, found.gie15) == (Verdict.PASS, Verdict.FAIL)
    (found,) = (await outcomes("P9.equal@duplex")).values()
    assert (found.verdict, found.gie15) == (Verdict.PASS, Verdict.PASS)


async def test_a_case_without_its_prerequisites_is_not_applicable_and_says_why() -> None:
    found = await outcomes("P14.liveness", "P10.no-pods", "end.drain", "P4.list@buffered")
    assert {outcome.verdict for outcome in found.values()} == {Verdict.NOT_APPLICABLE}
    assert all(outcome.why for outcome in found.values())


def test_case_names_are_distinct_and_cover_all_fourteen_points_of_the_protocol() -> None:
    names = [one.name for one in CASES]
    assert len(set(names)) == len(names)
    assert {f"P{at}" for at in range(1, 15)} <= {name.partition(".")[0] for name in names}


def test_cases_are_chosen_by_name_group_and_mode() -> None:
    assert {one.name for one in select(["P9"])} == {
        f"P9.equal@{mode}" for mode in ("duplex", "buffered", "streamed", "none")
    }
    assert {one.name for one in select(["P4.list"])} == {
        f"P4.list@{mode}" for mode in ("duplex", "buffered", "streamed", "none")
    }
    assert all(one.mode is Mode.STREAMED for one in select(["@streamed"]))
    assert not any(one.name.startswith("P1.") for one in select(["P10"]))
    with pytest.raises(KeyError, match=r"no case is called 'P99'.*P4"):
        select(["P99"])
