"""Follows one collection of the API server: list, then watch, and again after failures. No socket, no clock.

A reflector names its next request (`request`), gets the outcome, and passes objects to a sink. A sink keeps its objects
until a newer list is complete. The reflector has three states; `_transition` implements this table, where a dash is an
impossible event, OutOfOrder:

| event                        | LISTING                     | RESUMING                 | WATCHING                 |
|------------------------------|-----------------------------|--------------------------|--------------------------|
| page, more to come           | LISTING at once             | -                        | -                        |
| last page                    | RESUMING at once, or, where | -                        | -                        |
|                              | it polls, LISTING in poll_s |                          |                          |
| watch opened                 | -                           | WATCHING                 | -                        |
| object, bookmark             | -                           | -                        | WATCHING                 |
| watch ended by the server    | -                           | -                        | RESUMING at once [1]     |
| no answer, silence, 5xx, 429 | LISTING, the same page [2]  | RESUMING [2]             | RESUMING [2]             |
| 410 (also as an event)       | LISTING, in one piece [3]   | LISTING                  | LISTING                  |
| 401, 403, 404, malformed     | LISTING                     | LISTING                  | LISTING                  |

Failed requests are repeated after a backoff: at least a 429's Retry-After, and `absent_s` if an optional kind is
missing or forbidden, which then counts as empty.

[1] After a backoff if the watch was short and brought nothing: something ends our watches.
[2] LISTING from the first page if the server was silent for `outage_s`: if it was restored from a backup, its versions
went back, and a watch from a later version would be silent for ever.
[3] After pages: the list takes longer than its pages live.
"""

from __future__ import annotations

import enum
import logging
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from treeline_kube.connection import ONCE, Call, Retry
from treeline_kube.errors import Forbidden, Gone, KubeError, Malformed, NotFound, Unauthorized, error_of
from treeline_kube.resources import Collection
from treeline_kube.yaml_depth import deep_json

log = logging.getLogger(__name__)

LONGEST_RETRY_AFTER_S: Final = 60.0
"""A server that asks for more patience than this is asked again all the same."""
_SHORT_S: Final = 1.0
_LINE_BYTES: Final = 32 * 1024 * 1024
_LIST: Final = Retry(attempt_s=30.0, budget_s=30.0, attempts=ONCE.attempts)
_UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class State(enum.Enum):
    """The next request, or the open one."""

    LISTING = "listing"
    RESUMING = "resuming"
    WATCHING = "watching"


class OutOfOrder(RuntimeError):
    """A bug in the driver: it reports an event that is impossible in this state."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds.

    The server is asked to end a watch after `watch_s`, more or less. It sends a bookmark every minute, so a watch that
    brings nothing for `silence_s` is dead. With `poll_s` nothing is watched, and the list comes again so often.
    """

    watch_s: float = 300.0
    silence_s: float = 75.0
    outage_s: float = 60.0
    absent_s: float = 60.0
    backoff_s: tuple[float, float] = (0.2, 10.0)
    poll_s: float | None = None


_Take = Callable[[msgspec.Raw], bool | None]


class Sink(Protocol):
    """Stores what a reflector sees. Objects are JSON; unreadable ones raise `msgspec.MsgspecError`.

    Methods that return a bool return whether something changed.
    """

    def begin(self) -> None:
        """Start a list, and drop an unfinished one."""

    def listed(self, data: msgspec.Raw) -> None:
        """Add an object that the list names."""

    def complete(self, version: str) -> bool:
        """End the list: objects that it did not name are gone."""
        ...

    def changed(self, data: msgspec.Raw) -> bool:
        """Store a new or changed object."""
        ...

    def deleted(self, data: msgspec.Raw) -> bool:
        """Remove a deleted object."""
        ...


class Health(msgspec.Struct, frozen=True):
    """Whether the sink is current. `age_s` is the time since the server was last heard."""

    synced: bool
    watching: bool
    age_s: float | None
    error: str | None


