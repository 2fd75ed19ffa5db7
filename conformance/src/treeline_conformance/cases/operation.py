"""P14, metrics, pods that come and go, and the picker's end."""

from __future__ import annotations

import asyncio
import functools
from typing import Final

import httpx
from treeline_bench.api_server import PODS, POOLS
from treeline_bench.processes import free_ports
from treeline_wire import envoy_pb2 as pb

from treeline_conformance import messages
from treeline_conformance.bench import POOL, SETTLE_S, Bench
from treeline_conformance.case import case
from treeline_conformance.messages import Mode
from treeline_conformance.pods import Pod
from treeline_conformance.verdict import Failed, Level, Need, When

MUST, SHOULD, MAY = Level.MUST, Level.SHOULD, Level.MAY
_EXT_PROC: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
_GAUGES_S: Final = 6.0
_COUNTERS_S: Final = 1.0
"""Gauges of a pool are computed every five seconds, counters when they count."""
_ACTIVE_PORTS: Final = "inference.networking.k8s.io/active-ports"
_LONGEST_PAGE: Final = 4 << 20
_END_S: Final = 15.0
_FAMILIES: Final = {
    "objective": ("inference_objective_request_total", "llm_d_epp_request_total"),
    "pool": ("inference_pool_ready_pods", "llm_d_epp_ready_endpoints"),
    "scheduler": ("inference_extension_scheduler_e2e_duration_seconds", "llm_d_epp_scheduler_e2e_duration_seconds"),
}
"""Metrics that dashboards need: the inference extension's name and llm-d's."""

# --- P14 --------------------------------------------------------------------------------------------------------------


async def _health(bench: Bench, name: str, *wanted: str) -> None:
    seen = await bench.picker.health(name)
    bench.said.append(("suite", f"gRPC health of {name!r}: {seen}"))
    if seen not in wanted:
        raise Failed(f"the health of {name!r} is {seen} instead of {' or '.join(wanted)}")


@case(
    "P14.before-sync",
    MUST,
    "Before pods and pool are known, readiness and the service's own name are not SERVING.",
    needs=[Need.HEALTH, Need.STARTED, Need.KUBERNETES],
    when=When.BEFORE,
)
async def before_sync(bench: Bench, _mode: Mode) -> None:
    for name in ("readiness", _EXT_PROC):
        seen = await bench.picker.health(name)
        bench.said.append(("suite", f"gRPC health of {name!r}: {seen}"))
        if seen == "SERVING":
            raise Failed(f"{name!r} is SERVING")


@case(
    "P14.alive-before-sync",
    SHOULD,
    "Before that, liveness is SERVING: nobody restarts a picker that waits for the API.",
    needs=[Need.HEALTH, Need.STARTED, Need.KUBERNETES],
    when=When.BEFORE,
)
async def alive_before_sync(bench: Bench, _mode: Mode) -> None:
    await _health(bench, "liveness", "SERVING")


@case("P14.liveness", MUST, "liveness is SERVING.", needs=[Need.HEALTH])
async def liveness(bench: Bench, _mode: Mode) -> None:
    await _health(bench, "liveness", "SERVING")


@case("P14.readiness", MUST, "readiness is SERVING once the picker can pick.", needs=[Need.HEALTH])
async def readiness(bench: Bench, _mode: Mode) -> None:
    await _health(bench, "readiness", "SERVING")


@case("P14.service", MUST, f"{_EXT_PROC} is as readiness is.", needs=[Need.HEALTH])
async def service(bench: Bench, _mode: Mode) -> None:
    await _health(bench, _EXT_PROC, "SERVING")


@case("P14.empty-name", SHOULD, "The empty name, which probes ask by default, is SERVING.", needs=[Need.HEALTH])
async def empty_name(bench: Bench, _mode: Mode) -> None:
    await _health(bench, "", "SERVING")


@case("P14.inference-extension", SHOULD, "inference-extension, which charts probe, is SERVING.", needs=[Need.HEALTH])
async def inference_extension(bench: Bench, _mode: Mode) -> None:
    await _health(bench, "inference-extension", "SERVING")


@case("P14.unknown-name", SHOULD, "A name that there is not is not SERVING.", needs=[Need.HEALTH], gie15="SERVING")
async def unknown_name(bench: Bench, _mode: Mode) -> None:
    seen = await bench.picker.health("conformance-suite")
    unknown = "unknown" if seen in ("NOT_FOUND", "SERVICE_UNKNOWN") else seen
    bench.judge(unknown, spec="unknown", gie15="SERVING", what="its health")


