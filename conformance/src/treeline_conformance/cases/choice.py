"""P1 to P10 and P12 of the endpoint picker protocol: the choice and its report."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Any, Final

from treeline_conformance.bench import SETTLE_S, Bench
from treeline_conformance.case import ALL_MODES, case
from treeline_conformance.cases.bodies import as_json
from treeline_conformance.messages import DESTINATION, NO_HINT, Mode
from treeline_conformance.pods import Pod
from treeline_conformance.proxy import Answer
from treeline_conformance.verdict import Failed, Level, Need, NotApplicable

MUST, SHOULD, MAY = Level.MUST, Level.SHOULD, Level.MAY
_ASKED: Final = 6
"""Number of requests where a single answer could be luck."""


@case("P1.process", MUST, "The service envoy.service.ext_proc.v3.ExternalProcessor answers Process.")
async def process(bench: Bench, _mode: Mode) -> None:
    (await bench.ask()).routed()


@case("P2.full-duplex", MUST, "A body that comes in pieces is returned whole, piece by piece, with one end.")
async def full_duplex(bench: Bench, mode: Mode) -> None:
    answer = await bench.ask(mode, piece=16)
    answer.routed()
    for rule in ("streamed", "order", "eos"):
        if rule in answer.reading.faults:
            raise Failed(answer.reading.faults[rule])
    sent, got = answer.asking.body or b"", answer.upstream_body
    if got != sent and as_json(got) != as_json(sent):  # another case judges whether bytes may be rewritten
        raise Failed(f"{len(sent)} bytes came back as {len(got)} others")


# --- P3 to P6: subsets ------------------------------------------------------------------------------------------------


async def _within(bench: Bench, mode: Mode, hint: Any, allowed: Iterable[str], **asking: Any) -> None:
    """Check that every endpoint of the list is one of these, in each of several answers."""
    expected = set(allowed)
    for _ in range(_ASKED):
        answer = await bench.ask(mode, hint=hint, **asking)
        answer.routed()
        if not set(answer.destinations) <= expected:
            raise Failed(f"{','.join(answer.destinations)} is not within {','.join(sorted(expected))}")


@case(
    "P3.on-headers",
    SHOULD,
    "A subset hint that comes with the headers alone narrows the choice.",
    gie15="does not see it",
)
async def hint_on_headers(bench: Bench, mode: Mode) -> None:
    endpoint = bench.pods[1].endpoint
    await _seen_or_gie(bench, mode, [endpoint], {endpoint}, hint_on=frozenset({"headers"}))


@case("P3.on-body", SHOULD, "So does one that comes with the body alone.")
async def hint_on_body(bench: Bench, mode: Mode) -> None:
    endpoint = bench.pods[1].endpoint
    await _within(bench, mode, [endpoint], [endpoint], hint_on=frozenset({"body"}))


@case("P4.list", MUST, "With a list of ip:port, only these are chosen.", modes=ALL_MODES)
async def subset_list(bench: Bench, mode: Mode) -> None:
    for pod in bench.pods:
        await _within(bench, mode, [pod.endpoint], [pod.endpoint])
    two = [pod.endpoint for pod in bench.pods[1:]]
    await _within(bench, mode, two, two)


@case("P4.header-only", MUST, "A request without a body is bound by the subset, too.", gie15="picks any pod")
async def subset_without_body(bench: Bench, mode: Mode) -> None:
    await _seen_or_gie(bench, mode, [bench.pods[2].endpoint], {bench.pods[2].endpoint}, body=None, method="GET")


@case("P4.comma-text", SHOULD, "One text with commas is read as a list.", gie15="does not read it and picks any pod")
async def subset_text(bench: Bench, mode: Mode) -> None:
    one, two = bench.pods[1].endpoint, bench.pods[2].endpoint
    await _seen_or_gie(bench, mode, f" {one} , {two}", {one, two})


@case("P4.comma-in-list", SHOULD, "A text with commas inside the list is read as several.", gie15="does not split it")
async def subset_text_in_list(bench: Bench, mode: Mode) -> None:
    one, two = bench.pods[1].endpoint, bench.pods[2].endpoint
    await _seen_or_gie(bench, mode, [f"{one},{two}"], {one, two})


@case("P4.bare-ip", SHOULD, "An address without a port stands for all its ports.")
async def subset_bare_ip(bench: Bench, mode: Mode) -> None:
    await _within(bench, mode, [bench.pods[1].ip], bench.pods[1].endpoints)


@case("P4.among-strangers", MUST, "Entries of the list that are no endpoints of the pool leave the others.")
async def subset_with_strangers(bench: Bench, mode: Mode) -> None:
    hint = ["192.0.2.7:8000", bench.pods[0].endpoint, "192.0.2.8:8000"]
    await _within(bench, mode, hint, [bench.pods[0].endpoint])


@case(
    "P4.with-junk",
    SHOULD,
    "An entry that is no address does not make the choice wider.",
    gie15="with a number in it, any pod",
)
async def subset_with_junk(bench: Bench, mode: Mode) -> None:
    hint = [17, bench.pods[0].endpoint, True, "", "no address"]
    await _seen_or_gie(bench, mode, hint, {bench.pods[0].endpoint})


async def _seen_or_gie(bench: Bench, mode: Mode, hint: Any, allowed: set[str], **asking: Any) -> None:
    """Check that the choice is within these; GIE 1.5 goes outside or refuses."""
    inside = True
    for _ in range(2 * _ASKED):
        answer = await bench.ask(mode, hint=hint, **asking)
        inside = inside and answer.refusal is None and set(answer.destinations) <= allowed
    bench.judge("within" if inside else "outside or refused", spec="within", gie15="outside or refused", what="chosen")


@case("P5.empty-list", MUST, "An empty subset is answered 503.", modes=ALL_MODES)
async def empty_subset(bench: Bench, mode: Mode) -> None:
    await _refused(bench, mode, 503, hint=[])


@case("P5.unmatched", MUST, "A subset without an endpoint of the pool is answered 503.", modes=ALL_MODES)
async def unmatched_subset(bench: Bench, mode: Mode) -> None:
    await _refused(bench, mode, 503, hint=["192.0.2.7:8000"])


@case(
    "P5.wrong-port", MUST, "Another port of an endpoint's address is no endpoint: 503.", gie15="looks at the IP alone"
)
async def wrong_port(bench: Bench, mode: Mode) -> None:
    host, _, port = bench.pods[0].endpoint.rpartition(":")
    seen = await bench.chosen(mode=mode, hint=[f"{host}:{int(port) + 1}"])
    bench.judge(seen, spec="503", gie15=bench.pods[0].endpoint, what="chosen")


@case("P5.header-only", MUST, "An empty subset is answered 503 for a request without a body.", gie15="any pod")
async def empty_subset_without_body(bench: Bench, mode: Mode) -> None:
    seen = await bench.chosen(mode=mode, hint=[], body=None, method="GET")
    routed = seen in bench.endpoints
    bench.judge("any pod" if routed else seen, spec="503", gie15="any pod", what="answered")


@case("P5.unreadable", SHOULD, "A hint that cannot be read (a number) does not make the choice wider.", gie15="any pod")
async def unreadable_subset(bench: Bench, mode: Mode) -> None:
    seen = await bench.chosen(mode=mode, hint=8000)
    bench.judge("any pod" if seen in bench.endpoints else seen, spec="503", gie15="any pod", what="answered")


async def _refused(bench: Bench, mode: Mode, status: int, **asking: Any) -> Answer:
    answer = await bench.ask(mode, **asking)
    refusal = answer.refused()
    if refusal.status != status:
        raise Failed(
            f"refused with {refusal.status} instead of {status}: {refusal.body[:200].decode(errors='replace')}"
        )
    return answer


@case("P6.of-the-pool", MUST, "Without a subset an endpoint of the pool is chosen, never another.", modes=ALL_MODES)
async def of_the_pool(bench: Bench, mode: Mode) -> None:
    await _within(bench, mode, NO_HINT, bench.endpoints)


@case(
    "P6.not-selected", MUST, "A pod that the pool's selector does not match is never chosen.", needs=[Need.KUBERNETES]
)
async def not_selected(bench: Bench, mode: Mode) -> None:
    stranger = Pod("stranger", "127.0.0.9", bench.pods[0].ports)
    await stranger.start()
    try:
        async with bench.besides(stranger, labels={"app": "another"}):
            for _ in range(3 * _ASKED):
                if (seen := await bench.chosen(mode=mode)) not in bench.endpoints:
                    raise Failed(f"answered {seen}")
            if (seen := await bench.chosen(mode=mode, hint=[stranger.endpoint])) == stranger.endpoint:
                raise Failed(f"{seen} is chosen where it alone is allowed")
    finally:
        await stranger.stop()


# --- P7 to P9: the report of the choice -------------------------------------------------------------------------------


@case("P7.header-and-metadata", MUST, "The choice is in the header and in dynamic metadata.", modes=ALL_MODES)
async def header_and_metadata(bench: Bench, mode: Mode) -> None:
    _told(await bench.ask(mode))


@case("P7.header-only", MUST, "The same for a request without a body.")
async def header_and_metadata_without_body(bench: Bench, mode: Mode) -> None:
    _told(await bench.ask(mode, body=None, method="GET"))


def _told(answer: Answer) -> None:
    answer.routed()
    reading = answer.reading
    if reading.header is None:
        raise Failed(reading.faults.get("late_header", f"no header {DESTINATION}"))
    if reading.metadata is None:
        raise Failed("no dynamic metadata envoy.lb with the destination")


@case("P7.overwrites", MUST, "A destination that the client has sent is overwritten, not added to.")
async def overwrites(bench: Bench, mode: Mode) -> None:
    answer = await bench.ask(mode, headers={DESTINATION: "192.0.2.7:8000"})
    if answer.routed() not in bench.endpoints:
        raise Failed(f"{answer.destinations[0]} is what the client asked for")
    if "append" in answer.reading.faults:
        raise Failed(answer.reading.faults["append"])
    if "192.0.2.7:8000" in answer.destinations:
        raise Failed("the client's endpoint is in the list")


@case("P7.action", MUST, "The destination is set whether the client has sent one or not.", modes=ALL_MODES)
async def action(bench: Bench, mode: Mode) -> None:
    answer = await bench.ask(mode)
    if "action" in answer.reading.faults:
        raise Failed(answer.reading.faults["action"])
    answer.routed()


@case("P8.form", MUST, "The value is ip:port, or several in one text with commas, none twice.", modes=ALL_MODES)
async def form(bench: Bench, mode: Mode) -> None:
    answer = await bench.ask(mode)
    answer.routed()
    for entry in answer.destinations:
        host, _, port = entry.rpartition(":")
        try:
            ipaddress.ip_address(host.strip("[]"))
        except ValueError:
            raise Failed(f"{entry!r} is no ip:port") from None
        if not port.isdecimal() or (":" in host) != host.startswith("["):
            raise Failed(f"{entry!r} is no ip:port")
    if len(set(answer.destinations)) != len(answer.destinations):
        raise Failed(f"an endpoint is there twice: {','.join(answer.destinations)}")


@case("P8.fallbacks", MAY, "A list has more than one endpoint, for proxies that retry on the next one.")
async def fallbacks(bench: Bench, mode: Mode) -> None:
    answer = await bench.ask(mode)
    answer.routed()
    if len(answer.destinations) < 2:
        raise Failed("one endpoint, and none to fall back to")


@case(
    "P8.ipv6",
    MUST,
    "An IPv6 address has brackets, also for a request without a body.",
    needs=[Need.KUBERNETES],
    gie15="none for a request without a body",
)
async def ipv6(bench: Bench, mode: Mode) -> None:
    pod = Pod("pod-v6", "::1", bench.pods[0].ports[:1])
    try:
        await pod.start()
    except OSError as error:
        raise NotApplicable(f"there is no IPv6 here: {error}") from None
    try:
        async with bench.without(*bench.pods), bench.besides(pod):

            async def alone() -> bool:
                return pod.ip in await bench.chosen(mode=mode)

            await bench.until(alone, "the pod is chosen")
            seen = [(await bench.ask(mode, **asking)).routed() for asking in ({}, {"body": None, "method": "GET"})]
            bare = f"{pod.ip}:{pod.ports[0]}"
            bench.judge(seen, spec=[pod.endpoint] * 2, gie15=[pod.endpoint, bare], what="with and without a body")
    finally:
        await pod.stop()


@case("P9.equal", MUST, "Header and metadata never differ.", modes=ALL_MODES)
async def equal(bench: Bench, mode: Mode) -> None:
    for asking in ({}, {}, {"hint": [bench.pods[1].endpoint]}, {"body": None, "method": "GET"}):
        reading = (await bench.ask(mode, **asking)).reading
        if reading.header != reading.metadata:
            raise Failed(f"header {reading.header!r}, metadata {reading.metadata!r}")


# --- P10, P12 ---------------------------------------------------------------------------------------------------------


@case("P10.none-ready", MUST, "When no pod is ready, the answer is 503.", modes=ALL_MODES)
async def none_ready(bench: Bench, mode: Mode) -> None:
    async with bench.unready(*bench.pods):

        async def refused() -> bool:
            return await bench.chosen(mode=mode) not in bench.endpoints

        await bench.until(refused, "requests are refused", SETTLE_S)
        await _refused(bench, mode, 503)


@case(
    "P10.no-pods",
    MUST,
    "When there are no pods, a request without a body is answered 503.",
    needs=[Need.KUBERNETES],
    gie15="500",
)
async def no_pods(bench: Bench, mode: Mode) -> None:
    async with bench.without(*bench.pods):

        async def refused() -> bool:
            return await bench.chosen(mode=mode, body=None, method="GET") not in bench.endpoints

        await bench.until(refused, "requests are refused", SETTLE_S)
        seen = await bench.chosen(mode=mode, body=None, method="GET")
        bench.judge(seen, spec="503", gie15="500", what="answered")


@case("P12.one-pool", MUST, "All endpoints of a list are of the pool, and in the order in which they are to be tried.")
async def one_pool(bench: Bench, mode: Mode) -> None:
    async with bench.unready(bench.pods[0]):
        await bench.until_gone(bench.pods[0], mode)
        await _within(bench, mode, NO_HINT, [pod.endpoint for pod in bench.pods[1:]])
