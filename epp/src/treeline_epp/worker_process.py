"""`python -m treeline_epp.worker_process FD …`: one worker of a picker, started by its parent (`workers/team.py`)."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Sequence

import uvloop
from treeline_wire.logs import set_up

from treeline_epp.main import StartError, serve
from treeline_epp.options import Options, options_of
from treeline_epp.workers.link import MOST_LINE, Start, Worker, lines
from treeline_epp.workers.places import for_one

log = logging.getLogger("treeline_epp")


def main(argv: Sequence[str]) -> int:
    """Take requests until SIGTERM, or until the parent is no more; returns the exit status."""
    options = options_of(argv[1:])
    set_up(options.log_level, "treeline_epp", "treeline_kube")
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_work(socket.socket(fileno=int(argv[0])), options))
    except StartError as error:
        log.error("%s", error)
        return 1
    return 0


async def _work(link: socket.socket, options: Options) -> None:
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    reader, writer = await asyncio.open_connection(sock=link, limit=MOST_LINE)
    start = await anext(lines(reader), None)
    if not isinstance(start, Start):
        return  # the parent has ended meanwhile
    worker = Worker(start, writer)
    following = asyncio.create_task(worker.follow(reader))
    following.add_done_callback(lambda _: stopping.set())
    try:
        await serve(for_one(options), stopping, worker=worker)
    finally:
        following.cancel()
        writer.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
