"""The pages for kubelet and Prometheus: /healthz and /readyz on one port, /metrics on another."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Self

from aiohttp import web

from treeline_operator.controller.metrics import Metrics

STALE_WATCH_S: Final = 210.0
"""Several times the minute after which a dead watch is restarted."""
STUCK_KEY_S: Final = 600.0


class PortInUse(Exception):
    """A port cannot be opened; the message says which and what to do."""


@dataclass(slots=True)
class Vitals:
    """The state that probes judge. `phase` is `starting`, `standby`, `syncing` or `leading`."""

    phase: str = "starting"
    watch_ages: Callable[[], Mapping[str, float]] = dict
    oldest_key: Callable[[], float] = lambda: 0.0
    troubles: Callable[[], list[str]] = list

    def liveness_failures(self) -> list[str]:
        """Why the process should be restarted."""
        if self.phase == "standby":  # its watches from the time when it led do not matter
            return []
        ages = self.watch_ages().items()
        found = [f"no news of {kind} for {age:.0f} s" for kind, age in ages if age > STALE_WATCH_S]
        if (oldest := self.oldest_key()) > STUCK_KEY_S:
            found.append(f"a key has waited or run for {oldest:.0f} s")
        return found

    def readiness_failures(self) -> list[str]:
        """Why the process does not do its work yet; a standby does its work by waiting."""
        return [] if self.phase in ("standby", "leading") else [f"{self.phase}", *self.troubles()]


@dataclass(slots=True)
class Pages:
    """The two servers. Opened before anything else, so that a port that is taken is known at once."""

    vitals: Vitals
    metrics: Metrics
    _runners: list[web.AppRunner] = field(default_factory=list)

    async def open(self, host: str, health_port: int, metrics_port: int) -> Self:
        """Raises `PortInUse`. Port 0 takes a free one."""
        await self._serve(host, health_port, {"/healthz": self._healthz, "/readyz": self._readyz}, "--health-port")
        await self._serve(host, metrics_port, {"/metrics": self._metrics}, "--metrics-port")
        return self

    def ports(self) -> list[int]:
        """The ports in use: health, metrics."""
        return [runner.addresses[0][1] for runner in self._runners]

    async def close(self) -> None:
        """Close both."""
        for runner in self._runners:
            await runner.cleanup()
        self._runners.clear()

    async def _serve(
        self,
        host: str,
        port: int,
        routes: dict[str, Callable[[web.Request], Awaitable[web.Response]]],
        flag: str,
    ) -> None:
        app = web.Application()
        for path, handler in routes.items():
            app.router.add_get(path, handler)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        self._runners.append(runner)
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as exc:
            await self.close()
            raise PortInUse(f"cannot listen on {host}:{port} ({exc.strerror}); choose another with {flag}") from exc

    async def _healthz(self, _: web.Request) -> web.Response:
        return _verdict(self.vitals.liveness_failures(), self.vitals.phase)

    async def _readyz(self, _: web.Request) -> web.Response:
        return _verdict(self.vitals.readiness_failures(), self.vitals.phase)

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self.metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4"})


def _verdict(faults: list[str], phase: str) -> web.Response:
    text = "\n".join(faults) if faults else f"ok: {phase}"
    return web.Response(text=f"{text}\n", status=503 if faults else 200)