@case(
    "P14.ext-proc-port",
    SHOULD,
    "It is SERVING on the ext_proc port, where Envoy's cluster checks it.",
    needs=[Need.HEALTH],
)
async def ext_proc_port(bench: Bench, _mode: Mode) -> None:
    seen = await bench.picker.health(_EXT_PROC, at=bench.picker.address)
    if seen != "SERVING":
        raise Failed(f"it is {seen}")


@case("P14.watch", SHOULD, "Health can be watched, as load balancers do.", needs=[Need.HEALTH], gie15="UNIMPLEMENTED")
async def watch(bench: Bench, _mode: Mode) -> None:
    bench.judge(await bench.picker.watched_health(_EXT_PROC), spec="SERVING", gie15="UNIMPLEMENTED", what="Watch")


# --- metrics ----------------------------------------------------------------------------------------------------------


@case("metrics.page", MUST, "/metrics answers in Prometheus' format.", needs=[Need.METRICS])
async def page(bench: Bench, _mode: Mode) -> None:
    if "# TYPE " not in await _page(bench):
        raise Failed("there is no metric on it")


def _named(family: str) -> None:
    names = _FAMILIES[family]
    seconds = _GAUGES_S if family == "pool" else _COUNTERS_S

    async def named(bench: Bench, mode: Mode) -> None:
        (await bench.ask(mode)).routed()

        async def there() -> bool:
            text = await _page(bench)
            return any(f"# TYPE {name} " in text for name in names)

        await bench.until(there, f"{' or '.join(names)} is on the page", seconds)

    case(f"metrics.{family}", SHOULD, f"{names[0]}, or llm-d's {names[1]}, is there.", needs=[Need.METRICS])(named)


for _family in _FAMILIES:
    _named(_family)


async def _page(bench: Bench) -> str:
    text = ""
    url = f"http://{bench.picker.metrics_address}/metrics"
    try:
        async with (
            httpx.AsyncClient(trust_env=False, timeout=bench.patience_s) as client,
            client.stream("GET", url) as answer,
        ):
            if answer.status_code != 200:
                raise Failed(f"/metrics answers {answer.status_code}")
            async for part in answer.aiter_text():
                text += part
                if len(text) > _LONGEST_PAGE:
                    raise Failed(f"/metrics has more than {_LONGEST_PAGE:,} characters")
    except httpx.HTTPError as error:
        raise Failed(f"{type(error).__name__}: {error}") from None
    return text


# --- pods -------------------------------------------------------------------------------------------------------------


@case("pods.added", MUST, "A pod that comes is chosen.", needs=[Need.KUBERNETES])
async def added(bench: Bench, mode: Mode) -> None:
    async with bench.without(bench.pods[0]):
        await bench.until_gone(bench.pods[0], mode)
        bench.put_pod(bench.pods[0])

        async def back() -> bool:
            return await bench.chosen(mode=mode, hint=[bench.pods[0].endpoint]) == bench.pods[0].endpoint

        await bench.until(back, "a pod that is there again is chosen")


@case("pods.unready", MUST, "A pod that is not Ready is not chosen, with and without a subset.")
async def unready(bench: Bench, mode: Mode) -> None:
    async with bench.unready(bench.pods[0]):
        await bench.until_gone(bench.pods[0], mode)
        for _ in range(6):
            if bench.pods[0].endpoint in (await bench.ask(mode)).destinations:
                raise Failed("it is in the list again")


@case("pods.terminating", MUST, "A pod that is being deleted is not chosen.", needs=[Need.KUBERNETES])
async def terminating(bench: Bench, mode: Mode) -> None:
    pod = bench.pods[0]
    try:
        _put_terminating(bench, pod)
        await bench.until_gone(pod, mode)
    finally:
        bench.api.delete(PODS, pod.name)
        bench.put_pod(pod)
        await bench.settled()


def _put_terminating(bench: Bench, pod: Pod) -> None:
    bench.put_pod(pod)
    bench.api.mark_deleted(PODS, pod.name)


