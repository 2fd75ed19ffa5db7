"""kopf, as the source of events: it lists and watches in a thread of its own, and tells our loop what it saw.

Only this module knows kopf. It is used for `on.event` alone: no handlers that keep state in annotations, no finalizers,
no peering, no posted Events. A thread of its own, because kopf takes over the signals of a main thread's loop, and
because its bookkeeping per object is not to delay a reconciliation.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import kopf

from treeline_operator.controller.kinds import Watched

if TYPE_CHECKING:
    from kubernetes.aio.client.configuration import Configuration

log = logging.getLogger(__name__)

Deliver = Callable[[Watched, str | None, dict[str, Any]], None]
"""Kind, type of the event (None for what a list names), object."""

_STOP_S: Final = 5.0
_CANCEL_S: Final = 0.5
_WATCHER: Final = "watcher for "
_TOKEN: Final = "BearerToken"


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """Seconds. A bookmark comes every minute, so a watch that is silent for longer than ``idle_s`` is dead."""

    idle_s: float = 70.0
    server_s: int = 480
    connect_s: float = 5.0
    request_s: float = 30.0


async def stream(
    kinds: Sequence[Watched],
    namespaces: Sequence[str],
    configuration: Configuration,
    settings: WatchSettings,
    deliver: Deliver,
) -> None:
    """List and watch ``kinds`` until cancelled; ``deliver`` is called in the loop of the caller, in order per object.

    Raises what ended kopf: a list or a watch that the API server keeps refusing.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    stop = threading.Event()
    spawning = kopf.spawn_tasks(
        registry=_registry(kinds, loop, deliver, configuration),
        settings=_settings(kinds, settings),
        standalone=True,
        clusterwide=not any(namespaces),
        namespaces=[namespace for namespace in namespaces if namespace],
        stop_flag=stop,
    )

    def run() -> None:
        reason: Exception = RuntimeError("it ended without a reason")
        try:
            asyncio.run(_until_it_ends(spawning, stop))
        except Exception as exc:
            reason = exc
        with suppress(RuntimeError):  # the loop has ended, and with it whoever wanted to know
            loop.call_soon_threadsafe(_end, ended, reason)

    threading.Thread(target=run, name="kopf", daemon=True).start()
    try:
        await asyncio.shield(ended)
    finally:
        stop.set()
        await asyncio.wait((ended,), timeout=_STOP_S)


def _end(ended: asyncio.Future[None], reason: Exception) -> None:
    ended.set_exception(reason)
    ended.exception()  # whoever cancelled the stream does not ask for it


async def _until_it_ends(
    spawning: Coroutine[Any, Any, Collection[asyncio.Task[Any]]], stop: threading.Event
) -> None:
    """Run kopf until ``stop`` is set or one of its tasks ends, and clear away the rest; raises what ended it.

    It runs without its own words: what goes wrong is raised, and the audits tell of the rest in ours.
    """
    for name in ("kopf", "kopf.objects"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # Its streams fail an assertion of their own when they are stopped.
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: log.debug("kopf: %s", context["message"])
    )
    try:
        roots = await spawning
        await asyncio.wait(roots, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stop.set()  # for this a task of it waits, and a thread of the loop, which are to end too
    # A watcher that fails leaves the others running. By itself kopf would end the task that has the credentials first,
    # and then wait for watchers that wait for credentials. So the watchers go before the rest; they alone, for each of
    # them waits for its workers by the help of other tasks.
    await _cancel({task for task in asyncio.all_tasks() if task.get_name().startswith(_WATCHER)})
    await kopf.run_tasks(roots)


async def _cancel(tasks: Collection[asyncio.Task[Any]]) -> None:
    """End them. A watcher that is just between two of its streams takes a cancellation for the end of one."""
    while tasks:
        for task in tasks:
            task.cancel()
        _, tasks = await asyncio.wait(tasks, timeout=_CANCEL_S)


def _registry(
    kinds: Sequence[Watched], loop: asyncio.AbstractEventLoop, deliver: Deliver, configuration: Configuration
) -> kopf.OperatorRegistry:
    registry = kopf.OperatorRegistry()

    async def login(**_: Any) -> kopf.ConnectionInfo:
        return await _connection(configuration)

    kopf.on.login(registry=registry)(login)
    for watched in kinds:
        kopf.on.event(*watched.group_version_plural, registry=registry, id=f"see-{watched.plural}")(
            _see(watched, loop, deliver)
        )
    return registry


def _see(watched: Watched, loop: asyncio.AbstractEventLoop, deliver: Deliver) -> Any:
    async def see(event: Any, **_: Any) -> None:
        with suppress(RuntimeError):  # the loop has ended, and with it whoever wanted to know
            loop.call_soon_threadsafe(deliver, watched, event["type"], dict(event["object"]))

    return see


def _settings(kinds: Sequence[Watched], timing: WatchSettings) -> kopf.OperatorSettings:
    usual = kopf.OperatorSettings()
    settings = replace(
        usual,
        posting=replace(usual.posting, enabled=False),
        scanning=replace(usual.scanning, disabled=True),  # which kinds there are is known
        networking=replace(
            usual.networking,
            request_timeout=timing.request_s,
            connect_timeout=timing.connect_s,
            error_backoffs=(0.2, 0.5, 1, 2),
        ),
        watching=replace(
            usual.watching, server_timeout=timing.server_s, inactivity_timeout=timing.idle_s, chunk_size=500
        ),
        queueing=replace(usual.queueing, worker_limit=None, idle_timeout=1.0, exit_timeout=0.5),
    )
    for watched in kinds:
        if watched.selector:
            settings.watching.label_selectors[watched.group_version_plural] = watched.selector
    return settings


async def _connection(configuration: Any) -> kopf.ConnectionInfo:
    """The credentials of the client, as kopf takes them; asked for anew when the API server refuses the old ones."""
    auth = await configuration.auth_settings()
    scheme, _, token = str(auth.get(_TOKEN, {}).get("value", "")).rpartition(" ")
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
        scheme=scheme or None,
        token=token or None,
        proxy_url=configuration.proxy,
    )
