"""The watcher of one engine: it asks for its state and models, often while the engine is not ready, seldom while it
is.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import os
import random
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from treeline_wire.tokenizer import TokenizerBundle

from treeline_epp.endpoints.adapters.base import EngineAdapter, EngineInfo
from treeline_epp.endpoints.adapters.registry import ANYTHING, PROBES, adapter_of, recognise
from treeline_epp.endpoints.engine_http import EngineError, EngineHttp, UnusableError
from treeline_epp.endpoints.http_answer import BrokenOff, HttpError, HttpTimeout, NotHttp
from treeline_epp.endpoints.http_client import HttpClient
from treeline_epp.endpoints.spec import EndpointSpec, KvPorts
from treeline_epp.endpoints.transfer import Transfer

log = logging.getLogger(__name__)

MIN_PROBE_INTERVAL_S = 0.05
"""Least seconds between two probes, whatever the hints: a thousand failing requests are one reason to probe."""
_AT_ONCE = 128
_TURN_S = 0.5
"""Seconds after which an engine that has not answered gives its place to the next one: waiting costs nothing."""
_FEW = 100
"""Most engines that are asked at the full rate; with more, each is asked less often."""
_PROBE_BYTES = 64 << 10
"""Largest answer to a probe."""
_LONGEST_PROBLEM = 300
"""Characters: an answer may be quoted in it."""
FAILURE_THRESHOLD = 3
"""Timeouts in a row after which an engine counts as down; a refused connection counts at once."""


class EngineState(enum.StrEnum):
    """The state of an engine as the watcher sees it. Values are metric labels."""

    UNKNOWN = "unknown"
    STARTING = "starting"
    READY = "ready"
    UNREADY = "unready"
    """The engine answers, but discovery does not call it ready."""
    DRAINING = "draining"
    """The engine was ready and now answers 503: it finishes its requests and takes no new ones."""
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class Problem:
    """Why an engine gets no requests."""

    text: str
    lasting: bool = False
    """It answers, and will answer the same again: something else is there, or it is set up otherwise."""


class EngineClient:
    """The client of one engine. It uses the adapter of `engine`; if that names no type, it finds out the type, again
    after each absence, since another engine may have come back. It finds out once which of the adapter's probes exist.
    `told`: the publisher that discovery names. `apart`: the engine has a role; the client finds out, again after each
    absence, how it hands over prompts.
    """

    def __init__(
        self, http: HttpClient, address: str, engine: str = "", told: KvPorts | None = None, *, apart: bool = False
    ) -> None:
        self.http = http
        self._http = EngineHttp(http, address)
        self._told = told
        self._apart = apart
        self._fixed = adapter_of(engine)
        self._transfer: Transfer | None = None
        self._served = False
        self._forget()

    @property
    def adapter(self) -> EngineAdapter:
        """The adapter with which the engine is asked."""
        return self._known or ANYTHING

    async def ready(self) -> bool | None:
        """Return whether the engine takes requests; None without a probe. Raises `HttpError` if it is unreachable."""
        try:
            ready = await self._probe()
        except HttpTimeout:
            raise  # a busy engine is still the same engine
        except HttpError:
            self._forget()
            raise
        if ready and not self._served:
            self._known = self._fixed  # it was not ready, and another engine may have taken its place
            self._transfer = None
        self._served = bool(ready)
        return ready

    def _forget(self) -> None:
        self._known = self._fixed
        self._transfer = None
        self._probes = PROBES if self._fixed is None else self._fixed.probes

    async def _probe(self) -> bool | None:
        for at, path in enumerate(self._probes):
            status, _ = await self._http.fetch(path, self.adapter.probe_timeout_s, _PROBE_BYTES)
            if status != 404:
                self._probes = self._probes[at:]
                return status == 200
        self._probes = self._probes[-1:]
        return None

    async def info(self) -> EngineInfo:
        """Return the engine's facts. Raises `EngineError`."""
        adapter = self._known
        if adapter is None or (adapter is ANYTHING and self._fixed is None):  # the first answers may have been partial
            adapter = self._known = await recognise(self._http)
        info = await adapter.info(self._http, self._told)
        if not self._apart or info.transfer is not None:
            return info
        self._transfer = self._transfer or await adapter.transfer(self._http)
        return msgspec.structs.replace(info, transfer=self._transfer)

    async def tokenizer(self) -> TokenizerBundle:
        """Fetch the engine's tokenizer. Raises `EngineError`."""
        return await self.adapter.tokenizer(self._http)


