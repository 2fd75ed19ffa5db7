"""The parent's process: the ports that are answered once for all workers, from the first worker to the last."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack

import grpc
from treeline_wire.security import CurveKeys

from treeline_epp.admin import PageServer
from treeline_epp.extproc.server import server_options
from treeline_epp.health import Health
from treeline_epp.metrics import Metrics
from treeline_epp.options import Options
from treeline_epp.peers.seal import peer_key
from treeline_epp.workers.entrance import Entrance
from treeline_epp.workers.pages import Pages
from treeline_epp.workers.places import names_of, own_places
from treeline_epp.workers.team import Team
from treeline_epp.xds.eds import Eds

log = logging.getLogger(__name__)

Listen = Callable[[Options, PageServer, PageServer, Entrance, grpc.aio.Server], Awaitable[None]]


async def supervise(
    options: Options,
    argv: Sequence[str],
    stopping: asyncio.Event,
    curve: CurveKeys | None,
    *,
    listen: Listen,
    peer_socket: Callable[[str, int], socket.socket],
) -> None:
    """The life of a picker of several workers, until `stopping` is set. `listen` and `peer_socket` bind what every
    picker binds, and raise what it raises. Raises WorkerFailed."""
    for sentence in options.ignored:
        log.warning("of other endpoint pickers: %s", sentence)
    if options.max_client_requests is not None:
        log.warning("--max-client-requests is counted by each worker: a client of several connections may have more")
    metrics, eds, health = Metrics(), Eds(), await Health.starting()
    key = secrets.token_bytes(32) if curve is None else peer_key(curve.secret)
    with ExitStack() as stack:
        sockets = [stack.enter_context(peer_socket(host, port)) for host, port in own_places(options)]

        async def on_ready(ready: bool) -> None:
            entrance.open()
            await health.set_ready(ready)

        team = Team(argv, eds, sockets, key, names_of(options, sockets), on_ready)
        metrics.observe(team.samples)
        pages = Pages(team.places, metrics.render)
        metrics.observe(pages.samples)
        metrics_pages = PageServer({"/metrics": pages.metrics})
        admin_pages = pages.admin(lambda: health.ready, options)
        control = grpc.aio.server(options=server_options(options.max_body_bytes))
        control.add_generic_rpc_handlers((eds.handler(),))
        health.add_to(control)
        entrance = Entrance(team.give)
        try:
            await listen(options, metrics_pages, admin_pages, entrance, control)
            await team.run(stopping)
        finally:
            # In order: say that we leave, let nobody in, let workers finish what is open, stop the rest.
            await health.set_ready(False)
            await entrance.stop(None)
            await team.stop(options.drain_timeout)
            await control.stop(None)
            await metrics_pages.stop()
            await admin_pages.stop()
