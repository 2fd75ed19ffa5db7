"""One kind of Kubernetes objects as last seen: list, then watch, and again where that breaks. No socket, no clock.

Theory of operation. A mirror says what to ask next (:meth:`Mirror.request`) and is told what came of it. What it holds
stays until something newer has arrived in full, whatever breaks:

================================  ============================================================  =====================
what happens                      what is asked next                                            when
================================  ============================================================  =====================
list complete                     watch from the list's version                                 at once
watch ends (server's timeout)     watch from the last version seen, bookmarks count             at once
connection lost, silence, 5xx     the same again; a list after an outage of a minute            backoff
410, as an answer or an event     list                                                          backoff
429                               the same again                                                as told, or backoff
401, 403, 404                     list; an optional kind counts as empty meanwhile              backoff; optional: slow
================================  ============================================================  =====================

The list after a long outage is for a control plane that was restored from a backup: its versions went back, and a watch
from a version of the future would be silent for ever.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

import msgspec

log = logging.getLogger(__name__)

T = TypeVar("T")

PAGE = 100
"""Objects in one answer to a list: decoding it must not hold up a pick."""
WATCH_S = 300.0
"""The server is asked to end a watch after this long, a little more or less."""
SILENCE_S = 75.0
"""A watch that brings nothing for so long is dead: servers send a bookmark every minute."""
OUTAGE_S = 60.0
"""After an outage this long the state is listed anew."""
BACKOFF_S = (0.2, 10.0)
"""First and longest pause after a failure."""
SLOW_S = 60.0
"""Pause before an optional kind that is forbidden or not installed is tried again."""
_SHORT_S = 1.0
"""A watch that ended sooner, with nothing in it, is a failure and not a timeout."""
_LINE_BYTES = 32 * 1024 * 1024


class Failure(Exception):
    """A request came to nothing. ``status`` is the HTTP status, 0 where there was no answer."""

    def __init__(self, status: int, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s

    @property
    def reason(self) -> str:
        """One word, for the label of a metric."""
        return _REASONS.get(self.status, "server" if self.status >= 500 else "refused")


_REASONS = {
    0: "unreachable",
    200: "malformed",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    410: "expired",
    429: "throttled",
}


class Resource(msgspec.Struct, frozen=True):
    """A kind in a namespace. ``selector`` is a label selector. An ``optional`` kind may be forbidden or missing."""

    plural: str
    version: str
    namespace: str
    group: str = ""
    selector: str = ""
    optional: bool = False

    @property
    def path(self) -> str:
        """The collection's path."""
        base = f"/apis/{self.group}" if self.group else "/api"
        return f"{base}/{self.version}/namespaces/{self.namespace}/{self.plural}"

    @property
    def label(self) -> str:
        """Its name for people and metrics."""
        return f"{self.plural}.{self.group}" if self.group else self.plural


class Request(msgspec.Struct, frozen=True):
    """A GET. With ``watch`` the answer is a stream without an end."""

    path: str
    query: dict[str, str]
    watch: bool


class Health(msgspec.Struct, frozen=True):
    """How far the mirror can be trusted. ``age_s`` is the time since the server was last heard."""

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


class _Named(msgspec.Struct):
    metadata: _Meta = msgspec.field(default_factory=_Meta)


class _Status(msgspec.Struct):
    code: int = 500
    message: str = ""


_list = msgspec.json.Decoder(_List).decode
_event = msgspec.json.Decoder(_Event).decode
_named = msgspec.json.Decoder(_Named).decode
_status = msgspec.json.Decoder(_Status).decode