Report = Callable[[EngineState, EngineInfo | None], None]
"""Called at every change of state, and when a ready engine's information has changed."""


class ProbePace:
    """The pace of probes, so that thousands of engines cost no more than a hundred, and how many are asked at a time.

    Without a bound, answers that are late because so many were asked at once would count as no answers. Engines that
    hang do not count for it (`_TURN_S`): a few hundred of them would keep the others from being asked.
    """

    def __init__(self) -> None:
        self._asking = asyncio.Semaphore(_AT_ONCE)
        self._watched: Counter[bool] = Counter()

    def watch(self, ready: bool, count: int = 1) -> None:
        """Change the number of ready, or of other, watched engines by `count`, which may be negative."""
        self._watched[ready] += count

    @contextlib.asynccontextmanager
    async def asking(self) -> AsyncIterator[None]:
        """Hold a place while an engine is asked; wait for a free one."""
        await self._asking.acquire()
        held = True

        def leave() -> None:
            nonlocal held
            if held:
                held = False
                self._asking.release()

        turn = asyncio.get_running_loop().call_later(_TURN_S, leave)
        try:
            yield
        finally:
            turn.cancel()
            leave()

    def pause(self, ready: bool, often_s: float) -> float:
        """Return the pause between two probes of an engine that a small fleet asks every `often_s`."""
        stretched = often_s * max(1.0, self._watched[ready] / _FEW)
        return stretched * random.uniform(0.8, 1.2)  # so that a hundred engines are not asked in one moment


class EngineWatcher:
    """Keeps asking one engine: often while it is not ready, seldom while it is, at once after `probe_now`."""

    def __init__(self, spec: EndpointSpec, client: EngineClient, report: Report, pace: ProbePace) -> None:
        self.spec = spec
        self.state = EngineState.UNKNOWN
        self.info: EngineInfo | None = None
        self.probed = asyncio.Event()
        self._client = client
        self._report = report
        self._pace = pace
        self._probe_asked = asyncio.Event()
        self._failures = 0
        self.problem: Problem | None = None
        """What is wrong with it now, None while it is ready."""
        self._logged = ""

    def probe_now(self) -> None:
        """Probe now: something suggests that the engine changed."""
        self._probe_asked.set()

    async def run(self) -> None:
        """Watch until cancelled."""
        self._pace.watch(self._is_ready)
        try:
            await self._watch()
        finally:
            self._pace.watch(self._is_ready, -1)

    @property
    def _is_ready(self) -> bool:
        return self.state is EngineState.READY

    async def _watch(self) -> None:
        while True:
            self._probe_asked.clear()
            await self._probe()
            self.probed.set()
            await asyncio.sleep(MIN_PROBE_INTERVAL_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause()):
                    await self._probe_asked.wait()

    def _pause(self) -> float:
        if not self._is_ready:
            often = 0.25
        else:  # an engine that pushes its load is known to be alive; others must be asked
            sources = self.info.sources if self.info is not None else ()
            pushes = any(source.load_port is not None for source in sources)
            often = 5.0 if pushes else self._client.adapter.probe_interval_s
        return self._pace.pause(self._is_ready, often)

    async def _probe(self) -> None:
        async with self._pace.asking():
            state, info = await self._ask()
        if state is self.state and info == self.info:
            return
        if state is not self.state:
            why = "" if state is EngineState.READY or self.problem is None else self.problem.text
            told = why in ("", self._logged)  # an answer that cannot be used has been logged already
            log.info("endpoint %s is %s%s", self.spec.name, state.value, "" if told else f": {why}")
        self._pace.watch(self._is_ready, -1)
        self.state = state
        self._pace.watch(self._is_ready)
        self._tell(info)
        self.info = info or self.info
        self._report(state, self.info)

    def _tell(self, info: EngineInfo | None) -> None:
        """Log new facts about the engine."""
        known = self.info or EngineInfo()
        if info is not None and info.wants_key and not known.wants_key:
            log.warning(
                "endpoint %s (%s) does not list its models without its API key: it gets requests for any model, and "
                "its models are not listed here; give the right key by --engine-key-file, or api_key_file in the "
                "endpoints file",
                self.spec.name,
                info.engine,
            )
        if info is not None and info.foreign_host and info.foreign_host != known.foreign_host:
            log.warning(
                "endpoint %s names %.100r as the place of its KV sockets: they are looked for at its own address, %s. "
                "vLLM and SGLang listen only if the endpoint in --kv-events-config has a * for the host",
                self.spec.name,
                info.foreign_host,
                self.spec.address,
            )
        if info is not None and info.no_events and info.no_events != known.no_events:
            log.info("endpoint %s (%s) is not followed: %s", self.spec.name, info.engine, info.no_events)

    async def _ask(self) -> tuple[EngineState, EngineInfo | None]:
        """Return `(state, facts)`; known facts are kept while the engine cannot be asked."""
        trusted = EngineState.READY, self.info or EngineInfo()
        drains = self._client.adapter.drains  # of the engine as it was while it served
        try:
            ready = await self._client.ready()
            self._failures = 0
            if ready is not False:  # without a probe a list of models says that it serves
                info = await self._client.info()
                self.problem, self._logged = None, ""
                return EngineState.READY, info
            self.problem = Problem("its health is not answered 200")
        except HttpTimeout as error:
            self.problem = Problem(f"http://{self.spec.address}: {error}")
            self._failures += 1
            busy = self.state is EngineState.READY and self._failures < FAILURE_THRESHOLD
            return (self.state if busy else EngineState.DOWN), self.info
        except HttpError as error:
            # Something answers, in a protocol that is not ours.
            strange = isinstance(error, NotHttp)
            # a forwarder before an engine that still loads accepts connections, and ends them
            lasting = strange and not isinstance(error, BrokenOff)
            self.problem = Problem(f"http://{self.spec.address}: {_words_of(error):.200}", lasting)
            return trusted if self.spec.trust_ready and strange else (EngineState.DOWN, self.info)
        except EngineError as error:
            if self.spec.trust_ready:
                return trusted
            self.problem = Problem(f"{error!s:.{_LONGEST_PROBLEM}}", isinstance(error, UnusableError))
            if self.problem.text != self._logged:  # once, though it is asked again several times a second
                self._logged = self.problem.text
                log.warning("endpoint %s: %s", self.spec.name, self.problem.text)
            return (self.state if self.state is EngineState.READY else EngineState.STARTING), self.info
        if not drains:
            return EngineState.DOWN, self.info
        was_serving = self.state in (EngineState.READY, EngineState.DRAINING)
        return (EngineState.DRAINING if was_serving else EngineState.STARTING), self.info