@case(
    "pods.ports",
    MUST,
    "With two target ports each port is an endpoint, and a subset tells them apart.",
    needs=[Need.KUBERNETES],
)
async def ports(bench: Bench, mode: Mode) -> None:
    first = bench.pods[0].ports[0]
    [second] = free_ports(1, addresses=[pod.ip for pod in bench.pods])
    others = [Pod(f"{pod.name}-second", pod.ip, (second,)) for pod in bench.pods]
    for other in others:
        await other.start()
    try:
        bench.put_pool(first, second)
        for pod in (*others, *bench.pods):

            async def chosen(endpoint: str = pod.endpoint) -> bool:
                return await bench.chosen(mode=mode, hint=[endpoint]) == endpoint

            await bench.until(chosen, f"{pod.endpoint} is chosen where it alone is allowed", SETTLE_S / 2)
    finally:
        bench.put_pool()
        for other in others:
            await other.stop()
        await bench.settled()


@case(
    "pods.active-ports", SHOULD, "A pod's annotation active-ports leaves its other ports out.", needs=[Need.KUBERNETES]
)
async def active_ports(bench: Bench, mode: Mode) -> None:
    pod = bench.pods[0]
    [second] = free_ports(1, addresses=[one.ip for one in bench.pods])
    endpoint = f"{pod.ip}:{second}"
    other = Pod("second", pod.ip, (second,))
    await other.start()
    try:
        bench.put_pod(pod, annotations={_ACTIVE_PORTS: str(second)})
        bench.put_pool(pod.ports[0], second)

        async def follows() -> bool:
            first = await bench.chosen(mode=mode, hint=[pod.endpoint])
            return first not in bench.endpoints and await bench.chosen(mode=mode, hint=[endpoint]) == endpoint

        await bench.until(follows, f"{endpoint} can be chosen, {pod.endpoint} cannot")
    finally:
        bench.put_pool()
        bench.put_pod(pod)
        await other.stop()
        await bench.settled()


@case("pods.relabelled", MUST, "A pod whose labels do not match any more is not chosen.", needs=[Need.KUBERNETES])
async def relabelled(bench: Bench, mode: Mode) -> None:
    pod = bench.pods[0]
    try:
        bench.put_pod(pod, labels={"app": "another"})
        await bench.until_gone(pod, mode)
    finally:
        bench.put_pod(pod)
        await bench.settled()


@case(
    "pods.pool-deleted",
    SHOULD,
    "When the pool is deleted nothing is routed; when it is back, all is.",
    needs=[Need.KUBERNETES],
)
async def pool_deleted(bench: Bench, mode: Mode) -> None:
    bench.api.delete(POOLS, POOL)
    try:

        async def nothing() -> bool:
            return await bench.chosen(mode=mode) not in bench.endpoints

        await bench.until(nothing, "nothing is routed")
    finally:
        bench.put_pool()
        await bench.settled()


@case(
    "pods.api-server-lost",
    SHOULD,
    "While the API server is away, requests are routed as before.",
    needs=[Need.KUBERNETES],
)
async def api_server_lost(bench: Bench, mode: Mode) -> None:
    await bench.api.stop()
    try:
        for _ in range(10):
            (await bench.ask(mode)).routed()
            await asyncio.sleep(0.1)
    finally:
        await bench.api.start()
        await bench.settled()


# --- the end ----------------------------------------------------------------------------------------------------------


@case(
    "end.drain",
    SHOULD,
    "After SIGTERM readiness is not SERVING, a response that is under way goes on, and the process ends within 15 s.",
    needs=[Need.STARTED],
    when=When.END,
)
async def drain(bench: Bench, mode: Mode) -> None:
    answer = await bench.ask(mode)
    answer.routed()
    stream = answer.stream
    fields = {":status": "200", "content-type": "text/event-stream"}
    await stream.send(pb.ProcessingRequest(response_headers=messages.headers(fields, end=False)))
    await stream.expect("response_headers")
    bench.picker.terminate()
    if bench.has(Need.HEALTH):
        await bench.until(functools.partial(_not_ready, bench), "readiness is not SERVING", 2.0)
    for at in range(3):
        await stream.send(pb.ProcessingRequest(response_body=messages.body(b"data: %d\n\n" % at, end=at == 2)))
        await stream.expect("response_body")
    await stream.half_close()
    if not await bench.picker.ended(_END_S):
        raise Failed(f"it runs {_END_S:g} s after SIGTERM")


async def _not_ready(bench: Bench) -> bool:
    return await bench.picker.health("readiness") != "SERVING"


@case("end.status", SHOULD, "Its exit status is 0.", needs=[Need.STARTED], when=When.END)
async def status(bench: Bench, _mode: Mode) -> None:
    bench.picker.terminate()
    if not await bench.picker.ended(_END_S):
        raise Failed(f"it runs {_END_S:g} s after SIGTERM")
    if bench.picker.status != 0:
        raise Failed(f"exit status {bench.picker.status}")
