"""Quotas: the tokens and requests that each client may have in a minute and in a day.

Sans-IO: the time is an argument. Each bound is a bucket that holds as much as the bound and fills evenly, so that over
any time t a client gets at most bound × (1 + t / window). A new request's tokens are estimated, as prompt and allowed
output, and corrected when they are known, which may leave a bucket in debt. A request for more than a bucket holds goes
on when that is full.

Clients see their quota in the headers that OpenAI's API has for it: https://platform.openai.com/docs/guides/rate-limits
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, NoReturn

import msgspec

from treeline_epp.files import WatchedFile, decode_yaml, read_file
from treeline_epp.picking.decision import FlowRefused

log = logging.getLogger(__name__)

REREAD_S = 2.0
MOST_BYTES = 1024 * 1024
"""Largest file: as much as a ConfigMap or a Secret holds."""


class QuotaFileError(ValueError):
    """The file cannot be used; the message says why."""


class QuotaFile:
    """The quotas in a file. A file that cannot be used changes nothing, and is reported: by a log line for each new
    error, and by `error` until it can be used again.
    """

    def __init__(self, file: Path, read: Callable[[Path, int], bytes] = read_file) -> None:
        """Read the file. Raises QuotaFileError."""
        self.file = file
        self.error = ""
        """The reason why the present file is not in force; empty while it is."""
        self._watched = WatchedFile(file, MOST_BYTES, lambda data: decode_yaml(data, QuotaTable), read)
        self.table = self._look()
        self.quotas = Quotas(self.table)

    async def follow(self) -> NoReturn:
        """Poll the file for ever."""
        while True:
            await asyncio.sleep(REREAD_S)
            await self.refresh()

    async def refresh(self) -> None:
        """Check the file once, in a thread: parsing a megabyte of YAML takes over a second."""
        try:
            table = await asyncio.to_thread(self._look)
        except QuotaFileError as error:
            if str(error) != self.error:
                log.error("--quotas-file cannot be used, the old quotas stay: %s", error)
            self.error = str(error)
            return
        self.error = ""
        if table is not self.table and table != self.table:
            log.info("quotas of %d clients", len(table.clients))
            self.table = table
            self.quotas.set(table)

    def _look(self) -> QuotaTable:
        try:
            return self._watched.look()
        except (OSError, msgspec.MsgspecError) as error:
            raise QuotaFileError(f"{self.file}: {error}") from error


MOST_CLIENTS = 10_000
"""Most clients without limits of their own that are remembered; beyond that the least recent ones are forgotten.
Clients that the table names are all remembered."""

Bound = Annotated[int, msgspec.Meta(ge=1, le=10**15)]


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The limits of one client. None: any number."""

    tokens_per_minute: Bound | None = None
    tokens_per_day: Bound | None = None
    requests_per_minute: Bound | None = None
    requests_per_day: Bound | None = None


class QuotaTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits by the client's name; `default` is for every client that is not listed."""

    clients: dict[str, Limits] = {}
    default: Limits | None = None

    def of(self, client: str) -> Limits | None:
        """Return the limits of a client, or None."""
        return self.clients.get(client, self.default)


class Bucket:
    """The amount that a client may still take: `_level` at the time `_at`, which may be negative."""

    __slots__ = ("_at", "_level", "bound", "window_s")

    def __init__(self, bound: int, window_s: float, now: float) -> None:
        self.bound = bound
        self.window_s = window_s
        self._level = float(bound)
        self._at = now

    def level(self, now: float) -> float:
        """Return the amount that is left."""
        return min(float(self.bound), self._level + max(0.0, now - self._at) * self.bound / self.window_s)

    def take(self, amount: float, now: float) -> None:
        """Take an amount; a negative one is given back."""
        self._level, self._at = min(float(self.bound), self.level(now) - amount), max(now, self._at)

    def ready_in(self, amount: float, now: float) -> float:
        """Return the seconds until `amount` is left, or until the bucket is full if it holds less."""
        return max(0.0, min(amount, self.bound) - self.level(now)) * self.window_s / self.bound

    def full_in(self, now: float) -> float:
        """Return the seconds until the bucket is full."""
        return (self.bound - self.level(now)) * self.window_s / self.bound


