"""Connections that a server closes while they are idle cost nobody a request."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from treeline_lang import Unreachable, background
from treeline_lang.backends.http import HttpClient

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"


class ClosingServer:
    """Answers the first request of each connection; reads the next one there, and closes without a word."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.answers = True
        self.seen = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            with connection:
                if self._request(connection) and self.answers:
                    connection.sendall(ANSWER)
                    self._request(connection)

    def _request(self, connection: socket.socket) -> bool:
        data = b""
        while b"\r\n\r\n{}" not in data:
            if not (piece := connection.recv(65536)):
                return False
            data += piece
        self.seen += 1
        return True


@pytest.fixture
def server() -> Iterator[ClosingServer]:
    server = ClosingServer()
    yield server
    server.socket.close()


def test_a_request_on_a_connection_that_was_closed_meanwhile_is_sent_again(server: ClosingServer) -> None:
    client = HttpClient(server.url)
    for _ in range(3):
        assert background.call(client.post("/x", {})) == {}
    assert server.seen == 5, "the second and the third were sent twice"
    background.call(client.close())


def test_a_server_that_never_answers_is_asked_once(server: ClosingServer) -> None:
    server.answers = False
    client = HttpClient(server.url)
    with pytest.raises(Unreachable):
        background.call(client.post("/x", {}))
    assert server.seen == 1
    background.call(client.close())
