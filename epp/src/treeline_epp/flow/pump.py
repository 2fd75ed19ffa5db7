"""The driver of flow control on asyncio: it is looked after while something waits, and costs nothing otherwise."""

from __future__ import annotations

import asyncio
from typing import Any

from treeline_epp.flow.control import FlowControl

PUMP_S = 0.005
"""As late may a request go on that has room."""
_SHARE = 10
"""Looking for room takes at most one part in this many of the time, however much waits."""


class Pump:
    """Pumps a flow control whenever something waits in it. Make it inside the event loop."""

    def __init__(self, control: FlowControl[Any]) -> None:
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        control.woken = self._wake

    def _wake(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(PUMP_S, self._pump)

    def _pump(self) -> None:
        began = self._loop.time()
        self._timer = None
        more = False
        try:
            more = self._control.pump()
        finally:  # whatever failed, the others still wait
            if self._control.waiting and self._timer is None:
                took = self._loop.time() - began
                self._timer = self._loop.call_later(0.0 if more else max(PUMP_S, _SHARE * took), self._pump)
