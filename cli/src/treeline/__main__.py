"""The entry of the command. Ctrl-C ends it silently from here on, also while modules are loading."""

import os
import signal
import sys


def _quit(number: int, _frame: object) -> None:
    """Ends at once: nothing has been started, so nothing needs a clean-up, and an exception could surface inside any
    import."""
    os._exit(128 + number)


def run() -> int:
    """`treeline` on the command line; returns the exit status."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it was started with SIGINT ignored
        signal.signal(signal.SIGINT, _quit)
    from treeline.main import main

    return main()


if __name__ == "__main__":
    sys.exit(run())
