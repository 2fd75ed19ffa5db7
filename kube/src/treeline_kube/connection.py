"""Requests to an API server by `kubernetes.aio`: retries, typed errors, watches, the guard of writes.

Of that package only configuration, credentials and the HTTP session are used, never a model or a generated API: objects
are plain dicts. Importing this module costs 36 MB RSS (aiohttp), with what the first connection imports 62 MB (Python
3.11, x86-64).
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self
from urllib.parse import quote

import aiohttp

from treeline_kube.clock import now
from treeline_kube.credentials import Credentials
from treeline_kube.errors import (
    KubeError,
    LostLease,
    Throttled,
    Timeout,
    Unauthorized,
    Unavailable,
    Unreachable,
    error_of,
)

if TYPE_CHECKING:
    from kubernetes.aio.client.configuration import Configuration

log = logging.getLogger(__name__)

JSON: Final = "application/json"
APPLY: Final = "application/apply-patch+yaml"
MERGE: Final = "application/merge-patch+json"
JSON_PATCH: Final = "application/json-patch+json"
MAX_CONNECTIONS: Final = 32
"""Connections for requests. Each watch has a connection of its own, and there may be any number of watches."""
MAX_REMEMBERED_WARNINGS: Final = 1000

_METHODS: Final = {
    "get": "GET",
    "list": "GET",
    "watch": "GET",
    "create": "POST",
    "update": "PUT",
    "patch": "PATCH",
    "delete": "DELETE",
}

Query = Sequence[tuple[str, str]]
Streams = contextlib.AbstractAsyncContextManager[AsyncIterator[bytes]]


@dataclass(frozen=True, slots=True)
class Retry:
    """Retry settings: `attempt_s` bounds one attempt, `budget_s` all attempts of a call.

    Pauses double from `base_s` to `cap_s`, with jitter, and obey Retry-After. A call fails at once if its next attempt
    would exceed the budget.
    """

    attempt_s: float = 15.0
    budget_s: float = 30.0
    attempts: int = 6
    base_s: float = 0.2
    cap_s: float = 5.0


ONCE: Final = Retry(attempts=1)
CONNECT_S: Final = 5.0


class Call(NamedTuple):
    """One request. `verb` and `resource` are RBAC's; an `idempotent` request is repeated after any failure."""

    verb: str
    resource: str
    path: str
    query: Query = ()
    body: Any = None
    content_type: str = JSON
    accept: str = JSON
    idempotent: bool = True
    guarded: bool = True
    retry: Retry | None = None

    @property
    def writes(self) -> bool:
        return self.verb not in ("get", "list", "watch")


class Answer(NamedTuple):
    """A response: status, headers and body."""

    code: int
    headers: Mapping[str, str]
    body: bytes


