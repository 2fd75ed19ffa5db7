"""Streamed reads: the watches of the API server, each on a connection of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final
from urllib.parse import urlencode

import aiohttp

from treeline_operator.kube.client import JSON, Call, Cluster
from treeline_operator.kube.errors import Unavailable, error_of
from treeline_operator.names import FIELD_MANAGER

_CONNECT_S: Final = 10.0


class Streams:
    """Reads for an informer, with the credentials of a :class:`Cluster`.

    Watches do not come out of the cluster's pool of connections: there are more of them than it holds, and they last.
    """

    def __init__(self, cluster: Cluster) -> None:
        from kubernetes.aio.client.rest import RESTClientObject

        self._cluster = cluster
        self._rest: Any = RESTClientObject(cluster.configuration)
        self._rest.maxsize = 0  # as many as are asked for

    async def page(self, path: str, query: dict[str, str]) -> bytes:
        """The body of a GET of a collection, with the cluster's retries. Raises KubeError."""
        resource = path.rpartition("/")[2]
        return (await self._cluster.request(Call("list", resource, path, list(query.items())))).body

    @asynccontextmanager
    async def lines(
        self, path: str, query: dict[str, str], idle_s: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """The lines of a streamed GET. KubeError for a refusal or a loss, TimeoutError after ``idle_s`` of silence."""
        configuration: Any = self._cluster.configuration
        headers = {"Accept": JSON, "User-Agent": FIELD_MANAGER}
        for setting in (await configuration.auth_settings()).values():
            headers[setting["key"]] = setting["value"]
        url = f"{configuration.host}{path}?{urlencode(query)}"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=idle_s)
        try:
            reply = await self._rest.request("GET", url, headers=headers, _request_timeout=timeout)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Unavailable(f"watch {path}: {error or type(error).__name__}") from error
        response: aiohttp.ClientResponse = reply.response
        try:
            if response.status >= 400:
                body, wait = await response.read(), response.headers.get("Retry-After")
                raise error_of(response.status, body, wait, f"watch {path}")
            yield _split(response.content, path)
        finally:
            response.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._rest.close()


async def _split(content: aiohttp.StreamReader, path: str) -> AsyncIterator[bytes]:
    """Whole lines, however long: an object may be larger than a reader's buffer."""
    rest: list[bytes] = []
    try:
        async for chunk in content.iter_any():
            head, newline, tail = chunk.partition(b"\n")
            rest.append(head)
            while newline:
                yield b"".join(rest)
                head, newline, tail = tail.partition(b"\n")
                rest = [head]
    except TimeoutError:
        raise
    except aiohttp.ClientError as error:
        raise Unavailable(f"watch {path}: {error or type(error).__name__}") from error
