"""An endpoint as discovery knows it, and the spellings of its address."""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from treeline_epp.endpoints.transfer import Protocol, Role, Transfer, why_not


@dataclass(frozen=True, slots=True)
class KvPorts:
    """The ports where an engine publishes its KV events, from discovery, for engines that do not name them.

    Ports are those of rank 0; those of rank r are r higher. `ranks` ranks are at this endpoint, from `first_rank` on.
    `dials`: the configured endpoint of an engine that connects to it instead of listening: its port may be closed.
    """

    events_port: int
    replay_port: int | None = None
    topic: str = ""
    ranks: int = 1
    first_rank: int = 0
    dials: str = ""


@dataclass(frozen=True, slots=True)
class EndpointSpec:
    """One endpoint as discovery knows it.

    `address` is `ip:port` of its HTTP server, IPv6 in brackets. `models` are the names that it serves, empty for any;
    `adapters` are the adapters among them, with their names in the namespaces of its events.
    `uid` changes when the process behind the name does (pod UID and restart count). `ready` and `draining` come from
    discovery, not from the engine. `trust_ready`: `ready` is enough where the engine has no probes.
    `engine` is its type, empty where discovery does not say: then it may be asked for every path.
    `kv`: its publisher, if it does not name one itself. `key_file` has the API key that it requires.
    `rank`: the data-parallel rank that its requests name, of the `ranks` behind its address; None: the engine chooses,
    as for all requests on the paths `unranked`.
    `role` is what the engine says, else what discovery says; `transfer` has the protocol that discovery says, else the
    engine's.
    """

    name: str
    address: str
    pool: str = "default"
    models: tuple[str, ...] = ()
    adapters: Mapping[str, str] = field(default_factory=dict, hash=False)
    uid: str = ""
    ready: bool = True
    draining: bool = False
    trust_ready: bool = False
    engine: str = ""
    kv: KvPorts | None = None
    key_file: Path | None = None
    rank: int | None = None
    ranks: int = 1
    unranked: frozenset[str] = frozenset()
    role: Role = Role.BOTH
    transfer: Transfer | None = None

    def at_rank(self, rank: int, ranks: int, unranked: frozenset[str] = frozenset()) -> EndpointSpec:
        """Return the endpoint that is one rank of this server. The first one has the server's name."""
        name = f"{self.name}/{rank}" if rank else self.name
        return dataclasses.replace(self, name=name, rank=rank, ranks=ranks, unranked=unranked)

    def rank_for(self, path: str) -> int | None:
        """Return the rank that a request on this path names."""
        return None if path in self.unranked else self.rank

    @property
    def server(self) -> str:
        """The name of the server that it is a rank of; its own if it is no rank."""
        return self.name.removesuffix(f"/{self.rank}") if self.rank else self.name

    @property
    def identity(self) -> tuple[object, ...]:
        """The fields that identify this endpoint; the others may change while it lives."""
        process = (self.name, self.address, self.pool, self.uid, self.trust_ready, self.engine, self.kv, self.key_file)
        return (*process, self.role, self.protocol)

    @property
    def protocol(self) -> Protocol | None:
        """How it hands over prompts, if that is known."""
        return None if self.transfer is None else self.transfer.protocol

    @property
    def lends(self) -> bool:
        """Whether it gives its pages to others (our runtime)."""
        return self.transfer is not None and self.protocol is Protocol.TREELINE and self.transfer.port > 0

    @property
    def alone(self) -> bool:
        """Whether it can serve a request without another endpoint."""
        return self.role is Role.BOTH or (self.role is Role.DECODE and self.protocol is not Protocol.SGLANG)


def unfit(prefill: EndpointSpec, decode: EndpointSpec) -> str:
    """Return why the one cannot compute prompts for the other; empty if it can."""
    if prefill.pool != decode.pool:
        return "they are in different pools"
    if prefill.models and decode.models and not set(prefill.models) & set(decode.models):
        return "they serve different models"
    return why_not(prefill.transfer, decode.transfer)


def normal_ip(text: str) -> str | None:
    """Return the canonical spelling of an IP address, brackets removed; None for other text, as a host name."""
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return None


def split_address(address: str) -> tuple[str, str]:
    """Split `ip:port`, `[ip]:port`, a bare IP (v6 with or without brackets) or `name:port` into host and port.

    The port is "" where there is none. IPs are in canonical spelling, so that `[0:0::1]:80` equals `[::1]:80`.
    """
    address = address.strip()
    bare = normal_ip(address)
    if bare is not None:
        return bare, ""
    host, _, port = address.rpartition(":")
    if not host:
        return address, ""
    return normal_ip(host) or host, port