class _ListMeta(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class _List(msgspec.Struct):
    metadata: _ListMeta
    items: list[msgspec.Raw] | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Meta(msgspec.Struct, rename="camel"):
    name: str = ""
    resource_version: str = ""


class _Versioned(msgspec.Struct):
    metadata: _Meta = msgspec.field(default_factory=_Meta)


class _Code(msgspec.Struct):
    code: int = 500


_list = msgspec.json.Decoder(_List).decode
_event = msgspec.json.Decoder(_Event).decode
_versioned = msgspec.json.Decoder(_Versioned).decode
_code = msgspec.json.Decoder(_Code).decode


class Reflector:
    """See the module. `advice` maps an error's `word` to advice; `page` is the number of objects per response."""

    def __init__(
        self,
        collection: Collection,
        sink: Sink,
        *,
        timing: Timing | None = None,
        optional: bool = False,
        page: int = 100,
        advice: Mapping[str, str] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.collection = collection
        self.sink = sink
        self.timing = timing or Timing()
        self.optional = optional
        self.state = State.LISTING
        self.synced = False
        self.lists = 0
        self.events = 0
        self.errors: Counter[str] = Counter()
        self.error: KubeError | None = None
        """Why the collection is not followed now."""
        self.unavailable = False
        """The server reported the kind as absent or forbidden, and has listed nothing since."""
        self._advice = advice or {}
        self._page = page
        self._rng = rng or random.Random()
        self._heard_at: float | None = None
        self._opened_at = 0.0
        self._events_before = 0
        self._version = ""
        self._continue = ""
        self._in_pages = True
        self._rest = b""
        self._failures = 0

    @property
    def label(self) -> str:
        """Its name for people and metrics."""
        return self.collection.resource.label

    @property
    def usable(self) -> bool:
        """Whether the sink can be used: it was complete once, or the kind is optional and absent."""
        return self.synced or (self.optional and self.unavailable)

    def health(self, now: float) -> Health:
        """The current health."""
        age = None if self._heard_at is None else max(0.0, now - self._heard_at)
        waiting = None if self.synced else "its list has not arrived yet"
        error = f"{self.error.word}: {self.error}" if self.error else waiting
        return Health(self.synced, self.synced and self.error is None, age, error)

    # --- asking -------------------------------------------------------------------------------------------------------

    def request(self) -> Call:
        """The next request."""
        query = [("labelSelector", self.collection.selector)] if self.collection.selector else []
        plural, path = self.collection.resource.plural, self.collection.path
        if self.state is State.LISTING:
            query += [("limit", str(self._page))] if self._in_pages else []
            query += [("continue", self._continue)] if self._continue else []
            return Call("list", plural, path, query, retry=_LIST)
        query += [
            ("watch", "true"),
            ("allowWatchBookmarks", "true"),
            ("resourceVersion", self._version),
            ("timeoutSeconds", str(int(self.timing.watch_s * self._rng.uniform(0.9, 1.1)))),
        ]
        return Call("watch", plural, path, query)

    # --- being answered -----------------------------------------------------------------------------------------------

    def on_page(self, body: bytes, now: float) -> bool:
        """Process a page of a list. True if the list is complete and changed something. Raises Malformed if it is not a
        list."""
        self._expect(State.LISTING)
        try:
            with deep_json():
                page = _list(body)
        except _UNREADABLE as error:
            raise Malformed(f"not a list: {error}") from None
        if not page.metadata.resource_version:
            raise Malformed("a list without a resourceVersion")
        self._heard_at = now
        self.unavailable = False
        if not self._continue:
            self.sink.begin()
        for data in page.items or ():
            self._read(self.sink.listed, data)
        self._continue = page.metadata.continue_
        if self._continue:
            return False
        first = not self.synced
        self._version = page.metadata.resource_version
        self._in_pages = True
        self.synced = True
        self.lists += 1
        if self.timing.poll_s is None:
            self.state = State.RESUMING
        else:
            self._recovered()
        return self.sink.complete(self._version) or first

    def pause_after_list(self) -> float:
        """The pause before the next request after a page."""
        if self.timing.poll_s is None or self._continue or not self.synced:
            return 0.0
        return self.timing.poll_s * self._rng.uniform(0.75, 1.0)

    def on_open(self, now: float) -> None:
        """The watch has begun."""
        self._expect(State.RESUMING)
        self.state = State.WATCHING
        self._heard_at = self._opened_at = now
        self._events_before = self.events
        self._rest = b""
        self._recovered(failures=self._failures)

    def on_data(self, data: bytes, now: float) -> bool:
        """Process bytes of the watch. True if something changed. Raises KubeError, which ends this watch."""
        self._expect(State.WATCHING)
        self._heard_at = now
        lines = (self._rest + data if self._rest else data).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > _LINE_BYTES:
            raise Malformed("an event without an end")
        news = False
        for line in lines:
            if line.strip():
                news |= self._on_event(line)
        return news

    def on_end(self, now: float) -> float:
        """The server has ended the watch. Returns the pause before the next request."""
        self._expect(State.WATCHING)
        self.state = State.RESUMING
        if now - self._opened_at < _SHORT_S and self.events == self._events_before:
            return self._pause()
        self._failures = 0
        return 0.0

    def on_failure(self, error: KubeError, now: float) -> float:
        """A request failed, or a watch broke. Returns the pause before the next request."""
        self.errors[error.word] += 1
        refused = isinstance(error, Forbidden | NotFound)
        self.unavailable |= refused
        self._note(error)
        out = self._heard_at is None or now - self._heard_at > self.timing.outage_s
        if isinstance(error, Gone):
            self._in_pages = not (self.state is State.LISTING and self._continue)
            self._relist()
        elif out or isinstance(error, Unauthorized | Forbidden | NotFound | Malformed):
            self._relist()
        elif self.state is State.WATCHING:
            self.state = State.RESUMING
        if self.optional and refused:
            return self.timing.absent_s * self._rng.uniform(0.8, 1.0)
        return max(min(error.retry_after_s or 0.0, LONGEST_RETRY_AFTER_S), self._pause())

    def _on_event(self, line: bytes) -> bool:
        try:
            with deep_json():
                event = _event(line)
                if event.type == "ERROR":
                    raise error_of(_code(event.object).code, bytes(event.object), None, f"watch {self.label}")
                version = _versioned(event.object).metadata.resource_version
        except _UNREADABLE as error:
            raise Malformed(f"not an event: {error}") from None
        self._version = version or self._version
        self.events += 1
        self._failures = 0
        if event.type == "BOOKMARK":
            return False
        return self._read(self.sink.deleted if event.type == "DELETED" else self.sink.changed, event.object)

    def _read(self, take: _Take, data: msgspec.Raw) -> bool:
        """Pass an object to the sink. An unreadable one keeps its last known state."""
        try:
            with deep_json():
                return bool(take(data))
        except _UNREADABLE as error:
            self.errors["unreadable"] += 1
            try:
                name = _versioned(data).metadata.name
            except _UNREADABLE:
                name = ""
            log.warning("%s %s cannot be read: %s", self.label, name, error)
            return False

    # --- what follows -------------------------------------------------------------------------------------------------

    def _expect(self, state: State) -> None:
        if self.state is not state:
            raise OutOfOrder(f"{self.label}: cannot be {state.value} while {self.state.value}")

    def _relist(self) -> None:
        self.state = State.LISTING
        self._version = self._continue = ""

    def _recovered(self, failures: int = 0) -> None:
        self._failures = failures
        if self.error is not None:
            log.info("%s is followed again", self.label)
            self.error = None

    def _pause(self) -> float:
        first, longest = self.timing.backoff_s
        pause = min(longest, first * 2.0 ** min(self._failures, 16))
        self._failures += 1
        return pause * self._rng.uniform(0.5, 1.0)

    def advised(self) -> str | None:
        """The error with what to do about it."""
        if self.error is None:
            return None
        advice = self._advice.get(self.error.word)
        return f"{self.error.word}: {self.error}" + (f"; {advice}" if advice else "")

    def _note(self, error: KubeError) -> None:
        """Say it once, not with every attempt."""
        known, self.error = self.error, error
        if known is not None and known.word == error.word:
            return
        if self.optional and self.unavailable:
            log.warning("%s is optional and not followed: %s", self.label, self.advised())
        elif self.synced:
            log.warning("%s is not followed, known objects stay in use: %s", self.label, self.advised())
        else:
            log.warning("%s cannot be listed yet: %s", self.label, self.advised())
