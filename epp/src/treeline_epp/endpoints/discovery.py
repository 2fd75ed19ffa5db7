"""Endpoints from flags and from a watched file. Each source yields its complete list after every change.

The file (YAML or JSON) has one member, `endpoints`: a list of `{name, address, pool?, uid?, engine?, kv_events?,
api_key_file?, role?, kv_transfer?}`. `engine` is one of the adapters; without it the picker finds out the type.
`kv_events` names the publisher of an engine that does not name it itself: `{port, replay_port?, topic?, ranks?}`, ports
of rank 0. `api_key_file` has the key that the engine requires to list its models. `role` is prefill or decode, and
`kv_transfer` the protocol of such an engine that does not say it itself. The file is replaced by renaming a new one
over it, or by the symlink swap of a mounted ConfigMap. A file that cannot be used changes nothing: the last good list
stays, and the log says what is wrong.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from treeline_epp.endpoints.adapters.base import MAX_RANKS
from treeline_epp.endpoints.adapters.registry import ADAPTERS
from treeline_epp.endpoints.spec import EndpointSpec, KvPorts, normal_ip, split_address
from treeline_epp.endpoints.transfer import Protocol, Role, Transfer
from treeline_epp.files import WatchedFile, decode_yaml, read_file

log = logging.getLogger(__name__)

MOST_BYTES = 8 * 1024 * 1024
"""Largest file: tens of thousands of endpoints."""
_RANKED = re.compile(".*/[0-9]+", re.DOTALL)
_POLL_S = 0.5
"""Seconds between two looks at the file: polling works on file systems that cannot be watched, too."""


class DiscoveryError(ValueError):
    """A flag or a file does not describe endpoints; the message says what and where."""


_Port = Annotated[int, Meta(ge=1, le=65535)]


class _KvEvents(msgspec.Struct, forbid_unknown_fields=True):
    port: _Port
    replay_port: _Port | None = None
    topic: Annotated[str, Meta(max_length=1024)] = ""
    ranks: Annotated[int, Meta(ge=1, le=MAX_RANKS)] = 1


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    address: str
    pool: str = "default"
    uid: str = ""
    engine: str = ""
    kv_events: _KvEvents | None = None
    api_key_file: str | None = None
    role: Role = Role.BOTH
    kv_transfer: Protocol | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True):
    endpoints: list[_Entry]


def parse_flag(text: str) -> EndpointSpec:
    """Parse `NAME=HOST:PORT`, or `NAME=HOST:PORT,ROLE`. Raises `DiscoveryError`."""
    name, equals, rest = text.partition("=")
    address, comma, role = rest.partition(",")
    if not (equals and name):
        raise DiscoveryError(f"endpoint {text!r} is not of the form NAME=HOST:PORT")
    if comma and role not in set(Role):
        raise DiscoveryError(f"endpoint {text!r}: the role {role!r} is none of {', '.join(Role)}")
    return EndpointSpec(name, normal_address(address), role=Role(role) if comma else Role.BOTH)


def as_flag(spec: EndpointSpec) -> str:
    """Return the text that `parse_flag` reads."""
    return f"{spec.name}={spec.address}" + ("" if spec.role is Role.BOTH else f",{spec.role}")


def normal_address(text: str) -> str:
    """Return `ip:port` in canonical spelling. `localhost` is 127.0.0.1; other names are refused, since a destination
    and a proxy's host list must be equal as text. Raises `DiscoveryError`.
    """
    host, port = split_address(text)
    if host == "localhost":
        host = "127.0.0.1"
    if normal_ip(host) is None:
        raise DiscoveryError(f"address {text!r}: the host must be an IP address or localhost")
    if not (port.isdecimal() and 0 < int(port[:6]) < 65536):
        raise DiscoveryError(f"address {text!r}: the port must be a number from 1 to 65535")
    return f"[{host}]:{int(port)}" if ":" in host else f"{host}:{int(port)}"


def read_endpoints(file: Path) -> tuple[EndpointSpec, ...]:
    """Return the endpoints in a file. Raises `DiscoveryError` and OSError. Takes a second for each MB."""
    return parse_file(read_file(file, MOST_BYTES))


def parse_file(text: str | bytes) -> tuple[EndpointSpec, ...]:
    """Return the endpoints in a file's text. Raises `DiscoveryError`."""
    try:
        entries = decode_yaml(text, _File).endpoints
    except msgspec.MsgspecError as error:
        raise DiscoveryError(str(error)) from None
    return unique(map(_spec, entries))


def _spec(entry: _Entry) -> EndpointSpec:
    if entry.engine and entry.engine not in ADAPTERS:
        raise DiscoveryError(f"endpoint {entry.name!r}: engine {entry.engine!r} is none of {', '.join(ADAPTERS)}")
    kv = entry.kv_events
    return EndpointSpec(
        entry.name,
        normal_address(entry.address),
        pool=entry.pool,
        uid=entry.uid,
        engine=entry.engine,
        key_file=None if entry.api_key_file is None else Path(entry.api_key_file),
        kv=None if kv is None else KvPorts(kv.port, kv.replay_port, kv.topic, kv.ranks),
        role=entry.role,
        transfer=None if entry.kv_transfer is None else Transfer(entry.kv_transfer),
    )


def unique(specs: Iterable[EndpointSpec]) -> tuple[EndpointSpec, ...]:
    """Return the endpoints after a check: no name and no address twice, and no name of a data-parallel rank. Raises
    `DiscoveryError`.
    """
    found = tuple(specs)
    if (ranked := next((s.name for s in found if _RANKED.fullmatch(s.name)), None)) is not None:
        raise DiscoveryError(
            f"name {ranked!r} ends like that of a data-parallel rank, in a slash and a number: choose another"
        )
    for what, values in (("name", [s.name for s in found]), ("address", [s.address for s in found])):
        if twice := [value for value, count in Counter(values).items() if count > 1]:
            raise DiscoveryError(f"{what} {min(twice)!r} occurs more than once")
    return found


async def discover(fixed: Sequence[EndpointSpec], file: Path | None) -> AsyncIterator[tuple[EndpointSpec, ...]]:
    """Yield the endpoints of the flags and of the file, if one is given: at once, then after every change."""
    if file is None:
        yield unique(fixed)
        return
    watched = WatchedFile(file, MOST_BYTES, lambda data: unique((*fixed, *parse_file(data))))
    current: tuple[EndpointSpec, ...] | None = None
    said = ""
    async for _ in _looks():
        try:
            specs = await asyncio.to_thread(watched.look)
        except (DiscoveryError, OSError) as error:
            if str(error) != said:
                kept = "nothing is known yet" if current is None else "the old list stays"
                log.error("endpoints file %s cannot be used, %s: %s", file, kept, error)
                said = str(error)
            continue
        said = ""
        if specs is not current and specs != current:
            log.info("endpoints file %s: %d endpoints", file, len(specs))
            current = specs
            yield specs


async def _looks() -> AsyncIterator[None]:
    """Yield now, and every `_POLL_S`."""
    while True:
        yield
        await asyncio.sleep(_POLL_S)
