"""Requests that a web page may have sent: a server that trusts every client on its loopback port must refuse them.

A page on the internet can make its reader's browser send requests to 127.0.0.1, and can read the answers once its own
name resolves there (DNS rebinding). What it cannot do is leave out or forge these headers: `Host` carries the name that
the browser asked for, `Origin` and `Sec-Fetch-Site` say that a page asked.
"""

from __future__ import annotations

from collections.abc import Iterable

from treeline_wire.security import is_loopback

_PAGE = "it comes from a web page ({}: {})"


def page_request(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Why a request counts as a page's, or None. `headers` are (lower-case name, value).

    A person who types the address (`Sec-Fetch-Site: none`) is no page.
    """
    for name, value in headers:
        text = value.decode("latin-1").strip()
        if name == b"origin":
            return _PAGE.format("Origin", text)
        if name == b"sec-fetch-site" and text != "none":
            return _PAGE.format("Sec-Fetch-Site", text)
    return None


def foreign_host(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Why a request to a loopback port was not meant for it, or None: exactly one `Host` must name this machine."""
    hosts = [value.decode("latin-1").strip() for name, value in headers if name == b"host"]
    if len(hosts) != 1:
        return f"it has {len(hosts)} Host headers"
    if is_loopback(_name(hosts[0])):
        return None
    return f"its Host is {hosts[0]!r}, which is no name of loopback (127.0.0.1, [::1], localhost)"


def _name(host: str) -> str:
    """`name[:port]` without the port, and without the brackets of IPv6. Empty where it is neither."""
    if host.startswith("["):
        name, bracket, port = host[1:].partition("]")
        return name if bracket and (not port or _is_port(port)) else ""
    name, colon, port = host.partition(":")
    return name.lower() if not colon or _is_port(f":{port}") else ""


def _is_port(text: str) -> bool:
    return text[0] == ":" and text[1:].isascii() and text[1:].isdecimal()