def _words_of(error: HttpError) -> str:
    """What an operating system says, in its words and without addresses."""
    number = getattr(error.__cause__, "errno", None) or 0
    return os.strerror(number) if number > 0 else str(error)  # those of names are negative, and have words already


SWEEP_INTERVAL_S: Final = 1.0
SWEPT_EACH_SECOND: Final = 50.0
"""Most engines asked per second on average, whatever the requests. Asking one takes a third of a millisecond."""
SWEPT_AT_ONCE: Final = 16
"""Engines asked at each beat of the fleet."""


class Sweep:
    """A sweep asks all engines again for their models, because a request named a model that no engine is known to have.
    Names are those of endpoints.

    An engine that pushes its load is asked seldom, and may have loaded a model since. A client that asks for a name
    that no engine has could keep a picker busy with sweeps. So there is one at a time, spread over time, and the next
    one comes no sooner than the engines would be asked anyway.
    """

    def __init__(self) -> None:
        self._due: deque[str] = deque()
        self._again_at = float("-inf")

    def due(self, now: float) -> bool:
        """Return whether a sweep may begin: none is under way, and none was lately."""
        return not self._due and now >= self._again_at

    def begin(self, names: Sequence[str], now: float) -> None:
        """Ask these engines after an unknown model, unless a sweep is under way or was lately."""
        if self.due(now):
            self._due.extend(names)
            self._again_at = now + max(SWEEP_INTERVAL_S, len(names) / SWEPT_EACH_SECOND)

    def take(self) -> list[str]:
        """Return the engines to ask at this beat; each once, and some may have gone meanwhile."""
        return [self._due.popleft() for _ in range(min(SWEPT_AT_ONCE, len(self._due)))]
