"""Images at URLs: fetched only from domains that the operator allowed, and never from inside the network.

A name is resolved once, all of its addresses are checked, and these are connected to, so that none can change in
between. Redirects are followed by hand, each of them checked as the first URL. There are no proxies, cookies or
credentials.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final
from urllib.parse import urljoin, urlsplit
from weakref import WeakValueDictionary

import httpcore2

MAX_BYTES: Final = 32 << 20
"""Of an image: as many as fit into a body."""
MAX_REDIRECTS: Final = 3
MAX_URL_CHARS: Final = 8 << 10
MAX_PER_CLIENT: Final = 16
"""Images that are fetched for a client at once; others wait for their turn,"""
MAX_AT_ONCE: Final = 128
"""as all beyond this number do."""
_HEADERS: Final[Sequence[tuple[str, str]]] = (
    ("accept", "image/*, video/*, audio/*"),
    ("accept-encoding", "identity"),
    ("connection", "close"),
    ("user-agent", "treeline"),
)
_REDIRECTS: Final = (301, 302, 303, 307, 308)
_PORTS: Final = {"https": 443, "http": 80}
_HOST: Final = re.compile(r"[a-z0-9]([a-z0-9._-]*[a-z0-9])?|\[[0-9a-f:.]+\]")
_PRINTABLE: Final = re.compile(r"[!#-\[\]-~]*")
"""ASCII without blanks, control characters, quotes and backslashes, about which parsers of URLs disagree."""
_TRANSLATED: Final = ipaddress.ip_network("64:ff9b::/96")
"""IPv4 addresses behind a translator (NAT64)."""
_GLOBAL: Final = ipaddress.ip_network("2000::/3")
_SPECIAL: Final = tuple(
    map(
        ipaddress.ip_network,
        (
            *("2001::/23", "2002::/16"),  # with others inside: Teredo, ORCHID, 6to4
            *("3ffe::/16", "3fff::/20"),  # without a use, and for documents
            *("192.0.0.0/24", "192.88.99.0/24"),  # of protocols, and of relays
            "168.63.129.16/32",  # at which a cloud's hosts answer their guests (Azure)
        ),
    )
)
"""What Python's library, by its version, takes for addresses of the internet."""


class FetchError(Exception):
    """There is no image; the text is for the client and tells nothing about the network."""


class AllowedDomains:
    """Entries `[http://]HOST[:PORT]`, where `*.` before the host stands for all names below it. Raises ValueError."""

    def __init__(self, entries: Iterable[str]) -> None:
        self._allowed = set[tuple[str, str, int]]()
        for entry in entries:
            scheme, _, place = entry.lower().rpartition("://")
            scheme = scheme or "https"
            found = re.fullmatch(r"((?:\*\.)?[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::(\d{1,5}))?", place)
            if scheme not in _PORTS or found is None:
                raise ValueError(f"expected [http://]HOST[:PORT] or *.HOST, got {entry!r}")
            self._allowed.add((scheme, found[1], int(found[2] or _PORTS[scheme])))

    def place(self, url: str) -> httpcore2.URL:
        """Checks a URL and takes it apart, once. Raises FetchError."""
        if len(url) > MAX_URL_CHARS or _PRINTABLE.fullmatch(url) is None:
            raise FetchError("its URL is too long, or has characters that must be escaped")
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise FetchError("its URL is not valid") from None
        scheme, host = parts.scheme, parts.netloc.rpartition(":")[0] if port is not None else parts.netloc
        host = host.lower().removesuffix(":")
        if "@" in parts.netloc or _HOST.fullmatch(host) is None or scheme not in _PORTS:
            raise FetchError("its URL must be https://HOST/…, without a user")
        port = _PORTS[scheme] if port is None else port
        names = [host, *(f"*.{host[dot + 1 :]}" for dot, letter in enumerate(host) if letter == ".")]
        if self._allowed.isdisjoint((scheme, name, port) for name in names):
            raise FetchError("its domain is not among those that this server fetches from (--allowed-media-domains)")
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return httpcore2.URL(scheme=scheme, host=host.strip("[]"), port=port, target=target)


def is_public(address: str) -> bool:
    """Whether an address is one of the internet, and stands for no other."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:  # with a zone, for example: only on this link
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return is_public(str(ip.ipv4_mapped))
        if ip in _TRANSLATED:
            return is_public(str(ipaddress.IPv4Address(int(ip) & 0xFFFF_FFFF)))
        if ip not in _GLOBAL:
            return False
    return ip.is_global and not ip.is_multicast and not any(ip in network for network in _SPECIAL)


async def resolve(host: str, port: int) -> Sequence[str]:
    """The addresses of a host. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class _CheckedNetwork(httpcore2.AsyncNetworkBackend):
    """Connects to names with public addresses alone, and to the address that was checked. TLS still names the host."""

    def __init__(self) -> None:
        self._network = httpcore2.AnyIOBackend()

    async def connect_tcp(self, host: str, port: int, *args: Any, **options: Any) -> httpcore2.AsyncNetworkStream:
        try:
            addresses = await resolve(host, port)
        except (OSError, UnicodeError):
            raise httpcore2.ConnectError("it cannot be resolved") from None
        if not addresses or not all(map(is_public, addresses)):
            raise FetchError("its domain has an address that is not public")
        for address in addresses[:-1]:
            with contextlib.suppress(httpcore2.ConnectError):  # of a family that is not connected here, for example
                return await self._network.connect_tcp(address, port, *args, **options)
        return await self._network.connect_tcp(addresses[-1], port, *args, **options)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class Fetcher:
    """Fetches for clients, a bounded number at once for each."""

    def __init__(self, allowed: Iterable[str]) -> None:
        """Raises ValueError for an entry that is no domain."""
        self._domains = AllowedDomains(allowed)
        self._all = asyncio.Semaphore(MAX_AT_ONCE)
        self._of_client = WeakValueDictionary[str | None, asyncio.Semaphore]()

    async def fetch(self, url: str, client: str | None, grow: Callable[[int], None]) -> bytes:
        """The bytes at a URL; the caller limits the time. `grow` is told how many more come, and may raise. Raises
        FetchError."""
        turn = self._of_client.get(client) or asyncio.Semaphore(MAX_PER_CLIENT)
        self._of_client[client] = turn
        async with turn, self._all:
            try:
                async with httpcore2.AsyncConnectionPool(network_backend=_CheckedNetwork()) as pool:
                    return await self._followed(pool, url, grow)
            except (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.TimeoutException, OSError):
                raise FetchError("it could not be fetched") from None

    async def _followed(self, pool: httpcore2.AsyncConnectionPool, url: str, grow: Callable[[int], None]) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            async with pool.stream("GET", self._domains.place(url), headers=_HEADERS) as response:
                told = {name.lower(): value for name, value in response.headers}
                if response.status not in _REDIRECTS:
                    return await _body(response, told, grow)
            try:
                url = urljoin(url, told[b"location"].decode("ascii"))
            except (KeyError, ValueError):
                break
        raise FetchError("its URL redirects too often, or nowhere")


async def _body(response: httpcore2.Response, told: dict[bytes, bytes], grow: Callable[[int], None]) -> bytes:
    if response.status != 200:
        raise FetchError(f"its server answered {response.status}")
    if told.get(b"content-encoding", b"identity").lower() != b"identity":
        raise FetchError("its server compressed it")
    made = bytearray()
    async for piece in response.aiter_stream():
        if len(made) + len(piece) > MAX_BYTES:
            raise FetchError(f"it has more than {MAX_BYTES} bytes")
        grow(len(piece))
        made += piece
    return bytes(made)
