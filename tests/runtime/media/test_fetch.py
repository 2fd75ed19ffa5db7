"""Fetching from allowed domains alone, by addresses of the internet alone, within bounds. The server is a real one on
this machine: the test says which names it has, and that its address is public."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import pytest
from treeline_runtime.media import fetch
from treeline_runtime.media.fetch import AllowedDomains, Fetcher, FetchError, is_public

DATA = b"picture" * 1000
DEAD = "127.0.0.9"
"""An address that cannot be reached."""
Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Site:
    """An HTTP server that logs what it is asked, and answers by path."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.scripts: dict[str, Script] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
            lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            host = next(line[6:] for line in lines if line.lower().startswith("host:"))
            path = lines[0].split()[1]
            self.asked.append((host, path))
            script = self.scripts.get(path)
            if script is None:
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(DATA) + DATA)
            else:
                await script(reader, writer)
            await writer.drain()
        writer.close()

    def says(self, path: str, text: bytes) -> None:
        async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(text)

        self.scripts[path] = script

    def redirects(self, path: str, to: str, status: int = 302) -> None:
        self.says(path, b"HTTP/1.1 %d Moved\r\nlocation: %s\r\ncontent-length: 0\r\n\r\n" % (status, to.encode()))


@pytest.fixture
async def site(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    made = Site()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    names = {"good.org": ["127.0.0.1"], "other.org": ["127.0.0.1"], "inside.org": ["10.0.0.1"],
             "mixed.org": ["127.0.0.1", "10.0.0.1"], "nothing.org": [],
             "two.org": [DEAD, "127.0.0.1"]}  # fmt: skip

    async def resolve(host: str, _port: int) -> Sequence[str]:
        if host not in names:
            raise OSError("unknown")
        return names[host]

    connect = fetch.httpcore2.AnyIOBackend.connect_tcp

    async def connect_tcp(self: object, host: str, _port: int, *args: object, **options: object) -> object:
        if host == DEAD:
            raise fetch.httpcore2.ConnectError
        assert host == "127.0.0.1", "it was checked"
        return await connect(self, host, port, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(fetch, "resolve", resolve)
    monkeypatch.setattr(fetch, "is_public", lambda address: address in ("127.0.0.1", DEAD))
    monkeypatch.setattr(fetch.httpcore2.AnyIOBackend, "connect_tcp", connect_tcp)
    yield made
    server.close()
    await server.wait_closed()


ALLOWED = ("http://good.org", "http://*.good.org", "http://inside.org", "http://mixed.org", "http://nothing.org",
           "http://unknown.org", "http://two.org", "http://good.org:8080", "tls.org")  # fmt: skip


async def get(url: str, grow: Callable[[int], None] = lambda size: None) -> bytes:
    return await Fetcher(ALLOWED).fetch(url, "c", grow)


async def test_an_image(site: Site) -> None:
    sizes: list[int] = []
    assert await get("http://good.org/a.png?x=1", sizes.append) == DATA
    assert site.asked == [("good.org", "/a.png?x=1")]
    assert sum(sizes) == len(DATA)
    assert await get("HTTP://GOOD.org:8080/b") == DATA
    assert await get("http://good.org#@evil.org/") == DATA
    assert site.asked[1:] == [("good.org:8080", "/b"), ("good.org", "/")]


async def test_another_address_is_tried(site: Site) -> None:
    assert await get("http://two.org/x") == DATA


async def test_redirects_are_followed(site: Site) -> None:
    site.redirects("/1", "/2", 301)
    site.redirects("/2", "http://good.org:8080/3", 307)
    site.redirects("/3", "//good.org/4", 308)
    assert await get("http://good.org/1") == DATA
    assert [path for _, path in site.asked] == ["/1", "/2", "/3", "/4"]


URLS = [
    "", "x", "good.org/x", "//good.org/x", "http:///x", "http:good.org/x", "http://", "://good.org",
    "https://good.org/x", "http://other.org/x", "http://evil.org/x", "http://good.org.evil.org/x",
    "http://goodxorg/x", "http://xgood.org/x", "http://good.org:81/x", "http://good.org:0/x", "http://good.org:99999/x",
    "http://good.org:-1/x", "http://good.org:８０/x", "http://good.org./x", "http://.good.org/x", "http://good..org/",
    "http://user@good.org/x", "http://user:pass@good.org/x", "http://evil.org@good.org/x", "http://good.org@evil.org/x",
    "http://evil.org#good.org", "http://evil.org?good.org", "http://evil.org/good.org",
    "http://evil.org\\@good.org/x", "http://good.org\\.evil.org/x", "http:\\\\good.org\\x", "http://good.org%2eevil.org/",
    "http://good.org%00.evil.org/", "http://good.org\x00.evil.org/", "http://good.org\t/x", "http://good.org/\r\nx: y",
    "http://good.org/ x", " http://good.org/x", "http://good.org/\n", "http://go\u00ad.org/x", "http://ｇood.org/x",
    "http://gооd.org/x", "http://127.0.0.1/x", "http://2130706433/x", "http://0x7f.1/x", "http://0177.0.0.1/x",
    "http://127.1/", "http://[::1]/x", "http://[::ffff:127.0.0.1]/x", "http://[fe80::1%25lo]/x", "http://[::1/x",
    "http://localhost/x", "http://169.254.169.254/latest/meta-data", "http://metadata.google.internal/",
    "file:///etc/passwd", "ftp://good.org/x", "gopher://good.org/x", "data:text/plain,x", "javascript:alert(1)",
    "ws://good.org/x", "unix:///run/docker.sock", "http+unix://good.org/x", "jar:http://good.org/!x",
    "http://good.org/" + "x" * 9000,
]  # fmt: skip
NETWORK = ["http://inside.org/x", "http://mixed.org/x", "http://nothing.org/x", "http://unknown.org/x"]


@pytest.mark.parametrize("url", [*URLS, *NETWORK])
async def test_hostile_urls(site: Site, url: str) -> None:
    with pytest.raises(FetchError):
        await get(url)
    assert [host for host, _ in site.asked if host != "good.org"] == []
    assert len(site.asked) <= 1


SAFE_IN_REDIRECTS = {"", "x", "good.org/x", "//good.org/x", "http:good.org/x", " http://good.org/x"}


@pytest.mark.parametrize("url", [url for url in [*URLS, *NETWORK] if url not in SAFE_IN_REDIRECTS and "\r" not in url])
async def test_hostile_redirects(site: Site, url: str) -> None:
    """A redirect is checked as the first URL; relative ones stay on the server."""
    site.redirects("/go", url)
    with contextlib.suppress(FetchError):
        assert await get("http://good.org/go") == DATA
    assert {host for host, _ in site.asked} == {"good.org"}, "no one else was asked"


def test_there_are_many_attempts() -> None:
    assert len(URLS) + len(NETWORK) >= 60


async def test_redirects_without_end(site: Site) -> None:
    site.redirects("/loop", "/loop")
    with pytest.raises(FetchError, match="redirects"):
        await get("http://good.org/loop")
    assert len(site.asked) == fetch.MAX_REDIRECTS + 1
    site.says("/lost", b"HTTP/1.1 302 Moved\r\ncontent-length: 0\r\n\r\n")
    with pytest.raises(FetchError):
        await get("http://good.org/lost")


ANSWERS = {
    "404": b"HTTP/1.1 404 No\r\ncontent-length: 1\r\n\r\nx",
    "500": b"HTTP/1.1 500 No\r\ncontent-length: 1\r\n\r\nx",
    "206": b"HTTP/1.1 206 Partial\r\ncontent-length: 1\r\n\r\nx",
    "304": b"HTTP/1.1 304 Not Modified\r\n\r\n",
    "gzip": b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 1\r\n\r\nx",
    "cut": b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nx",
    "no http": b"SSH-2.0-OpenSSH_9.9\r\n",
    "headers": b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 100_000,
    "silence": b"",
    "two lengths": b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nxx",
    "upgrade": b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
async def test_answers_that_are_no_image(site: Site, answer: bytes) -> None:
    site.says("/x", answer)
    with pytest.raises(FetchError) as refused:
        await get("http://good.org/x")
    assert "127.0.0.1" not in str(refused.value)


@pytest.mark.parametrize("told", [b"content-length: 9999999999\r\n", b"transfer-encoding: chunked\r\n"])
async def test_no_more_bytes_than_allowed(site: Site, told: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "MAX_BYTES", 100_000)
    sent = 0

    async def endless(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\n" + told + b"\r\n")
        while True:
            writer.write(b"1000\r\n" + bytes(4096) + b"\r\n" if told.startswith(b"transfer") else bytes(4096))
            await writer.drain()
            sent += 4096

    site.scripts["/x"] = endless
    with pytest.raises(FetchError, match="more than 100000 bytes"):
        await get("http://good.org/x")


async def test_the_caller_may_refuse_more_bytes(site: Site) -> None:
    def grow(size: int) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        await get("http://good.org/x", grow)


async def test_cancelling_closes_the_connection(site: Site) -> None:
    gone = asyncio.Event()
    begun = asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nx")
        await writer.drain()
        begun.set()
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        gone.set()

    site.scripts["/x"] = slow
    task = asyncio.create_task(get("http://good.org/x"))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await gone.wait()


async def test_a_client_fetches_a_bounded_number_at_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others of it wait, and delay nobody else."""
    monkeypatch.setattr(fetch, "MAX_PER_CLIENT", 2)
    let_go, here = asyncio.Event(), asyncio.Semaphore(0)
    running = most = 0

    async def held(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        here.release()
        await let_go.wait()
        running -= 1
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx")

    site.scripts["/x"] = held
    fetcher = Fetcher(ALLOWED)

    def ask(client: str | None) -> asyncio.Task[bytes]:
        return asyncio.create_task(fetcher.fetch("http://good.org/x", client, lambda size: None))

    asked = [ask(client) for client in ("a", "a", "a", "a", "b")]
    for _ in range(3):
        await here.acquire()
    asked[2].cancel()
    let_go.set()
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert [answer == b"x" for answer in answers] == [True, True, False, True, True]
    assert most == 3, "two of one client, one of another"


async def test_tls_names_the_host(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The certificate is checked for the name, though an address is connected to."""
    names: list[object] = []

    def wrap_bio(self: ssl.SSLContext, *_: object, server_hostname: str | None = None, **__: object) -> object:
        names.append((server_hostname, self.verify_mode, self.check_hostname))
        raise ssl.SSLError

    monkeypatch.setattr(fetch, "resolve", lambda host, port: resolved(["127.0.0.1"]))
    monkeypatch.setattr(ssl.SSLContext, "wrap_bio", wrap_bio)
    with pytest.raises(FetchError):
        await get("https://tls.org/x")
    assert names == [(b"tls.org", ssl.CERT_REQUIRED, True)]


async def resolved(addresses: Sequence[str]) -> Sequence[str]:
    return addresses


# ---- addresses ------------------------------------------------------------------------------------------------------

PUBLIC = ["1.1.1.1", "93.184.216.34", "2606:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101"]
NOT_PUBLIC = [
    "127.0.0.1", "127.255.0.1", "0.0.0.0", "10.1.2.3", "172.16.0.1", "172.31.255.255", "192.168.0.1", "169.254.169.254",
    "169.254.0.1", "100.64.0.1", "100.100.100.200", "192.0.0.192", "192.0.2.1", "198.18.0.1", "198.51.100.1",
    "203.0.113.1", "224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255", "168.63.129.16", "::", "::1",
    "::7f00:1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::ffff:0:127.0.0.1",
    "64:ff9b::7f00:1", "64:ff9b::a00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "fe80::1", "fe80::1%eth0", "fc00::1",
    "fd00:ec2::254", "fec0::1", "ff02::1", "ff0e::1", "2002:7f00:1::", "2002:a9fe:a9fe::1", "2001::1",
    "2001:0:7f00:1::", "2001:db8::1", "3ffe::1", "100::1", "5f00::1", "", "x", "1.1.1", "1.1.1.1.1", "127.0.0.1 ",
]  # fmt: skip


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_addresses_inside(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "entry",
    ["", "*", "https://", "a b", "good.org/x", "ftp://good.org", "u@good.org", "good.org:x", "a.*.org", "http://"],
)
def test_entries_that_are_no_domains(entry: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        AllowedDomains([entry])


def test_what_an_entry_allows() -> None:
    domains = AllowedDomains(["Good.org", "*.cdn.org", "http://plain.org:81", "[2606:4700::1111]"])
    for url in ("https://good.org", "https://a.cdn.org/", "https://a.b.cdn.org/x", "http://plain.org:81/",
                "https://[2606:4700::1111]/x", "https://good.org:443/x", "https://good.org:"):  # fmt: skip
        assert domains.place(url).port in (443, 81)
    for url in (
        "https://cdn.org/",
        "http://good.org",
        "https://a.good.org",
        "http://plain.org",
        "https://plain.org:81",
    ):
        with pytest.raises(FetchError, match="domain"):
            domains.place(url)
