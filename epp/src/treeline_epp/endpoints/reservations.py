"""Reservations: the prefill work that picks have added to an endpoint and that no load report shows yet.

A reservation opens at the pick and closes once: at the response headers, at an error, when the client goes away, or
when it expires at three times the predicted prefill, so that a lost stream cannot leave phantom load behind. Where
headers come before the prefill, it may stay until the prefill should be done (`let_run`).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Number = TypeVar("Number", float, npt.NDArray[np.float64])
"""A value of one endpoint, or of many in an array."""

EXPIRY_FACTOR = 3.0
"""A reservation lives this many times the predicted prefill …"""
MIN_LIFETIME_S = 2.0
"""… but never less than this, in seconds: predictions for short prompts are noise."""
ARRIVALS_S = 3.0
"""Seconds over which the rate of picks is measured: short, since a prefix of few requests comes and goes in seconds."""
_ALPHA = 0.2
"""Weight of a new pick in the moving average."""


@dataclass(eq=False, slots=True)
class Reservation:
    """The prefill work of one pick. The `Reservations` that opened it own it."""

    tokens: int
    opened_at: float
    expires_at: float
    done_at: float
    """When its prefill should be done, as predicted at the pick."""
    open: bool = True
    answered: bool = False


@dataclass(slots=True)
class Reservations:
    """The open reservations of one endpoint, oldest first.

    >>> held = Reservations()
    >>> first = held.open(100, now=1.0, predicted_prefill_s=0.5)
    >>> second = held.open(50, now=2.0, predicted_prefill_s=0.5)
    >>> held.tokens, held.newer_than(1.5)
    (150, (50, 1))
    >>> held.close(first), held.close(first), held.tokens
    (True, False, 50)
    >>> held.expire(now=60.0), held.tokens
    (1, 0)
    """

    tokens: int = 0
    typical_tokens: float = 0.0
    """A moving average over the picks so far; 0 before the first."""
    arrivals: float = 0.0
    """The faded count of picks at the last one, `arrived_at`."""
    arrived_at: float = float("-inf")
    _open: OrderedDict[int, Reservation] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._open)

    def open(self, tokens: int, now: float, predicted_prefill_s: float) -> Reservation:
        """Add `tokens` of prefill work. O(1)."""
        lifetime = max(MIN_LIFETIME_S, EXPIRY_FACTOR * predicted_prefill_s)
        reservation = Reservation(tokens, now, now + lifetime, now + predicted_prefill_s)
        if tokens:
            self.typical_tokens += (tokens - self.typical_tokens) * (_ALPHA if self.typical_tokens else 1.0)
        self._open[id(reservation)] = reservation
        self.tokens += tokens
        self.arrivals = ARRIVALS_S * arrivals_per_s(self.arrivals, self.arrived_at, now) + 1.0
        self.arrived_at = now
        return reservation

    def close(self, reservation: Reservation) -> bool:
        """Remove the work; True the first time, False afterwards. O(1)."""
        if not reservation.open:
            return False
        reservation.open = False
        del self._open[id(reservation)]
        self.tokens -= reservation.tokens
        return True

    def let_run(self, reservation: Reservation, now: float) -> None:
        """Keep a reservation whose answer began before its prefill until the prefill should be done. O(1)."""
        if reservation.done_at <= now:
            self.close(reservation)
        else:
            reservation.answered = True
            reservation.expires_at = min(reservation.expires_at, reservation.done_at)

    def close_answered(self, time: float) -> None:
        """Close answered reservations opened until `time`: a report has come that includes them. O(open)."""
        known = takewhile(lambda held: held.opened_at <= time, self._open.values())
        for held in [held for held in known if held.answered]:
            self.close(held)

    def expire(self, now: float) -> int:
        """Close reservations that are past their time; return how many. O(open reservations)."""
        late = [held for held in self._open.values() if held.expires_at <= now]
        for held in late:
            self.close(held)
        return len(late)

    def newer_than(self, time: float) -> tuple[int, int]:
        """Return `(tokens, requests)` opened after `time`: a report of that time lacks them. O(result)."""
        tokens = requests = 0
        for held in reversed(self._open.values()):
            if held.opened_at <= time:
                break
            tokens += held.tokens
            requests += 1
        return tokens, requests

    def check(self) -> None:
        """Assert the invariants."""
        assert self.tokens == sum(held.tokens for held in self._open.values())
        assert all(held.open for held in self._open.values())
        opened = [held.opened_at for held in self._open.values()]
        assert opened == sorted(opened)


def arrivals_per_s(arrivals: Number, arrived_at: Number, now: float) -> Number:
    """Return picks per second, from their faded count at `arrived_at`: those of age `ARRIVALS_S` count half."""
    return arrivals / (ARRIVALS_S + (now - arrived_at))
