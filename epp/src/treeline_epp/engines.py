"""What an engine says about itself over HTTP, and the watcher that keeps asking.

A Treeline runtime answers everything here. Other engines answer less: without ``/ready`` their ``/health`` counts,
without ``/server_info`` they push nothing, and without ``/treeline/tokenizer`` they are routed by load and history.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import httpx
import msgspec
from treeline_wire.security import is_loopback
from treeline_wire.tokenizer import BundleError, TokenizerBundle

from treeline_epp.endpoint import EndpointSpec, split_address

log = logging.getLogger(__name__)

T = TypeVar("T")

_PROBE_TIMEOUT_S = 2.0
_CALM_S = 0.05
"""Between two looks, whatever the hints: a thousand failing requests are one reason to look."""
_STRIKES = 3
"""Timeouts in a row after which an engine counts as down; a refused connection counts at once."""


class EngineState(enum.StrEnum):
    """What the watcher believes. Values are metric labels."""

    UNKNOWN = "unknown"
    STARTING = "starting"
    READY = "ready"
    UNREADY = "unready"
    """It answers, but discovery does not call it ready."""
    DRAINING = "draining"
    """It was ready and now answers 503: it finishes what it has and takes nothing new."""
    DOWN = "down"


class KvSource(msgspec.Struct, frozen=True):
    """Where an engine publishes; ports are ``None`` where it does not. ``topic`` filters the events."""

    host: str
    events_port: int | None = None
    replay_port: int | None = None
    load_port: int | None = None
    topic: str = ""
    curve: bool = False


class EngineInfo(msgspec.Struct, frozen=True):
    """What an engine serves. ``epoch`` is empty where it has none, ``fingerprint`` where it serves no tokenizer."""

    models: tuple[str, ...] = ()
    epoch: str = ""
    fingerprint: str = ""
    source: KvSource | None = None


class EngineError(Exception):
    """The engine could not be asked, or its answer cannot be used."""


class _KvEvents(msgspec.Struct):
    publisher: str | None = None
    endpoint_host: str = "*"
    endpoint_port_base: int | None = None
    replay_endpoint_port_base: int | None = None
    load_endpoint_port_base: int | None = None
    topic: str | None = ""
    curve: bool = False


class _ServerInfo(msgspec.Struct):
    kv_events: _KvEvents | None = None
    epoch: int | str | None = None
    tokenizer_fingerprint: str | None = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class EngineClient:
    """One engine's HTTP interface. ``http`` is shared by all of them."""

    def __init__(self, http: httpx.AsyncClient, address: str) -> None:
        self._http = http
        self._base = f"http://{address}"
        self._host = split_address(address)[0]
        self._probe = "/ready"

    async def ready(self) -> bool | None:
        """Whether it takes requests; ``None`` if it has no probe. Raises ``httpx.HTTPError`` if out of reach."""
        response = await self._http.get(self._base + self._probe, timeout=_PROBE_TIMEOUT_S)
        if response.status_code == 404:
            if self._probe == "/health":
                return None
            self._probe = "/health"
            return await self.ready()
        return response.status_code == 200

    async def info(self) -> EngineInfo:
        """Its models, epoch, tokenizer and sockets. Raises :class:`EngineError`."""
        served, about = await asyncio.gather(
            self._get("/v1/models", _Models), self._get("/server_info", _ServerInfo)
        )
        if served is None:
            raise EngineError(f"{self._base} has no /v1/models")
        models = tuple(model.id for model in served.data)
        if about is None:
            return EngineInfo(models)
        return EngineInfo(
            models,
            epoch="" if about.epoch is None else str(about.epoch),
            fingerprint=about.tokenizer_fingerprint or "",
            source=None if about.kv_events is None else self._source(about.kv_events),
        )

    async def tokenizer(self) -> TokenizerBundle:
        """Its tokenizer. Raises :class:`EngineError`."""
        try:
            response = await self._http.get(self._base + "/treeline/tokenizer", timeout=30.0)
            response.raise_for_status()
            return await asyncio.to_thread(TokenizerBundle.from_json, response.content)
        except (httpx.HTTPError, BundleError) as error:
            raise EngineError(f"{self._base}/treeline/tokenizer: {error!r}") from error

    def _source(self, events: _KvEvents) -> KvSource | None:
        if events.publisher != "zmq":
            return None
        host = events.endpoint_host.strip("[]")
        if host in ("", "*", "0.0.0.0", "::") or (is_loopback(host) and not is_loopback(self._host)):
            host = self._host  # bound to everything: reach it where its HTTP server is
        return KvSource(
            host,
            events.endpoint_port_base,
            events.replay_endpoint_port_base,
            events.load_endpoint_port_base,
            events.topic or "",
            events.curve,
        )

    async def _get(self, path: str, into: type[T]) -> T | None:
        """A decoded document; ``None`` for 404."""
        try:
            response = await self._http.get(self._base + path, timeout=5.0)
            if response.status_code == 404:
                return None
            response.raise_for_status()
            return msgspec.json.decode(response.content, type=into)
        except (httpx.HTTPError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise EngineError(f"{self._base}{path}: {error!r}") from error


Report = Callable[[EngineState, EngineInfo | None], Awaitable[None]]
"""Called at every change of state, and when a ready engine's information has changed."""


class EngineWatcher:
    """Keeps asking one engine: often while it is not ready, seldom while it is, at once after :meth:`kick`."""

    def __init__(self, spec: EndpointSpec, client: EngineClient, report: Report) -> None:
        self.spec = spec
        self.state = EngineState.UNKNOWN
        self.info: EngineInfo | None = None
        self.probed = asyncio.Event()
        self._client = client
        self._report = report
        self._kicked = asyncio.Event()
        self._strikes = 0

    def kick(self) -> None:
        """Something suggests that the engine changed: look now."""
        self._kicked.set()

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            self._kicked.clear()
            await self._look()
            self.probed.set()
            await asyncio.sleep(_CALM_S)
            try:
                async with asyncio.timeout(self._pause()):
                    await self._kicked.wait()
            except TimeoutError:
                pass

    def _pause(self) -> float:
        if self.state is not EngineState.READY:
            often = 0.25
        else:  # one that pushes its load is known to be alive; others can only be asked
            pushes = (
                self.info is not None
                and self.info.source is not None
                and self.info.source.load_port is not None
            )
            often = 5.0 if pushes else 1.0
        return often * random.uniform(0.8, 1.2)  # so that a hundred engines are not asked in one moment

    async def _look(self) -> None:
        state, info = await self._ask()
        if state is self.state and info == self.info:
            return
        if state is not self.state:
            log.info("endpoint %s is %s", self.spec.name, state.value)
        self.state = state
        self.info = info or self.info
        await self._report(state, self.info)

    async def _ask(self) -> tuple[EngineState, EngineInfo | None]:
        """``(state, information)``; what is known stays known while the engine cannot be asked."""
        vouched = EngineState.READY, self.info or EngineInfo()
        try:
            ready = await self._client.ready()
            self._strikes = 0
            if ready:
                return EngineState.READY, await self._client.info()
            if ready is None and self.spec.vouched:
                return vouched
        except httpx.TimeoutException:
            self._strikes += 1
            busy = self.state is EngineState.READY and self._strikes < _STRIKES
            return (self.state if busy else EngineState.DOWN), self.info
        except (httpx.HTTPError, OSError) as error:
            # Something answers, in a protocol that is not ours.
            strange = isinstance(error, httpx.RemoteProtocolError)
            return vouched if self.spec.vouched and strange else (EngineState.DOWN, self.info)
        except EngineError as error:
            if self.spec.vouched:
                return vouched
            log.warning("endpoint %s: %s", self.spec.name, error)
            return (self.state if self.state is EngineState.READY else EngineState.STARTING), self.info
        was_serving = self.state in (EngineState.READY, EngineState.DRAINING)
        return (EngineState.DRAINING if was_serving else EngineState.STARTING), self.info
