"""Cheap requests to the API server: HTTP/1.1 on open connections, many at once."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from treeline_bench.context import BenchmarkError

JSON = "application/json"
MERGE = "application/merge-patch+json"
TIMEOUT_S = 30.0


class Call(NamedTuple):
    """A request with its encoded body."""

    method: str
    path: str
    body: Any = None
    content_type: str = JSON


class Answer(NamedTuple):
    """The answer, and when (``time.monotonic``) the request was sent and the answer read."""

    body: bytes
    sent: float
    answered: float


class Api:
    """An API server. Every thread has its own connection."""

    def __init__(self, host: str, port: int, context: ssl.SSLContext) -> None:
        self._host, self._port, self._context = host, port, context
        self._local = threading.local()
        self._open: list[http.client.HTTPSConnection] = []

    def connect(self, timeout_s: float | None = TIMEOUT_S) -> http.client.HTTPSConnection:
        """Opens a connection; `close` closes it too."""
        connection = http.client.HTTPSConnection(self._host, self._port, timeout=timeout_s, context=self._context)
        self._open.append(connection)
        return connection

    def send(self, call: Call) -> Answer:
        """A request on this thread's connection. Raises BenchmarkError with the server's words for a refusal."""
        body = None if call.body is None else json.dumps(call.body).encode()
        if not hasattr(self._local, "connection"):
            self._local.connection = self.connect()
        connection: http.client.HTTPSConnection = self._local.connection
        sent = time.monotonic()
        try:
            connection.request(call.method, call.path, body, {"Content-Type": call.content_type})
            reply = connection.getresponse()
            content = reply.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise BenchmarkError(f"{call.method} {call.path}: {error!r}") from error
        answered = time.monotonic()
        if reply.status >= 300:
            raise BenchmarkError(f"{call.method} {call.path}: {reply.status} {content.decode()[:500]}")
        return Answer(content, sent, answered)

    def get(self, path: str) -> Any:
        """The decoded answer of a GET."""
        return json.loads(self.send(Call("GET", path)).body)

    def send_all(self, calls: Sequence[Call], clients: int) -> list[Answer]:
        """Sends all requests with so many clients; answers are in the order of the calls."""
        pool = ThreadPoolExecutor(clients, "api")
        try:
            return list(pool.map(self.send, calls))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Closes all connections."""
        for connection in self._open:
            connection.close()
