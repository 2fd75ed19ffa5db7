"""A request that waits: what decides its turn, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

from msgspec.structs import replace

from treeline_epp.picking.request import PickRequest

R = TypeVar("R")
ANY_NAME = ""
"""All models that are not listed: the same endpoints may serve them, and each request may invent another name."""


class Served(Protocol):
    """What a request that waited was believed to take, until it is known."""

    def took(self, tokens: float) -> None:
        """This many tokens, of prompt and output, all in all."""
        ...


class Target(NamedTuple):
    """What requests have in common that the same endpoints may serve."""

    pool: str | None
    model: str | None
    subset: frozenset[str] | None
    fallback_pools: tuple[str, ...] = ()

    @classmethod
    def of(cls, asked: PickRequest) -> Target:
        """Of this request."""
        return cls(asked.pool, asked.model if asked.listed else ANY_NAME, asked.subset, asked.fallback_pools)


class Ticket(Generic[R]):
    """A request that waits for its turn. Owner: `FlowControl`, which finishes it once; then its holder is called, once.

    `flow` is whose it is, `size` its body in bytes, `uncached_tokens` what an endpoint would compute of its prompt.
    Times are seconds of the clock.
    """

    __slots__ = (
        "_callback",
        "_error",
        "_result",
        "asked",
        "decide",
        "done",
        "else_room_for",
        "flow",
        "limit_s",
        "number",
        "room_for",
        "served",
        "since",
        "size",
        "target",
        "uncached_tokens",
    )

    def __init__(
        self, asked: PickRequest, flow: str, size: int, decide: Callable[[], R], *, since: float, limit_s: float
    ) -> None:
        self.asked = asked
        self.flow = flow
        self.size = size
        self.target = Target.of(asked)
        # The endpoint tells whether the model is one of its own.
        self.room_for = asked if asked.listed else replace(asked, model=None)
        self.else_room_for = [replace(asked, model=None, pool=pool) for pool in asked.fallback_pools]
        """While its pool has no endpoint."""
        """What an endpoint must have room for before it is decided."""
        self.uncached_tokens = 0
        self.since = since
        self.limit_s = limit_s
        self.number = 0
        """Its place among all that ever waited. Written by the queue."""
        self.decide = decide
        self.done = False
        self.served: Served | None = None
        """What it was believed to take when its turn came. Written by flow control."""
        self._result: R | None = None
        self._error: Exception | None = None
        self._callback: Callable[[], object] | None = None

    @property
    def priority(self) -> int:
        """Of its band."""
        return self.asked.priority

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call this once, when it is done; at once where it is. A later callback takes the place of an earlier one."""
        if self.done:
            callback()
        else:
            self._callback = callback

    def finish(self, result: R | None, error: Exception | None = None) -> None:
        """Its turn has come, or it is refused."""
        assert not self.done, "a request is answered once"
        self.done = True
        self._result, self._error = result, error
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()

    def result(self) -> R | None:
        """What came of it; None where its caller no longer wanted it. Raises why it was refused."""
        assert self.done
        if self._error is not None:
            raise self._error
        return self._result
