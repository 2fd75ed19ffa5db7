"""What rank 0 tells the other ranks, and the digests by which each of them sees that it computes the same step.

Each rank has a stream in both directions: a socket pair, or a TCP connection from another node. On it come `Orders`, a
line of JSON, then commands in msgpack, each after its length. What a rank says are lines of JSON; it answers no command
but `Settle`.
"""

from __future__ import annotations

import hashlib
import logging
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple, Protocol, TypeVar

import msgspec

from treeline_runtime.collectives import Ranks
from treeline_runtime.config import ConfigError, SchedulerConfig
from treeline_runtime.models.config import ModelError
from treeline_runtime.nodes import LastWords
from treeline_runtime.scheduler.plan import StepPlan

logger = logging.getLogger(__name__)

T = TypeVar("T")

DIGEST_BYTES = 8


class GroupFailed(BaseException):
    """A rank has ended, is silent, or computes something else: so the group is at its end. Not an `Exception`: no
    request is to blame, and none can go on."""


class Agreed(ModelError):
    """Why one of the ranks could not do what all had to; all of them know it, and none has done it."""


class Launch(NamedTuple):
    """How a rank computes a step."""

    mode: Literal["decode graph", "prompt graph", "eager"]
    bucket: int
    """Sequences or tokens of the graph; 0: no graph."""


class Step(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Compute this step."""

    plan: msgspec.Raw
    """A StepPlan."""
    launch: Launch
    """How rank 0 computes it."""
    digest: bytes


class Delayed(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Rank 0 has sampled the delayed rows of the newest step: take its tokens."""


class Clear(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Zero these pages."""

    pages: list[int]


class Share(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Pages come and go through this memory; `Settle` will follow."""

    place: str
    """See `Slab.place`."""
    page_bytes: int


class Copy(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Copy this rank's part of pages to slots of the shared memory, or back, beside steps; say `Copied`."""

    number: int
    to_host: bool
    pages: list[int]
    slots: list[int]


class Call(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Do the same with the residence."""

    name: Literal["sleep", "wake", "update", "begin_read", "end_read", "drop_adapter"]
    argument: int | str | None = None


class Settle(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """All ranks have done what all had to do."""

    problem: str | None
    """Why one of them could not."""
    least: int
    """The smallest of the ranks' numbers."""


Command = Step | Delayed | Clear | Share | Copy | Call | Settle

LENGTH = struct.Struct(">I")
"""Of a command, in bytes."""

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Command).decode
decode_plan = msgspec.msgpack.Decoder(StepPlan).decode


class Orders(msgspec.Struct, frozen=True):
    """What a rank's process needs to know first."""

    config: SchedulerConfig
    index: int
    place: str
    """Where the ranks meet (`collectives.open_store`)."""
    host: str
    """The address at which the others reach this rank."""
    log_level: str
    log_format: str | None


class Vote(msgspec.Struct, tag=True, frozen=True):
    """A rank has done its part of what `Settle` will end."""

    problem: str | None
    number: int


class Alive(msgspec.Struct, tag=True, frozen=True):
    """A rank's process runs."""


class Copied(msgspec.Struct, tag=True, frozen=True):
    """A `Copy` has ended."""

    number: int
    problem: str | None = None


Word = Vote | LastWords | Alive | Copied
"""What a rank says."""


class Digests:
    """A rank's history of steps in eight bytes, which differ if one of its steps did."""

    def __init__(self) -> None:
        self._last = b""

    def after(self, plan: bytes | msgspec.Raw, launch: Launch) -> bytes:
        """Adds a step: its encoded plan, which has rows and lengths, its mode and its graph."""
        digest = hashlib.blake2b(self._last, digest_size=DIGEST_BYTES)
        digest.update(plan)
        digest.update(f"{launch.mode} {launch.bucket}".encode())
        self._last = digest.digest()
        return self._last


def drift(step: Step, own: Launch) -> str:
    """What differs between rank 0 and a rank that would compute a step as `own`."""
    sequences = len(decode_plan(step.plan).rows)
    if own != step.launch:
        told, mine = ("no graph" if not one.bucket else f"{one.mode} of {one.bucket}" for one in (step.launch, own))
        return f"its step of {sequences} sequences uses {mine}, rank 0's {told}"
    return f"its steps up to this one, of {sequences} sequences, were not rank 0's"


def told(error: Exception) -> str:
    return str(error) if isinstance(error, ConfigError | ModelError) else repr(error)


class Fails(Protocol):
    """What ends as a whole when something fails that all ranks must do."""

    def failed(self, error: Exception) -> GroupFailed:
        """The first reason for which it ends, now that this has failed here."""


class Group(Fails, Protocol):
    """The other ranks, as one sees them. What only rank 0 does is nothing on the others: all run the same code."""

    ranks: Ranks

    def begin(self, plan: StepPlan, launch: Launch) -> None:
        """Rank 0 tells the others to compute this step; they compare. Raises GroupFailed."""

    def tell(self, command: Delayed | Clear | Share | Call) -> None:
        """Rank 0 tells the others."""

    def settle(self, problem: str | None = None, number: int = 0) -> tuple[str | None, int]:
        """Waits until all ranks are here. Returns a problem if one has it, and the smallest number."""


def together(group: Group | None, make: Callable[[], T], number: Callable[[T], int] = lambda _: 0) -> tuple[T, int]:
    """Runs `make` on all ranks at once; returns this rank's result and the smallest of the ranks' numbers. If it fails
    on one of them, raises Agreed on all."""
    if group is None:
        made = make()
        return made, number(made)
    try:
        made = make()
    except Exception as error:
        if not isinstance(error, ConfigError | ModelError):
            logger.exception("rank %d failed", group.ranks.rank.number)
        raise Agreed(group.settle(told(error))[0]) from None
    problem, least = group.settle(None, number(made))
    if problem is not None:
        del made  # its memory is given back
        raise Agreed(problem)
    return made, least


@contextmanager
def as_one(group: Fails | None) -> Iterator[None]:
    """A context manager for what all ranks do with collectives: if one fails, the others wait for it, so that the group
    is at its end. If there is a group, raises GroupFailed for any error but Agreed."""
    try:
        yield
    except Agreed:
        raise
    except Exception as error:
        if group is None:
            raise
        raise group.failed(error) from error
