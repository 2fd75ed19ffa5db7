"""A child process ends with its parent."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """On Linux, have the kernel kill this process when the thread that started it ends (`prctl(2)`), be that with its
    whole process. Who is gone already is not noticed."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
