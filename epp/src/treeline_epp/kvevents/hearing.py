"""Judges whether an engine's events arrive here, by its connections and by the prompts that it serves. Pure.

The address that an engine names proves nothing: a NetworkPolicy may close the port, the engine may connect to that
address instead of listening there, the topic may be another, its prefix cache may be off. Its requests are routed by
history then, and the administrator must learn why.

    UNKNOWN      followed, but neither connected nor given up yet
    HEARD        connected
    UNREACHED    a connection has been missing for `UNREACHED_S`; HEARD again when all have held for `STEADY_S`
    UNREADABLE   connected, and most of the last events could not be decoded
    NOTHING      connected, and no batch has come while it served prompts that were new to it

An engine that is not ready is not judged: a restart is normal.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple

UNREACHED_S: Final = 5.0
"""Reconnecting takes half a second; a publisher thread may be busy with a replay for some seconds."""
STEADY_S: Final = 5.0
"""A publisher that accepts connections and drops them must not change the routing each time."""
SILENT_PROMPTS: Final = 8
SILENT_TOKENS: Final = 4096
"""Prompts, and their new tokens in all, that fill blocks of any engine (a hybrid model's have some hundreds of tokens),
and so must cause events."""
UNREAD_EVENTS: Final = 16
"""Least events by whose majority the state is judged."""
_SILENT_LOOKS: Final = 3
"""Looks without events before NOTHING: events come only after the step that computed the prompt."""


class HearingState(Enum):
    """The state of an endpoint's events; see the module."""

    UNKNOWN = "unknown"
    HEARD = "heard"
    UNREACHED = "unreached"
    UNREADABLE = "unreadable"
    NOTHING = "nothing"


class Prefills(NamedTuple):
    """The prompts with a known prefix that an endpoint has answered, and their tokens that were new to it."""

    prompts: int = 0
    tokens: int = 0


class Readings(NamedTuple):
    """The events of an endpoint that could be decoded, and those that could not."""

    understood: int = 0
    unread: int = 0


@dataclass(slots=True)
class Hearing:
    """The judgement on one endpoint. Its process's connections are looked at about every second."""

    state: HearingState = HearingState.UNKNOWN
    _broken_since: float | None = None
    _whole_since: float | None = None
    _breaks: int | None = None
    _before: Prefills = field(default=Prefills())
    _silent_looks: int = 0
    _judged: Readings = field(default=Readings())
    _garbled: bool = False

    def look(
        self,
        now: float,
        *,
        connected: bool,
        breaks: int,
        batches: int,
        served: Prefills,
        readings: Readings = Readings(),  # noqa: B008
    ) -> bool:
        """Take a look's facts at `now`; return True if they change the state. `connected`: to all publishers; `breaks`:
        lost connections, `batches`: received ones, `readings` of their events, all since the process is followed.
        """
        held = connected and self._breaks in (None, breaks)  # it may have been lost and restored since the last look
        self._breaks = breaks
        if not held:
            self._whole_since = None
            self._broken_since = now if self._broken_since is None else self._broken_since
        elif self._whole_since is None:
            self._whole_since, self._broken_since = now, None
            self._before, self._silent_looks = served, 0
        understood, unread = (now - then for now, then in zip(readings, self._judged, strict=True))
        if understood + unread >= UNREAD_EVENTS:
            self._judged, self._garbled = readings, unread > understood
        before, self.state = self.state, self._judge(now, batches, served)
        return self.state is not before

    def rest(self) -> None:
        """Pause while the engine is not ready: this time does not count."""
        self._broken_since = self._whole_since = None

    def _judge(self, now: float, batches: int, served: Prefills) -> HearingState:
        if self._broken_since is not None:
            given_up = now - self._broken_since >= UNREACHED_S
            return HearingState.UNREACHED if given_up else self.state
        assert self._whole_since is not None
        if self.state is HearingState.UNREACHED and now - self._whole_since < STEADY_S:
            return self.state
        if self._garbled:
            return HearingState.UNREADABLE
        if batches:
            return HearingState.HEARD
        prompts, tokens = served.prompts - self._before.prompts, served.tokens - self._before.tokens
        if prompts >= SILENT_PROMPTS and tokens >= SILENT_TOKENS:
            self._silent_looks += 1
        if self._silent_looks >= _SILENT_LOOKS or self.state is HearingState.NOTHING:
            return HearingState.NOTHING
        return HearingState.HEARD
