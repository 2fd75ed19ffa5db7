"""What ends a command early."""

from __future__ import annotations

import signal
from types import FrameType


def take_interrupts() -> None:
    """Ctrl-C and SIGTERM raise KeyboardInterrupt from now on, so that a run ends with what there is, and through every
    `finally`.

    Whatever the process was started with: it inherits signals that are ignored, as a shell script's background commands
    have SIGINT, and that are blocked. Python leaves both as they are, and a run of an hour could not be ended.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _interrupt)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
