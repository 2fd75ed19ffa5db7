"""A minimal router: the command line and pages of those in `treeline_bench.peers`, and round robin."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import sys
from collections.abc import Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

_VERSION = "STUB_ROUTER_VERSION"


def install(folder: Path, name: str, version: str) -> Path:
    """Install a program that reports `version`."""
    program = folder / name
    command = shlex.join([sys.executable, "-P", str(Path(__file__))])  # beside it is a module `http`
    program.write_text(f'#!/bin/sh\n{_VERSION}={version} exec {command} "$@"\n')
    program.chmod(0o755)
    return program


class Server(ThreadingHTTPServer):
    """Serves each connection in a thread."""

    def __init__(self, address: tuple[str, int], workers: list[str]) -> None:
        super().__init__(address, Handler)
        self.socket.listen(128)  # a busy machine accepts late
        self.workers = workers
        self.turns: Iterator[str] = itertools.cycle(workers)


class Handler(BaseHTTPRequestHandler):
    """Answers one request on each connection: an answer lasts as long as its connection."""

    server: Server

    def do_GET(self) -> None:
        page = {"workers": [{"url": url, "is_healthy": True} for url in self.server.workers]}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(page).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        engine = HTTPConnection(urlsplit(next(self.server.turns)).netloc)
        engine.request("POST", self.path, body, {"content-type": self.headers["content-type"]})
        answer = engine.getresponse()
        self.send_response(answer.status)
        self.send_header("content-type", answer.headers["content-type"])
        self.end_headers()
        while data := answer.read1():
            self.wfile.write(data)
        engine.close()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def main() -> None:
    version = f"stub {os.environ[_VERSION]}"
    parser = argparse.ArgumentParser()
    parser.add_argument("--version", action="version", version=version)
    launch = parser.add_subparsers(required=True).add_parser("launch")
    for flag in ("--host", "--prometheus-host", "--log-level", "--policy"):
        launch.add_argument(flag, required=True)
    for flag in ("--port", "--prometheus-port"):
        launch.add_argument(flag, type=int, required=True)
    launch.add_argument("--worker-urls", nargs="+", required=True)
    args = parser.parse_args()
    Server((args.host, args.port), args.worker_urls).serve_forever()


if __name__ == "__main__":
    main()