class Account:
    """The buckets of one client."""

    __slots__ = ("limits", "requests", "tokens")

    def __init__(self, limits: Limits, now: float) -> None:
        self.limits = limits
        self.tokens = _buckets(limits.tokens_per_minute, limits.tokens_per_day, now)
        self.requests = _buckets(limits.requests_per_minute, limits.requests_per_day, now)

    def headers(self, now: float) -> tuple[tuple[str, bytes], ...]:
        """Return the response headers: for requests and for tokens, the bound with the smallest share left."""
        return tuple(self._told(now))

    def _told(self, now: float) -> Iterator[tuple[str, bytes]]:
        for what, buckets in (("requests", self.requests), ("tokens", self.tokens)):
            if buckets:
                least = min(buckets, key=lambda bucket: bucket.level(now) / bucket.bound)
                yield f"x-ratelimit-limit-{what}", b"%d" % least.bound
                yield f"x-ratelimit-remaining-{what}", b"%d" % max(0, math.floor(least.level(now)))
                yield f"x-ratelimit-reset-{what}", spelled(least.full_in(now)).encode()


class Spend:
    """A request's estimated cost, until its real one is known."""

    __slots__ = ("account", "tokens")

    def __init__(self, account: Account, tokens: float) -> None:
        self.account = account
        self.tokens = tokens

    def took(self, tokens: float, now: float) -> None:
        """Set the number of tokens that the request has used so far, and charge the difference."""
        for bucket in self.account.tokens:
            bucket.take(tokens - self.tokens, now)
        self.tokens = tokens

    def give_back(self, now: float) -> None:
        """Give everything back: the request never reached an endpoint."""
        self.took(0.0, now)
        for bucket in self.account.requests:
            bucket.take(-1.0, now)


class Quotas:
    """The accounts of all clients. They are full at each start of a picker."""

    def __init__(self, table: QuotaTable) -> None:
        self.exceeded = 0
        self._table = table
        self._named: dict[str, Account] = {}
        self._others: OrderedDict[str, Account] = OrderedDict()

    def __len__(self) -> int:
        return len(self._named) + len(self._others)

    def set(self, table: QuotaTable) -> None:
        """Set other limits. Accounts whose limits stay the same keep their state."""
        self._table = table
        before = [*self._others.items(), *self._named.items()]
        self._named.clear()
        self._others.clear()
        for client, account in before:
            if table.of(client) == account.limits:
                self._keep(client, account)

    def spend(self, client: str, tokens: float, now: float) -> Spend | None:
        """Count a request of this many tokens; None if the client has no limits. O(1).

        Raises FlowRefused; then nothing is counted.
        """
        limits = self._table.of(client)
        if limits is None:
            return None
        account = self._account(client, limits, now)
        wait_s, full = max(
            ((bucket.ready_in(amount, now), bucket) for amount, bucket in _taken(account, tokens)),
            key=lambda each: each[0],
            default=(0.0, None),
        )
        if wait_s > 0 and full is not None:
            self.exceeded += 1
            why = _words(client, full, full in account.tokens)
            raise FlowRefused(why, 429, "rejected-quota", "rate_limit_exceeded", wait_s, account.headers(now))
        for amount, bucket in _taken(account, tokens):
            bucket.take(amount, now)
        return Spend(account, tokens)

    def _account(self, client: str, limits: Limits, now: float) -> Account:
        account = self._named.get(client) or self._others.get(client)
        if account is None:
            account = Account(limits, now)
            self._keep(client, account)
        elif client in self._others:
            self._others.move_to_end(client)
        return account

    def _keep(self, client: str, account: Account) -> None:
        if client in self._table.clients:
            self._named[client] = account
            return
        self._others[client] = account
        if len(self._others) > MOST_CLIENTS:
            self._others.popitem(last=False)


def _buckets(per_minute: int | None, per_day: int | None, now: float) -> tuple[Bucket, ...]:
    bounds = ((per_minute, 60.0), (per_day, 86_400.0))
    return tuple(Bucket(bound, window_s, now) for bound, window_s in bounds if bound is not None)


def _taken(account: Account, tokens: float) -> Iterator[tuple[float, Bucket]]:
    for bucket in account.requests:
        yield 1.0, bucket
    for bucket in account.tokens:
        yield tokens, bucket


def _words(client: str, full: Bucket, of_tokens: bool) -> str:
    what, window = "tokens" if of_tokens else "requests", "minute" if full.window_s == 60 else "day"
    return f"Rate limit reached for {client}: {full.bound} {what} per {window}."


def spelled(seconds: float) -> str:
    """Return a duration in the form of OpenAI's headers, rounded up.

    >>> spelled(0), spelled(0.0201), spelled(1.2), spelled(360), spelled(4000)
    ('0s', '21ms', '2s', '6m0s', '1h6m40s')
    """
    if 0 < seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + f"{rest}s"