class Mirror(Generic[T]):
    """See the module. ``read`` turns an object's JSON into what is kept; it raises ``msgspec.MsgspecError``.

    ``objects`` is never changed in place by a list, only replaced; watch events change it. ``revision`` counts its
    changes. An object that cannot be read leaves what was known of it as it was.
    """

    def __init__(
        self, resource: Resource, read: Callable[[msgspec.Raw], T], rng: random.Random | None = None
    ) -> None:
        self.resource = resource
        self.objects: dict[str, T] = {}
        self.synced = False
        self.watching = False
        self.revision = 0
        self.lists = 0
        self.events = 0
        self.errors: Counter[str] = Counter()
        self.error: str | None = None
        self._unavailable = False
        self._read = read
        self._rng = rng or random.Random()
        self._heard_at: float | None = None
        self._opened_at = 0.0
        self._events_before = 0
        self._version = ""
        self._page: str = ""
        self._listed: dict[str, T] = {}
        self._in_pages = True
        self._rest = b""
        self._failures = 0

    @property
    def settled(self) -> bool:
        """Its state can be used: it was seen once, or is optional and the server says that there is none."""
        return self.synced or self._unavailable

    def health(self, now: float) -> Health:
        """How it is."""
        age = None if self._heard_at is None else max(0.0, now - self._heard_at)
        return Health(self.synced, self.watching, age, self.error)

    # --- asking -------------------------------------------------------------------------------------------------------

    def request(self) -> Request:
        """What to ask now."""
        query: dict[str, str] = {}
        if self.resource.selector:
            query["labelSelector"] = self.resource.selector
        if self._version:
            timeout = int(WATCH_S * self._rng.uniform(0.9, 1.1))
            query |= {
                "watch": "true",
                "allowWatchBookmarks": "true",
                "resourceVersion": self._version,
                "timeoutSeconds": str(timeout),
            }
            return Request(self.resource.path, query, watch=True)
        if self._in_pages:
            query["limit"] = str(PAGE)
        if self._page:
            query["continue"] = self._page
        return Request(self.resource.path, query, watch=False)

    # --- being answered -----------------------------------------------------------------------------------------------

    def on_page(self, body: bytes, now: float) -> bool:
        """A page of a list. True when the list is complete and differs from what was known, or is the first one.

        Raises :class:`Failure` for what is no list.
        """
        try:
            page = _list(body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Failure(200, f"not a list: {error}") from None
        self._heard_at = now
        for data in page.items or ():
            self._take(self._listed, data)
        self._page = page.metadata.continue_
        if self._page:
            return False
        if not page.metadata.resource_version:
            raise Failure(200, "a list without a resourceVersion")
        changed = not self.synced or self._listed != self.objects
        self.objects, self._listed = self._listed, {}
        self._version = page.metadata.resource_version
        self._in_pages = True
        self.synced = True
        self._unavailable = False
        self.lists += 1
        self.revision += changed
        return changed

    def on_open(self, now: float) -> None:
        """The watch has begun."""
        self._heard_at = self._opened_at = now
        self._events_before = self.events
        self._rest = b""
        self.watching = True
        if self.error is not None:
            log.info("%s is followed again", self.resource.label)
            self.error = None

    def feed(self, data: bytes, now: float) -> bool:
        """Bytes of the watch. True when an object has changed. Raises :class:`Failure`."""
        self._heard_at = now
        lines = (self._rest + data if self._rest else data).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > _LINE_BYTES:
            raise Failure(200, "an event without an end")
        changed = False
        for line in lines:
            if line.strip():
                changed |= self._on_event(line)
        self.revision += changed
        return changed

    def on_end(self, now: float) -> float:
        """The server has ended the watch. Returns the pause before the next request."""
        self.watching = False
        if now - self._opened_at < _SHORT_S and self.events == self._events_before:
            return self._pause()
        self._failures = 0
        return 0.0

    def on_failure(self, failure: Failure, now: float) -> float:
        """A request failed, or a watch broke. Returns the pause before the next request."""
        self.watching = False
        self.errors[failure.reason] += 1
        self._tell(f"{failure.reason}: {failure}")
        status = failure.status
        if status == 410:
            self._in_pages = not self._listed  # a list too long for its own pages comes in one piece
            self._relist()
        elif status in (401, 403, 404):
            self._relist()
            if self.resource.optional and status != 401:
                self._unavailable = True
                return SLOW_S * self._rng.uniform(0.8, 1.2)
        elif status == 200 or self._heard_at is None or now - self._heard_at > OUTAGE_S:
            self._relist()
        return max(failure.retry_after_s, self._pause())

    def _on_event(self, line: bytes) -> bool:
        try:
            event = _event(line)
            if event.type == "ERROR":
                told = _status(event.object)
                raise Failure(told.code, told.message)
            meta = _named(event.object).metadata
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Failure(200, f"not an event: {error}") from None
        self._version = meta.resource_version or self._version
        self.events += 1
        self._failures = 0
        if event.type == "DELETED":
            return self.objects.pop(meta.name, None) is not None
        if event.type == "BOOKMARK":
            return False
        return self._take(self.objects, event.object)

    def _take(self, into: dict[str, T], data: msgspec.Raw) -> bool:
        """Read an object into a mapping; True when that changed it."""
        name = ""
        try:
            name = _named(data).metadata.name
            new = self._read(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self.errors["unreadable"] += 1
            log.warning("%s %s cannot be read: %s", self.resource.label, name, error)
            if name in self.objects and into is not self.objects:
                into[name] = self.objects[name]
            return False
        if into.get(name) == new:
            return False
        into[name] = new
        return True

    # --- pauses -------------------------------------------------------------------------------------------------------

    def _relist(self) -> None:
        self._version = self._page = ""
        self._listed = {}

    def _pause(self) -> float:
        first, longest = BACKOFF_S
        pause = min(longest, first * 2.0 ** min(self._failures, 16))
        self._failures += 1
        return pause * self._rng.uniform(0.5, 1.0)

    def _tell(self, error: str) -> None:
        """Say it once, not with every attempt."""
        known, self.error = self.error, error
        if known is not None and known.partition(":")[0] == error.partition(":")[0]:
            return
        if self.resource.optional and error.startswith(("forbidden", "not_found")):
            log.warning("%s is not followed, which is optional: %s", self.resource.label, error)
        elif self.synced:
            log.warning("%s is not followed, what is known stays in use: %s", self.resource.label, error)
        else:
            log.warning(
                "%s cannot be listed, nothing is known yet: %s%s", self.resource.label, error, self._fix()
            )

    def _fix(self) -> str:
        """What whoever has just started the picker can do about the error."""
        resource = self.resource
        match (self.error or "").partition(":")[0]:
            case "unreachable":
                fix = "is that the API server's address (--kubeconfig, --context), and can it be reached from here?"
            case "unauthorized":
                fix = "log in again, or choose other credentials with --kubeconfig or --context"
            case "forbidden":
                fix = f"grant `list` and `watch` of {resource.label} in namespace {resource.namespace}"
            case "not_found":
                fix = "its CustomResourceDefinition is not installed; --pool-group says which API group is meant"
            case _:
                return ""
        return f"; {fix}"


def selector_text(selector: Mapping[str, str]) -> str:
    """A label selector as a query parameter spells it."""
    return ",".join(f"{key}={value}" for key, value in sorted(selector.items()))
