"""A request that waits: the data that decide its turn, and its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from msgspec.structs import replace

from treeline_epp.picking.request import Request

R = TypeVar("R")
ANY_NAME = ""
"""Stands for all unlisted models: the same endpoints may serve them, and each request may invent a new name."""
Served = Callable[[float], None]
"""Corrects the estimate of a request's size: takes its real tokens, of prompt and output."""


class Target(NamedTuple):
    """The fields that decide which endpoints may serve a request; requests with the same target share a line."""

    pool: str | None
    model: str | None
    subset: frozenset[str] | None
    fallback_pools: tuple[str, ...] = ()
    apart: bool = False

    @classmethod
    def of(cls, asked: Request) -> Target:
        """Return the target of this request."""
        return cls(
            asked.pool, asked.model if asked.listed else ANY_NAME, asked.subset, asked.fallback_pools, asked.apart
        )


@dataclass(eq=False, slots=True, kw_only=True)
class Awaited:
    """Something that a request waits for. It is done once; then whoever waits for it is called, once."""

    done: bool = False
    _callback: Callable[[], object] | None = None

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call this once, when it is done, or at once if it is. A later callback replaces an earlier one."""
        if self.done:
            callback()
        else:
            self._callback = callback

    def _end(self) -> None:
        callback, self._callback, self.done = self._callback, None, True
        if callback is not None:
            callback()


@dataclass(eq=False, slots=True)
class Ticket(Awaited, Generic[R]):
    """A request that waits for its turn. Owner: `FlowControl`, which finishes it once; then its holder is called, once.

    `flow` is the name of its flow, `size` its body in bytes, `uncached_tokens` the prompt tokens that an endpoint would
    compute. Times are seconds of the clock. The queue writes `number`, its place among all tickets ever, and `served`.
    """

    asked: Request
    flow: str
    size: int
    decide: Callable[[], R]
    since: float
    limit_s: float
    uncached_tokens: int = 0
    number: int = 0
    served: Served | None = None
    target: Target = None  # type: ignore[assignment]
    _result: R | None = None
    _error: Exception | None = None

    def __post_init__(self) -> None:
        self.target = Target.of(self.asked)

    @property
    def room_for(self) -> list[Request]:
        """The requests for which an endpoint must have room before the decision: one of its own pool, or while that has
        no endpoint, one of a fallback pool. The endpoint knows whether an unlisted model is one of its own.
        """
        asked = self.asked
        own = asked if asked.listed else replace(asked, model=None)
        return [own, *(replace(asked, model=None, pool=pool) for pool in asked.fallback_pools)]

    def finish(self, result: R | None, error: Exception | None = None) -> None:
        """Finish the ticket: its turn has come, or it is refused."""
        assert not self.done, "a request is answered once"
        self._result, self._error = result, error
        self._end()

    def result(self) -> R | None:
        """Return the result; None if the caller no longer wanted it. Raises the refusal."""
        assert self.done
        if self._error is not None:
            raise self._error
        return self._result
