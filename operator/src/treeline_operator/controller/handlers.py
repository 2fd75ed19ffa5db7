"""kopf's handlers for our own kinds, and how kopf is run; only this module uses it.

kopf is embedded as in its "manual orchestration": in its own event loop and thread, with its root tasks started here.
Settings come from a startup handler, credentials from a login handler, and `on.event` handlers pass objects on. There
is no state in annotations, no finalizers, no posted Events, and our lease replaces peering.

kopf does not report objects deleted while no watch ran, and ends when one kind may not be read. So it does not follow
children, and the informer lists our own kinds as well. The thread exists because in the main one kopf would take the
process's signals, and because its tasks could not be told apart from ours at shutdown.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import kopf
from treeline_kube.resources import Resource

if TYPE_CHECKING:
    from kubernetes.aio.client.configuration import Configuration

log = logging.getLogger(__name__)

Deliver = Callable[[Resource, str | None, dict[str, Any]], None]
"""Kind, type of the event (None for what a list names), object."""

_TOKEN: Final = "BearerToken"
_CANCELS: Final = 20
_PATIENCE_S: Final = 0.5


async def follow(
    kinds: Sequence[Resource], namespaces: Sequence[str], configuration: Configuration, deliver: Deliver
) -> None:
    """Run kopf for `kinds` until cancelled; `deliver` is called in the loop of the caller, in order per object. Raises
    the error that ended kopf: the API server keeps refusing a list or a watch.
    """
    ours = asyncio.get_running_loop()
    started: asyncio.Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[None]]] = ours.create_future()
    ended: asyncio.Future[None] = ours.create_future()

    def tell(function: Callable[..., object], *arguments: object) -> None:
        with suppress(RuntimeError):  # our loop has ended, so nobody waits for the call
            ours.call_soon_threadsafe(function, *arguments)

    def run() -> None:
        handlers = registry(kinds, configuration, lambda *event: tell(deliver, *event))
        operating = _operate(handlers, namespaces, lambda *where: tell(started.set_result, where))
        reason: BaseException = RuntimeError("it ended without a reason given")
        try:
            asyncio.run(operating)
        except (Exception, asyncio.CancelledError) as exc:
            reason = exc if isinstance(exc, Exception) else reason
        tell(_end, ended, reason)

    # Errors are raised, and the informer logs the rest.
    for name in ("kopf", "kopf.objects"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    threading.Thread(target=run, name="kopf", daemon=True).start()
    try:
        await asyncio.shield(ended)
    finally:
        await asyncio.wait((started, ended), return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            theirs, operating = started.result()
            with suppress(RuntimeError):  # their loop has just ended
                theirs.call_soon_threadsafe(operating.cancel)
            await asyncio.wait((ended,), timeout=_CANCELS * _PATIENCE_S)


async def _operate(
    handlers: kopf.OperatorRegistry,
    namespaces: Sequence[str],
    started: Callable[[asyncio.AbstractEventLoop, Any], None],
) -> None:
    """Run kopf until one of its root tasks ends; raises the error once nothing of kopf runs any more."""
    loop, this = asyncio.get_running_loop(), asyncio.current_task()
    assert this is not None
    started(loop, this)
    # Its streams fail an assertion of their own when they are stopped.
    loop.set_exception_handler(lambda _, context: log.debug("kopf: %s", context["message"]))
    roots = await kopf.spawn_tasks(
        registry=handlers,
        standalone=True,
        clusterwide=not any(namespaces),
        namespaces=[namespace for namespace in namespaces if namespace],
    )
    running = asyncio.create_task(kopf.run_tasks(roots, ignored={this}))
    try:
        done, _ = await asyncio.wait(roots, return_when=asyncio.FIRST_COMPLETED)
    finally:
        running.cancel()
        await _clear(this)
    for task in done:
        task.result()


async def _clear(this: asyncio.Task[None]) -> None:
    """Cancel all tasks of this loop but `this`, until they end. A kopf watcher between two streams takes a cancellation
    for the end of a stream and continues, and kopf, whose first watcher failed, would wait for the second one for
    ever."""
    for _ in range(_CANCELS):
        rest = asyncio.all_tasks() - {this}
        if not rest:
            return
        _, rest = await asyncio.wait(rest, timeout=_PATIENCE_S)
        for task in rest:
            task.cancel()


def _end(ended: asyncio.Future[None], reason: Exception) -> None:
    ended.set_exception(reason)
    ended.exception()  # marks it as seen: a caller that cancels does not read it


def registry(kinds: Sequence[Resource], configuration: Configuration, deliver: Deliver) -> kopf.OperatorRegistry:
    """Our handlers: settings, credentials, and the events of `kinds`."""
    found = kopf.OperatorRegistry()

    @kopf.on.startup(registry=found)
    async def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
        settings.posting.enabled = False
        settings.scanning.disabled = True  # which kinds and namespaces there are is known
        settings.process.ultimate_exiting_timeout = None  # what does not end is left behind, not killed with us
        settings.networking.request_timeout = 30.0
        settings.networking.connect_timeout = 5.0
        settings.networking.error_backoffs = (0.2, 0.5, 1, 2)
        settings.watching.server_timeout = 480
        settings.watching.chunk_size = 500
        settings.persistence.diffbase_storage = _NoDiffs()
        settings.queueing.idle_timeout = 1.0
        settings.queueing.exit_timeout = 0.5

    @kopf.on.login(registry=found)
    async def log_in(**_: Any) -> kopf.ConnectionInfo:
        return await _connection(configuration)

    for kind in kinds:
        watching = kopf.on.event(
            kind.group, kind.version, kind.plural, registry=found, param=kind, id=f"see-{kind.plural}"
        )
        watching(_pass_on(deliver))
    return found


class _NoDiffs(kopf.DiffBaseStorage):
    """Our handlers need no diffs, for which kopf would copy every object."""

    def build(self, *, body: kopf.Body, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence({})

    def fetch(self, *, body: kopf.Body) -> None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        """Store nothing: events are handled without diffs."""


def _pass_on(deliver: Deliver) -> Any:
    async def see(event: Any, param: Resource, **_: Any) -> None:
        deliver(param, event["type"], dict(event["object"]))

    return see


async def _connection(configuration: Any) -> kopf.ConnectionInfo:
    """The credentials of our client, as kopf takes them; called again when the API server refuses the old ones."""
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
