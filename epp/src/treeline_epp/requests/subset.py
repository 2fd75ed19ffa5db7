"""The endpoints to which a proxy limits the choice (P3 to P6 of the endpoint picker protocol).

A hint only narrows the choice: an unreadable item allows no endpoint, and an unreadable hint allows none at all, so
that the request is refused (503). No hint can make the choice wider than the proxy meant.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from treeline_epp.endpoints.spec import normal_ip, split_address

NOTHING: Final[frozenset[str]] = frozenset()
"""The hint that allows no endpoint."""
_ADDRESS: Final = ("address", "ip", "host")
_MAX_PORT: Final = 65535


def parse_subset(value: object) -> frozenset[str]:
    """Return the addresses (`ip:port`, or a bare IP for all its ports) that a hint allows, in canonical spelling.

    `value` is the hint decoded from JSON: a list, a comma list in one string, comma lists inside a list; IPv6 with and
    without brackets; an item may also be an object of an address and a port, the port a number or a string. Anything
    else (a bare number, a name, a port out of range, a list in a list) allows nothing. Never raises.
    """
    items = value if isinstance(value, list) else [value]
    return frozenset(address for item in items for address in _addresses(item))


def narrowed(one: frozenset[str] | None, other: frozenset[str] | None) -> frozenset[str] | None:
    """Return the addresses that both hints of a stream allow; None is no hint. A proxy may send one with every message:
    mostly the same.
    """
    if one is None or other is None or one == other:
        return other if one is None else one
    return frozenset({address for address in one if _within(address, other)} | {a for a in other if _within(a, one)})


def _within(address: str, hint: frozenset[str]) -> bool:
    return address in hint or normal_ip(split_address(address)[0]) in hint


def _addresses(item: object) -> Iterator[str]:
    """Yield the addresses that one item of a hint names."""
    if isinstance(item, str):
        found = [_address(part.strip()) for part in item.split(",")]
    elif isinstance(item, Mapping):
        hosts = [item[name] for name in _ADDRESS if name in item]
        host = hosts[0] if len(hosts) == 1 and isinstance(hosts[0], str) else ""
        found = [_with_port(host, item["port"]) if "port" in item else _address(host.strip())]
    else:
        found = []
    return (address for address in found if address is not None)


def _address(text: str) -> str | None:
    """Parse an address. `::1:80`, which could be read in two ways, is an IP. A colon without a port is invalid."""
    ip = normal_ip(text)
    return ip if ip is not None else _with_port(*split_address(text))


def _with_port(host: str, port: object) -> str | None:
    """Join an IP and a port; None if either is invalid. Protobuf's JSON has no integers: 8000 comes as 8000.0."""
    if isinstance(port, float) and port.is_integer():
        port = int(port)
    ip, number = normal_ip(host.strip()), str(port)
    if ip is None or isinstance(port, bool) or not (number.isascii() and number.isdecimal() and len(number) <= 5):
        return None
    if not 0 < int(number) <= _MAX_PORT:
        return None
    return f"[{ip}]:{int(number)}" if ":" in ip else f"{ip}:{int(number)}"
