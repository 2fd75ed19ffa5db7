"""Requests to an API server by ``kubernetes.aio``: credentials, retries, typed errors, the guard of writes.

Of that package only configuration, credentials and the HTTP session are used, never a model or a generated API: objects
are plain dicts. Importing this module costs 36 MB RSS (aiohttp), with what the first connection imports 62 MB; kopf
alone costs 61 MB, and both together 65 MB (Python 3.11, x86-64).
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self
from urllib.parse import quote

import aiohttp

from treeline_operator.kube.clock import now
from treeline_operator.kube.errors import (
    KubeError,
    LostLease,
    Throttled,
    Timeout,
    Unauthorized,
    Unavailable,
    error_of,
)
from treeline_operator.names import FIELD_MANAGER

if TYPE_CHECKING:
    from kubernetes.aio.client.configuration import Configuration

log = logging.getLogger(__name__)

JSON: Final = "application/json"
APPLY: Final = "application/apply-patch+yaml"
MERGE: Final = "application/merge-patch+json"
JSON_PATCH: Final = "application/json-patch+json"
SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
MAX_CONNECTIONS: Final = 32
MAX_REMEMBERED_WARNINGS: Final = 1000

_METHODS: Final = {
    "get": "GET",
    "list": "GET",
    "create": "POST",
    "update": "PUT",
    "patch": "PATCH",
    "delete": "DELETE",
}

Query = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Retry:
    """How long and how often to try: ``attempt_s`` bounds one attempt, ``budget_s`` a call with all its attempts.

    Pauses double from ``base_s`` up to ``cap_s`` and are jittered; a server's Retry-After is obeyed, and a call whose
    next attempt would come after its budget fails at once.
    """

    attempt_s: float = 15.0
    budget_s: float = 30.0
    attempts: int = 6
    base_s: float = 0.2
    cap_s: float = 5.0


ONCE: Final = Retry(attempts=1)


class Call(NamedTuple):
    """One request. ``verb`` and ``resource`` are those of RBAC; an ``idempotent`` one is repeated after any failure."""

    verb: str
    resource: str
    path: str
    query: Query = ()
    body: Any = None
    content_type: str = JSON
    accept: str = JSON
    headers: tuple[tuple[str, str], ...] = ()
    idempotent: bool = True
    guarded: bool = True
    retry: Retry | None = None

    @property
    def writes(self) -> bool:
        return self.verb not in ("get", "list")


class Answer(NamedTuple):
    """What came back: the status (200 to 304), the headers and the body."""

    code: int
    headers: Mapping[str, str]
    body: bytes


class Connection:
    """A connection to an API server.

    ``deadline`` returns the instant (of ``clock.now``) until which we may write, the lease's; ``on_request`` is told
    verb, resource, HTTP status (0 without an answer) and seconds of every attempt.
    """

    def __init__(
        self,
        configuration: Configuration,
        *,
        login: Callable[[], Any] | None = None,
        retry: Retry | None = None,
        deadline: Callable[[], float] | None = None,
        on_request: Callable[[str, str, int, float], None] | None = None,
        seed: int | None = None,
    ) -> None:
        from kubernetes.aio.client.rest import RESTClientObject

        self.configuration = configuration
        self.deadline = deadline
        self.on_request = on_request
        self._login = login
        self._retry = retry or Retry()
        self._rest: Any = RESTClientObject(configuration)
        self._random = random.Random(seed)
        self._warned: set[str] = set()

    @classmethod
    async def from_config(
        cls, kubeconfig: str | Path | None = None, context: str | None = None, **options: Any
    ) -> Self:
        """From a kubeconfig; without one from $KUBECONFIG, from the pod's ServiceAccount, or from ~/.kube/config."""
        from kubernetes.aio import config
        from kubernetes.aio.client.configuration import Configuration

        load: Any = config  # untyped
        configuration = Configuration(connection_pool_maxsize=MAX_CONNECTIONS)
        file = str(kubeconfig or os.environ.get("KUBECONFIG") or "")
        in_pod = not context and SERVICE_ACCOUNT.exists() and "KUBERNETES_SERVICE_HOST" in os.environ

        async def login() -> None:
            where = file or "~/.kube/config"
            if not _is_there(where):
                raise Unavailable(
                    f"no cluster to talk to: there is no file {where}; give --kubeconfig FILE", sent=False
                )
            try:
                await load.load_kube_config(
                    config_file=where,
                    context=context,
                    client_configuration=configuration,
                    persist_config=False,
                )
            except Exception as error:  # what can be wrong with a file has all sorts of types in the library
                raise _no_cluster(where, error) from error

        if in_pod and not file:
            load.load_incluster_config(client_configuration=configuration)
            return cls(configuration, **options)
        await login()
        try:
            return cls(configuration, login=login, **options)
        except OSError as error:  # of which ssl.SSLError: certificates that are none
            raise _no_cluster(file or "~/.kube/config", error) from error

    async def close(self) -> None:
        """Close the connections."""
        await self._rest.close()

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
                # a token of a kubeconfig may be short-lived: fetch it anew, once
                if self._login is None or attempt > 1:
                    raise
                await self._login()
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
        # those who were sent away together are not to come back together
        return pause if error.retry_after_s is None else error.retry_after_s + pause

    async def _attempt(self, call: Call, timeout_s: float) -> Answer:
        what = f"{call.verb} {call.path}"
        if call.writes and call.guarded and self.deadline is not None:
            left = self.deadline() - now()
            if left <= 0:
                raise LostLease(f"{what}: not sent, we no longer hold the lease", sent=False)
            timeout_s = min(timeout_s, left)
        started, code = now(), 0
        try:
            answer = await self._send(call, timeout_s)
            code = answer.code
        except aiohttp.ClientConnectorError as error:
            raise Unavailable(f"{what}: {error}", sent=False) from error
        except TimeoutError as error:
            raise Timeout(f"{what}: no answer in {timeout_s:.1f} s") from error
        except aiohttp.ClientError as error:
            raise Unavailable(f"{what}: {error or type(error).__name__}") from error
        finally:
            if self.on_request is not None:
                self.on_request(call.verb, call.resource, code, now() - started)
        if code >= 400:
            raise error_of(code, answer.body, answer.headers.get("Retry-After"), what)
        return answer

    async def _send(self, call: Call, timeout_s: float) -> Answer:
        headers = {"Accept": call.accept, "Content-Type": call.content_type, "User-Agent": FIELD_MANAGER}
        headers |= dict(call.headers)
        settings: Any = await self.configuration.auth_settings()
        for setting in settings.values():
            headers[setting["key"]] = setting["value"]
        url = self.configuration.host + call.path
        if call.query:
            url += "?" + "&".join(f"{key}={quote(value, safe='')}" for key, value in call.query)
        reply = await self._rest.request(
            _METHODS[call.verb],
            url,
            headers=headers,
            body=call.body,
            _request_timeout=aiohttp.ClientTimeout(total=timeout_s),
        )
        body = await reply.read()
        self._tell_warnings(reply.response.headers)
        return Answer(reply.status, reply.response.headers, body)

    def _tell_warnings(self, headers: Any) -> None:
        for warning in headers.getall("Warning", ()):
            if warning not in self._warned and len(self._warned) < MAX_REMEMBERED_WARNINGS:
                self._warned.add(warning)
                log.warning("the API server warns: %s", warning)


def _is_there(files: str) -> bool:
    """Whether one of the files is, as $KUBECONFIG separates them."""
    return any(Path(name).expanduser().is_file() for name in files.split(os.pathsep))


def _no_cluster(where: str, error: Exception) -> Unavailable:
    """One line, also where the file is something else altogether."""
    told = isinstance(error, OSError | ValueError) or type(error).__name__ in (
        "ConfigException",
        "ParserError",
    )
    what = " ".join(str(error).split()) if told else "it is no kubeconfig"
    return Unavailable(f"no cluster to talk to: {where}: {what}", sent=False)


def _worth_retrying(error: KubeError, call: Call) -> bool:
    if isinstance(error, Throttled):
        return True
    return isinstance(error, Unavailable) and (call.idempotent or not error.sent)