class Connection:
    """A connection to an API server.

    `deadline` returns the instant (of `clock.now`) until which we may write, the lease's; `on_request` gets verb,
    resource, HTTP status (0 without an answer) and seconds of every attempt.
    """

    def __init__(
        self,
        configuration: Configuration,
        *,
        credentials: Credentials | None = None,
        user_agent: str = "treeline",
        retry: Retry | None = None,
        deadline: Callable[[], float] | None = None,
        on_request: Callable[[str, str, int, float], None] | None = None,
        seed: int | None = None,
    ) -> None:
        self.configuration = configuration
        self.deadline = deadline
        self.on_request = on_request
        self._credentials = credentials
        self._user_agent = user_agent
        self._retry = retry or Retry()
        self._random = random.Random(seed)
        self._warned: set[str] = set()
        self._open()

    def _open(self) -> None:
        from kubernetes.aio.client.rest import RESTClientObject

        watching = copy.copy(self.configuration)
        watching.connection_pool_maxsize = 0
        self._requests: Any = RESTClientObject(self.configuration)
        self._watches: Any = RESTClientObject(watching)

    @classmethod
    async def from_config(
        cls, kubeconfig: str | Path | None = None, context: str | None = None, **options: Any
    ) -> Self:
        """Connect by a kubeconfig; without one by $KUBECONFIG, the pod's ServiceAccount, or ~/.kube/config.

        Raises NoCluster.
        """
        from kubernetes.aio.client.configuration import Configuration

        configuration = Configuration(connection_pool_maxsize=MAX_CONNECTIONS)
        # Chains and names are verified. Only strict RFC 5280 is waived: Python asks for it since 3.13, and many
        # clusters' own certificates do not comply.
        configuration.disable_strict_ssl_verification = True
        credentials = Credentials(configuration, kubeconfig, context)
        await credentials.load()
        try:
            return cls(configuration, credentials=credentials, **options)
        except OSError as error:  # ssl.SSLError is one, for malformed certificates
            raise credentials.refused(error) from error

    async def close(self) -> None:
        """Close the connections."""
        await asyncio.gather(self._requests.close(), self._watches.close())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def request(self, call: Call) -> Answer:
        """One request with its retries; an answer that is no success is raised as a KubeError."""
        retry = call.retry or self._retry
        give_up = now() + retry.budget_s
        attempt = 1
        while True:
            try:
                return await self._attempt(call, min(retry.attempt_s, max(give_up - now(), 0.001)))
            except Unauthorized:
                if attempt > 1 or not await self._log_in_again():
                    raise
                pause = 0.0
            except KubeError as error:
                again = attempt < retry.attempts and _worth_retrying(error, call)
                pause = self._pause(error, attempt, retry)
                if not again or now() + pause >= give_up:
                    raise
            attempt += 1
            await asyncio.sleep(pause)

    def _pause(self, error: KubeError, attempt: int, retry: Retry) -> float:
        pause: float = min(retry.base_s * 2 ** (attempt - 1), retry.cap_s) * self._random.uniform(0.5, 1.0)
        # clients refused together should not return together
        return pause if error.retry_after_s is None else error.retry_after_s + pause

    @contextlib.asynccontextmanager
    async def watch(self, call: Call, silence_s: float) -> AsyncIterator[AsyncIterator[bytes]]:
        """The answer as it comes, in pieces of any length; Timeout when nothing comes for `silence_s`."""
        limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=silence_s)
        what = f"{call.verb} {call.path}"
        started, code = now(), 0
        reply: Any = None
        try:
            try:
                reply = await self._send(self._watches, call, limits)
                code = reply.status
                if code >= 400:
                    raise error_of(code, await reply.read(), reply.headers.get("Retry-After"), what)
            finally:
                self._note(call, code, started)
            yield reply.response.content.iter_any()
        except Unauthorized:
            await self._log_in_again()  # for the next try
            raise
        except TimeoutError as error:
            raise Timeout(f"{what}: no data for {silence_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Unreachable(f"{what}: {str(error) or type(error).__name__}") from error
        finally:
            if reply is not None:
                reply.response.close()

    async def _attempt(self, call: Call, timeout_s: float) -> Answer:
        what = f"{call.verb} {call.path}"
        if call.writes and call.guarded and self.deadline is not None:
            left = self.deadline() - now()
            if left <= 0:
                raise LostLease(f"{what}: not sent: the lease is lost", sent=False)
            timeout_s = min(timeout_s, left)
        started, code = now(), 0
        try:
            reply = await self._send(self._requests, call, aiohttp.ClientTimeout(total=timeout_s))
            body = await reply.read()
            code = reply.status
        except aiohttp.ClientConnectorError as error:
            raise Unreachable(f"{what}: {error}", sent=False) from error
        except TimeoutError as error:
            raise Timeout(f"{what}: no answer in {timeout_s:.1f} s") from error
        except aiohttp.ClientError as error:
            raise Unreachable(f"{what}: {str(error) or type(error).__name__}") from error
        finally:
            self._note(call, code, started)
        if code >= 400:
            raise error_of(code, body, reply.headers.get("Retry-After"), what)
        return Answer(code, reply.headers, body)

    async def _send(self, session: Any, call: Call, limits: aiohttp.ClientTimeout) -> Any:
        headers = {"Accept": call.accept, "Content-Type": call.content_type, "User-Agent": self._user_agent}
        settings: Any = await self.configuration.auth_settings()
        for setting in settings.values():
            headers[setting["key"]] = setting["value"]
        url = self.configuration.host + call.path
        if call.query:
            url += "?" + "&".join(f"{key}={quote(value, safe='')}" for key, value in call.query)
        try:
            reply = await session.request(
                _METHODS[call.verb], url, headers=headers, body=call.body, _request_timeout=limits
            )
        except RuntimeError as error:
            if session in (self._requests, self._watches):
                raise
            raise Unreachable("the connection was closed for new credentials", sent=False) from error
        self._log_warnings(reply.response.headers)
        return reply

    async def _log_in_again(self) -> bool:
        """Read the credentials again, which may be short-lived; whether there is something to read.

        Where certificates have changed, all connections are given up for new ones.
        """
        if self._credentials is None:
            return False
        before = self._credentials.certificates()
        await self._credentials.load()
        if self._credentials.certificates() != before:
            await self.close()
            self._open()
        return True

    def _note(self, call: Call, code: int, started: float) -> None:
        if self.on_request is not None:
            self.on_request(call.verb, call.resource, code, now() - started)

    def _log_warnings(self, headers: Any) -> None:
        for warning in headers.getall("Warning", ()):
            if warning not in self._warned and len(self._warned) < MAX_REMEMBERED_WARNINGS:
                self._warned.add(warning)
                log.warning("the API server warns: %s", warning)


def _worth_retrying(error: KubeError, call: Call) -> bool:
    if isinstance(error, Throttled):
        return True
    return isinstance(error, Unavailable) and (call.idempotent or not error.sent)
