"""A Hugging Face Hub of a few repositories, with the routes that its library asks for single files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class FakeRepo:
    """A repository. `token`: only its holder may see the repository. `gated`: all may see it, but files need a token.
    Files in `large` are at another address, to which the Hub redirects."""

    files: dict[str, bytes]
    token: str | None = None
    gated: bool = False
    large: tuple[str, ...] = ()
    revisions: tuple[str, ...] = ("main",)

    @property
    def commit(self) -> str:
        return hashlib.sha1(repr(sorted(self.files.items())).encode()).hexdigest()


@dataclass
class FakeHub:
    """The Hub. `asked` has the requests so far: method, path, and token. `status`, if set, answers all."""

    url: str = ""
    repos: dict[str, FakeRepo] = field(default_factory=dict)
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)
    status: int | None = None
    sizes: dict[str, int] = field(default_factory=dict)

    def downloads(self) -> list[str]:
        """Return the files that were fetched, in order."""
        return [path.rpartition("/")[2] for method, path, _ in self.asked if method == "GET" and "/resolve/" in path]

    def answer(self, path: str, token: str | None) -> tuple[int, dict[str, str], bytes]:
        parts = [unquote(part) for part in path.strip("/").split("/")]
        api = parts[:2] == ["api", "models"]
        parts = parts[2:] if api else parts
        repo = self.repos.get("/".join(parts[:2]))
        if self.status is not None:
            return self.status, {}, b"{}"
        if repo is None or (repo.token not in (None, token) and not repo.gated):
            return (404 if token else 401), {"X-Error-Code": "RepoNotFound"}, b"{}"
        revision = parts[3] if len(parts) > 3 else "main"
        if revision not in (*repo.revisions, repo.commit):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        if api and parts[2:3] == ["tree"]:
            return 200, {}, json.dumps([self._entry(repo, name) for name in repo.files]).encode()
        if api:
            siblings = [
                {"rfilename": name, "size": self.sizes.get(name, len(content))} for name, content in repo.files.items()
            ]
            return 200, {}, json.dumps({"id": "/".join(parts[:2]), "sha": repo.commit, "siblings": siblings}).encode()
        if repo.gated and repo.token != token:
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        name = "/".join(parts[4:])
        content = repo.files.get(name)
        if content is None:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        told = {"X-Repo-Commit": repo.commit, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}
        if parts[2] == "resolve" and name in repo.large:
            told["X-Linked-Size"], told["X-Linked-Etag"] = str(len(content)), told["ETag"]
            return 302, {**told, "Location": f"{self.url}/{path.strip('/').replace('/resolve/', '/store/')}"}, b""
        return 200, told, content

    def _entry(self, repo: FakeRepo, name: str) -> dict[str, object]:
        content = repo.files[name]
        size = self.sizes.get(name, len(content))
        return {"type": "file", "path": name, "size": size, "oid": hashlib.sha1(content).hexdigest()}


def hub_server(hub: FakeHub, host: str, port: int) -> ThreadingHTTPServer:
    """Return a server for a hub at an address. The caller starts it; port 0 takes any free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            token = self.headers.get("authorization", "").removeprefix("Bearer ") or None
            hub.asked.append((self.command, path, token))
            status, headers, body = hub.answer(path, token)
            self.send_response(status)
            # Kept connections would outlive the server.
            for name, value in {**headers, "Content-Length": str(len(body)), "Connection": "close"}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer((host, port), Handler)
    server.socket.listen(64)  # its library's downloads come in parallel, each by a connection of its own
    return server


@contextlib.contextmanager
def running_hub(**repos: FakeRepo) -> Iterator[FakeHub]:
    """Run a Hub on a port of its own; repositories are named `org/NAME`."""
    hub = FakeHub(repos={f"org/{name}": repo for name, repo in repos.items()})
    server = hub_server(hub, "127.0.0.1", 0)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
