"""A server of S3's API with one bucket in memory: it lists, serves ranges, and checks who has signed what."""

from __future__ import annotations

import hashlib
import hmac
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from xml.sax.saxutils import escape

_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=([^/]+)/(\d+)/([^/]+)/s3/aws4_request, ?SignedHeaders=([^,]+), ?Signature=(\w+)"
)


@dataclass
class FakeS3:
    """The bucket `weights` and the keys that may read it; `public` ones are read by all."""

    objects: dict[str, bytes] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=lambda: {"models": "a-secret"})
    public: bool = False
    url: str = ""
    page: list[str] | None = None
    """The names of every page of a listing without an end, in the place of the objects."""
    pages: int = 0

    def put(self, files: dict[str, bytes], folder: str = "llama/") -> None:
        self.objects |= {folder + name: data for name, data in files.items()}

    def problem(self, request: BaseHTTPRequestHandler) -> str:
        """The code of the error with which a request is refused; empty where it may be answered.

        Signature Version 4: https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html
        """
        found = _AUTHORIZATION.fullmatch(request.headers.get("authorization", ""))
        if found is None:
            return "" if self.public else "AccessDenied"
        who, day, region, signed, signature = found.groups()
        if who not in self.keys:
            return "InvalidAccessKeyId"
        path, _, query = request.path.partition("?")
        pairs = sorted((quote(k, safe="-_.~"), quote(v, safe="-_.~")) for k, v in parse_qsl(query, True))
        lines = [
            *(request.command, path, "&".join(f"{k}={v}" for k, v in pairs)),
            *(f"{name}:{' '.join(request.headers[name].split())}" for name in signed.split(";")),
            *("", signed, request.headers["x-amz-content-sha256"]),
        ]
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        scope = f"{day}/{region}/s3/aws4_request"
        text = f"AWS4-HMAC-SHA256\n{request.headers['x-amz-date']}\n{scope}\n{digest}"
        key = f"AWS4{self.keys[who]}".encode()
        for part in (day, region, "s3", "aws4_request", text):
            key = hmac.digest(key, part.encode(), "sha256")
        return "" if hmac.compare_digest(key.hex(), signature) else "SignatureDoesNotMatch"

    def listing(self, prefix: str) -> bytes:
        objects, more = self.objects, "<IsTruncated>false</IsTruncated>"
        if self.page is not None:
            self.pages += 1
            objects = {f"{prefix}{self.pages}-{name}": b"{}" for name in self.page}
            token = f"<NextContinuationToken>{self.pages}</NextContinuationToken>"
            more = f"<IsTruncated>true</IsTruncated>{token}"
        files = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{len(data)}</Size><ETag>{escape(tag_of(data))}</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for name, data in objects.items()
            if name.startswith(prefix)
        )
        return f"<ListBucketResult>{more}{files}</ListBucketResult>".encode()


def tag_of(data: bytes) -> str:
    return f'"{hashlib.sha256(data).hexdigest()[:16]}"'


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: FakeS3

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        _, bucket, name = unquote(parts.path).split("/", 2) if parts.path.count("/") > 1 else ("", parts.path[1:], "")
        query = dict(parse_qsl(parts.query, True))
        if problem := self.store.problem(self):
            self._refuse(403, problem)
        elif bucket != "weights":
            self._refuse(404, "NoSuchBucket")
        elif "list-type" in query:
            self._answer(200, self.store.listing(query.get("prefix", "")))
        elif (data := self.store.objects.get(name)) is None:
            self._refuse(404, "NoSuchKey")
        elif self.headers.get("if-match", tag_of(data)) != tag_of(data):
            self._refuse(412, "PreconditionFailed")
        else:
            first, last = map(int, self.headers["range"].removeprefix("bytes=").split("-"))
            self._answer(
                206,
                data[first : last + 1],
                {
                    "Content-Range": f"bytes {first}-{last}/{len(data)}",
                    "ETag": tag_of(data),
                    "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
                },
            )

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code></Error>".encode())

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def running_s3(store: FakeS3 | None = None) -> Iterator[FakeS3]:
    """On a free port of loopback."""
    store = store or FakeS3()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"store": store}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    store.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield store
    finally:
        server.shutdown()
        server.server_close()
