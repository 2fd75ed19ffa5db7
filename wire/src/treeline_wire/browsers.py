"""Detects requests from web pages, which a server that trusts loopback clients must refuse.

A page can make its reader's browser send requests to 127.0.0.1, and read the answers if its own name resolves there
(DNS rebinding). It cannot omit or forge these headers: `Host` has the name that the browser used, `Origin` and
`Sec-Fetch-Site` show that a page asked.
"""

from __future__ import annotations

from collections.abc import Iterable

from treeline_wire.security import is_loopback

_PAGE = "it comes from a web page ({}: {})"


def page_request(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Returns why a request counts as a page's; None if it does not. `headers` are (lower-case name, value). `headers`
    are (lower-case name, value).

    A typed address (`Sec-Fetch-Site: none`) does not count.
    """
    for name, value in headers:
        text = value.decode("latin-1").strip()
        if name == b"origin":
            return _PAGE.format("Origin", text)
        if name == b"sec-fetch-site" and text != "none":
            return _PAGE.format("Sec-Fetch-Site", text)
    return None


def foreign_host(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Returns why a request to a loopback port was not meant for it, or None: exactly one `Host` must name this
    machine.
    """
    hosts = [value.decode("latin-1").strip() for name, value in headers if name == b"host"]
    if len(hosts) != 1:
        return f"it has {len(hosts)} Host headers"
    if is_loopback(_name(hosts[0])):
        return None
    return f"its Host is {hosts[0]!r}, which is not a loopback name (127.0.0.1, [::1], localhost)"


def _name(host: str) -> str:
    """Returns the host of `name[:port]`, without the brackets of IPv6. Empty if malformed."""
    if host.startswith("["):
        name, bracket, port = host[1:].partition("]")
        return name if bracket and (not port or _is_port(port)) else ""
    name, colon, port = host.partition(":")
    return name.lower() if not colon or _is_port(f":{port}") else ""


def _is_port(text: str) -> bool:
    return text[0] == ":" and text[1:].isascii() and text[1:].isdecimal()
