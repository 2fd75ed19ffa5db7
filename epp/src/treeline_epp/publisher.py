"""A publisher's state machine: what to ask of a publisher so that the index equals its cache. Sans-IO.

The driver owns the sockets: it feeds what arrives, performs the returned actions on the publisher's replay socket
(a DEALER; a fresh one after each reconnect, so that replies to old questions cannot arrive), and calls `on_tick`.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from treeline_wire.events import EventBatch
from treeline_wire.frames import Reply

from treeline_epp.index import Index, Pod


class State(StrEnum):
    """NEW → BOOTSTRAP → LIVE → SUSPECT → LIVE | BOOTSTRAP."""

    NEW = "new"
    BOOTSTRAP = "bootstrap"
    LIVE = "live"
    SUSPECT = "suspect"


@dataclass(frozen=True, slots=True)
class SendHello:
    """Send `frames.hello_request()`."""


@dataclass(frozen=True, slots=True)
class SendReplay:
    """Send `frames.replay_request(start_seq)`."""

    start_seq: int


@dataclass(frozen=True, slots=True)
class SendSnapshot:
    """Send `frames.snapshot_request()`."""


Action: TypeAlias = SendHello | SendReplay | SendSnapshot


class Publisher:
    """One (pod UID, rank). Every method returns the actions to perform now, in order."""

    def __init__(self, index: Index, pod: Pod, keys: object | None = None) -> None:
        self.index = index
        self.pod = pod
        self.keys = keys
        self.state = State.NEW

    def on_connected(self, now: float) -> list[Action]:
        """Both sockets are connected (again)."""
        return [SendHello()]

    def on_disconnected(self, now: float) -> None:
        """A socket lost its peer."""

    def on_live(self, seq: int, batch: EventBatch | None, now: float) -> list[Action]:
        """A live batch; None if its payload could not be decoded."""
        return []

    def on_reply(self, reply: Reply, now: float) -> list[Action]:
        """Anything that arrived on the replay socket."""
        return []

    def on_heartbeat(self, epoch: int, seq: int, now: float) -> list[Action]:
        """A load report named the publisher's epoch and its newest batch."""
        return []

    def on_tick(self, now: float, in_flight: int = 0) -> list[Action]:
        """Time passed; call at least every 100 ms. `in_flight`: requests that we know to be running there."""
        return []
