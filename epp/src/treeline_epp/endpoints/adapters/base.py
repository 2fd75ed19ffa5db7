"""The interface of engine adapters, and the facts that they return."""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from typing import Protocol

import msgspec
from treeline_wire.tokenizer import TokenizerBundle

from treeline_epp.endpoints.engine_http import EngineHttp
from treeline_epp.endpoints.model_server_metrics import MetricNames
from treeline_epp.endpoints.spec import EndpointSpec, KvPorts
from treeline_epp.endpoints.transfer import Role, Transfer

MAX_RANKS = 64
"""Most data-parallel ranks of one endpoint whose publishers are followed: each takes three sockets."""
_LAST_PORT = 65535


class LoadReports(StrEnum):
    """The way by which an engine's load reaches the picker."""

    BEATS = "beats"  # pushed for as long as the engine lives: if reports stop, it hangs
    PUSHED = "pushed"  # pushed if the engine is configured so
    ASKED = "asked"  # read from its metrics page: see `EngineAdapter.metrics`


class KvSource(msgspec.Struct, frozen=True):
    """The publisher of one data-parallel rank of an engine; ports are `None` where it does not publish. `topic` filters
    the events. `host` is the endpoint's own, even if the engine names another. `hello`: the publisher is one of ours
    and may be asked for its epoch and for snapshots; to others that is an invalid request.
    """

    host: str
    events_port: int | None = None
    replay_port: int | None = None
    load_port: int | None = None
    topic: str = ""
    curve: bool = False
    rank: int = 0
    hello: bool = False


class EngineInfo(msgspec.Struct, frozen=True):
    """The models and publishers that an engine reports. `epoch` is empty where it has none, `fingerprint` where it
    serves no tokenizer. `sources` are its publishers, one for each rank; `no_events` says why there are none, and what
    to do about it. `isolates_clients`: it reads from the edge's headers whose cache a request uses. `foreign_host`: a
    host other than its own that the engine names for its sockets; the picker never connects to it. `dials`: the
    endpoint of its `--kv-events-config`, if the engine may connect to it instead of listening there. `engine` is the
    name of the adapter that asked. `adapters` are the LoRA adapters among `models`, with the name that the namespace of
    its events uses for each: our runtime's is the digest of the files. `wants_key`: without its key it does not list
    its models, so `models` is empty and it gets requests for any model. `obeys_ranks`: a request runs at the
    data-parallel rank that its header names, unless its path is one of `unranked`. `role` and `transfer` are None where
    the engine does not say them. `cache_sources_off` are the caches that it does not use any more, since an audit found
    wrong pages there: `tree`, `host`, `disk`, `peer`.
    """

    models: tuple[str, ...] = ()
    epoch: str = ""
    fingerprint: str = ""
    sources: tuple[KvSource, ...] = ()
    isolates_clients: bool = False
    foreign_host: str | None = None
    dials: str = ""
    no_events: str = ""
    engine: str = ""
    adapters: dict[str, str] = {}
    wants_key: bool = False
    obeys_ranks: bool = False
    unranked: frozenset[str] = frozenset()
    role: Role | None = None
    transfer: Transfer | None = None
    cache_sources_off: tuple[str, ...] = ()

    def registered(self, spec: EndpointSpec) -> EndpointSpec:
        """Return the endpoint with what its engine says of itself. The uid then identifies the process behind it: by
        its epoch, where it has one, and its sockets.
        """
        sockets = [f"{s.rank}:{s.events_port}:{s.replay_port}:{s.load_port}:{s.topic}" for s in self.sources]
        uid = "/".join((spec.uid, self.epoch, *sockets))
        transfer = self.transfer or spec.transfer
        if transfer is not None and spec.protocol is not None:
            transfer = dataclasses.replace(transfer, protocol=spec.protocol)
        told = dataclasses.replace(spec, models=self.models, adapters=self.adapters, uid=uid, transfer=transfer)
        return dataclasses.replace(told, role=self.role or spec.role)

    def endpoints(self, server: EndpointSpec) -> tuple[EndpointSpec, ...]:
        """Return the endpoints that a server is to the picker: one, or one for each rank that requests may name."""
        if not self.obeys_ranks or len(self.sources) < 2:
            return (server,)
        return tuple(server.at_rank(source.rank, len(self.sources), self.unranked) for source in self.sources)

    @property
    def publishes(self) -> bool:
        """Whether the source of its KV events is known."""
        return any(source.events_port is not None for source in self.sources)

    @property
    def encrypted(self) -> bool:
        """Whether listening to all of its publishers needs its key pair."""
        return any(source.curve for source in self.sources)


class EngineAdapter(Protocol):
    """The protocol of one type of engine: the paths to ask, and how to read the answers. Adapters have no state: one
    serves all engines of its type.

    - `probes`: the paths of readiness probes; the first that exists counts. One answer may take `probe_timeout_s`; a
      ready engine that pushes no load is asked every `probe_interval_s`.
    - `drains`: 503 from an engine that was ready means that it finishes its requests; otherwise that it is dead.
    - `load`: how its load gets here. `metrics`: the names that its Prometheus page may use, and that page's place; the
      page of an engine that pushes no load is read.
    - `paths`: its list in `treeline_wire.paths` of what clients may ask it.
    - `owner`: how `/v1/models` names it (`owned_by`). `signs`: members of `/server_info` that only it has.
    """

    name: str
    probes: tuple[str, ...]
    probe_timeout_s: float
    probe_interval_s: float
    drains: bool
    load: LoadReports
    metrics: tuple[MetricNames, ...]
    paths: str
    owner: str
    signs: frozenset[str]

    async def info(self, http: EngineHttp, told: KvPorts | None) -> EngineInfo:
        """Return its models, its publishers, and what else it reports. `told` are the publishers that discovery names:
        they count where the engine names none. Raises `EngineError`.
        """
        ...

    async def transfer(self, http: EngineHttp) -> Transfer | None:
        """Return how the engine hands over prompts, if `info` does not say it: for engines with a role. None where it
        does not say that either. Raises `EngineError`.
        """
        ...

    async def tokenizer(self, http: EngineHttp) -> TokenizerBundle:
        """Return its tokenizer, where `EngineInfo.fingerprint` names one. Raises `EngineError`."""
        ...


def told_sources(host: str, told: KvPorts | None) -> tuple[KvSource, ...]:
    """Return the publishers at `host` that discovery names. Its ports are those of rank 0; others follow it, as both
    vLLM and SGLang count.
    """
    if told is None:
        return ()
    ranks = range(told.first_rank, told.first_rank + min(told.ranks, MAX_RANKS))
    return sources_of(host, told.events_port, told.replay_port, None, told.topic, ranks)


def sources_of(
    host: str, events: int | None, replay: int | None, load: int | None, topic: str, ranks: range
) -> tuple[KvSource, ...]:
    """Return one publisher for each rank, at base ports + rank, without those whose ports would exceed 65535."""

    def port(base: int | None, rank: int) -> int | None:
        return base + rank if base is not None and base + rank <= _LAST_PORT else None

    found = (
        KvSource(host, port(events, rank), port(replay, rank), port(load, rank), topic, rank=rank) for rank in ranks
    )
    return tuple(source for source in found if source.events_port is not None or source.load_port is not None)
