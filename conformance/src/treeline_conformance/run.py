"""Runs all cases against one picker: prepares pods and API, starts or awaits the picker, and judges each case."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from treeline_bench.api_server import NAMESPACE, ApiServer
from treeline_bench.processes import free_ports

from treeline_conformance.bench import POOL, Bench
from treeline_conformance.case import CASES, Case
from treeline_conformance.messages import transcript
from treeline_conformance.picker import Picker, PickerError, Target, filled_in
from treeline_conformance.pods import Pod, pods
from treeline_conformance.verdict import Failed, NotApplicable, Outcome, Verdict, When

START_S: Final = 60.0
"""Longest time until a picker answers its first request."""
_ASKS_S: Final = 2.0
_CASE_S: Final = 120.0
_MODES: Final = "modes.served"
Told = Callable[[Case, Outcome], None]


async def run(
    target: Target,
    cases: Sequence[Case],
    folder: Path,
    *,
    patience_s: float,
    pod_port: int = 0,
    told: Told = lambda *_: None,
) -> dict[str, Outcome]:
    """Return the outcomes by the cases' names, in the order of the run. `folder` gets the kubeconfig and the picker's
    output. Raises PickerError if the picker does not start or routes nothing, OSError if the pods have no port.
    """
    everyone, api = pods(pod_port), ApiServer()
    bench_of = _opened(target, everyone, api, folder, patience_s)
    outcomes: dict[str, Outcome] = {}
    ordered = sorted(cases, key=lambda one: (one.when, not one.name.startswith(_MODES)))
    async with bench_of as bench:
        if any(one.when is When.BEFORE for one in ordered):
            await _asks(bench)
        for when in When:
            if when is When.RUNNING:
                await _ready(bench, api)
                await _probe(bench, ordered)
            for one in (one for one in ordered if one.when is when):
                outcomes[one.name] = outcome = await judged(one, bench)
                told(one, outcome)
    return outcomes


@contextlib.asynccontextmanager
async def _opened(
    target: Target, everyone: list[Pod], api: ApiServer, folder: Path, patience_s: float
) -> AsyncIterator[Bench]:
    """Start pods, API and picker; end all of them afterwards."""
    async with contextlib.AsyncExitStack() as stack:
        for pod in everyone:
            await pod.start()
            stack.push_async_callback(pod.stop)
        await api.start()
        stack.push_async_callback(api.stop)
        kubeconfig = api.write_kubeconfig(folder)
        picker, words = _picker(target, everyone, kubeconfig)
        bench = Bench(picker, everyone, api, patience_s)
        bench.put_pool()
        for pod in everyone:
            bench.put_pod(pod)
        if words:
            stack.push_async_callback(picker.stop)
            await picker.start(words, kubeconfig, folder / "picker.log")
        stack.push_async_callback(bench.finish)
        yield bench


def _picker(target: Target, everyone: list[Pod], kubeconfig: Path) -> tuple[Picker, list[str]]:
    """Return the picker, and the words of its command. Raises PickerError."""
    if not target.command:
        host = target.address.rpartition(":")[0]
        ports = (target.health_port, target.metrics_port)
        return Picker(target, target.address, *(f"{host}:{port}" if port else "" for port in ports)), []
    port, health, metrics, admin = map(str, free_ports(4))
    values: Mapping[str, str] = {
        "kubeconfig": str(kubeconfig),
        "namespace": NAMESPACE,
        "pool": POOL,
        "port": port,
        "health_port": health,
        "metrics_port": metrics,
        "admin_port": admin,
        "pods": ",".join(pod.endpoint for pod in everyone),
        **{f"pod{at}": pod.endpoint for at, pod in enumerate(everyone)},
    }
    words, used = filled_in(target.command, values)
    if "port" not in used:
        raise PickerError("--start has no {port}, so the picker would listen on an unknown port")
    others = (f"127.0.0.1:{values[name]}" if name in used else "" for name in ("health_port", "metrics_port"))
    return Picker(target, f"127.0.0.1:{port}", *others), words


async def _asks(bench: Bench) -> None:
    """Wait until the picker has asked the API for its objects; or until it listens without having asked."""
    if not bench.picker.started:
        return
    waits = [asyncio.create_task(wait) for wait in (bench.api.followed.wait(), bench.picker.listening(START_S))]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.wait(waits[:1], timeout=_ASKS_S)
    for wait in waits:
        wait.cancel()
    await asyncio.gather(*waits, return_exceptions=True)


async def _ready(bench: Bench, api: ApiServer) -> None:
    """Let the picker see its pods, and wait until it routes. Raises PickerError."""
    api.held.set()
    await bench.begin()
    deadline = time.monotonic() + START_S
    try:
        while (seen := await bench.chosen()) not in bench.endpoints:
            if bench.picker.status is not None:
                raise PickerError(f"it ended with status {bench.picker.status}:\n{bench.picker.last_words()}")
            if time.monotonic() > deadline:
                raise PickerError(f"it routes nothing: {seen}\n{bench.picker.last_words()}")
            await bench.finish()
            await asyncio.sleep(0.2)
            await bench.begin()
        await bench.settled()
    except Failed as error:
        raise PickerError(f"{error}\n{bench.picker.last_words()}") from None
    finally:
        await bench.finish()


async def _probe(bench: Bench, cases: Sequence[Case]) -> None:
    """Find out which modes are served, if no case of the run does."""
    names = {one.name for one in cases}
    wanted = {f"{_MODES}@{one.mode.word}" for one in cases} - names
    for one in CASES:
        if one.name in wanted:
            await judged(one, bench)


async def judged(one: Case, bench: Bench) -> Outcome:
    """Run a case; any error is the picker's failure, unless it says that the case is not applicable."""
    started = time.monotonic()
    missing = [need for need in one.needs if not bench.has(need)]
    if missing:
        return Outcome(Verdict.NOT_APPLICABLE, Verdict.NOT_APPLICABLE, missing[0].value)
    if one.mode not in bench.served and "@" in one.name and not one.name.startswith(_MODES):
        why = f"the picker does not serve {one.mode.name} ({_MODES}@{one.mode.word})"
        return Outcome(Verdict.NOT_APPLICABLE, Verdict.NOT_APPLICABLE, why)
    if bench.picker.status is not None and one.when is not When.END:
        why = f"the picker has ended, with status {bench.picker.status}"
        return Outcome(Verdict.FAIL, Verdict.FAIL, why)
    await bench.begin()
    try:
        async with asyncio.timeout(_CASE_S):
            await one.run(bench, one.mode)
        outcome = Outcome(Verdict.PASS, _gie15(one, bench, Verdict.PASS))
    except NotApplicable as error:
        outcome = Outcome(Verdict.NOT_APPLICABLE, Verdict.NOT_APPLICABLE, str(error))
    except Exception as error:  # a picker's answers may break a case, too: that is one failure, not the end of the run
        why = _words(error)
        outcome = Outcome(Verdict.FAIL, _gie15(one, bench, Verdict.FAIL), why, transcript(bench.said))
    finally:
        await bench.finish()
    outcome.seconds = round(time.monotonic() - started, 3)
    return outcome


def _words(error: Exception) -> str:
    if isinstance(error, Failed):
        return str(error)
    if isinstance(error, TimeoutError):
        return f"not done within {_CASE_S:g} s"
    return f"its answers broke the case: {type(error).__name__}: {error}"


def _gie15(one: Case, bench: Bench, verdict: Verdict) -> Verdict:
    """Return the verdict against GIE 1.5's behaviour: the same one, unless the case has checked that."""
    if bench.deviates is None or not one.gie15:
        return verdict
    return Verdict.PASS if bench.deviates else Verdict.FAIL
