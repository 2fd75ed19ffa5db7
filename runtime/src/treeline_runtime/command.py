"""`treeline serve`. Arguments are read before the server is loaded (a second): help and mistakes come at once."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Sequence

from treeline_runtime.args import parse_args

logger = logging.getLogger("treeline")


def main(argv: Sequence[str] | None = None) -> int:
    """`treeline serve` with `argv` (default: the command line's); returns the exit status."""
    try:
        args = parse_args(argv)
    except SystemExit as stop:  # --help, or a wrong argument, which has been printed
        return stop.code if isinstance(stop.code, int) else 1
    signal.signal(signal.SIGTERM, _quit)
    signal.signal(signal.SIGINT, _quit)

    from treeline_runtime.download import ModelNotFound
    from treeline_runtime.frontend import ServeError, give_back_large_blocks
    from treeline_runtime.listeners import EventsError, ListenError
    from treeline_runtime.processes import setup_logging
    from treeline_runtime.serve import serve

    setup_logging("http", args.log_level, args.log_format)
    give_back_large_blocks()
    try:
        return serve(args)
    except (ListenError, ServeError, EventsError, ModelNotFound) as error:
        logger.error("treeline serve: error: %s", error)
        return 1


def _quit(number: int, _frame: object) -> None:
    """A signal before there is a server to drain: there is nothing to clean up, and an exception would wait for the
    threads of a download. (Process 1 of a container ignores SIGTERM by default.)"""
    os._exit(128 + number)
