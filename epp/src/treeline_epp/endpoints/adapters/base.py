"""What the picker asks of an engine, whatever its type, and what it gets to know."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

import msgspec
from treeline_wire.tokenizer import TokenizerBundle

from treeline_epp.endpoints.engine_http import EngineHttp
from treeline_epp.endpoints.model_server_metrics import MetricNames
from treeline_epp.endpoints.spec import KvPorts

MAX_RANKS = 64
"""Data-parallel ranks of one endpoint whose publishers are followed: each takes three sockets."""
_LAST_PORT = 65535


class LoadReports(StrEnum):
    """How the load of an engine gets to the picker."""

    BEATS = "beats"  # pushed for as long as it lives, whatever happens: an end of it says that the engine hangs
    PUSHED = "pushed"  # pushed where it is configured to
    ASKED = "asked"  # only its metrics page tells: see `EngineAdapter.metrics`


class KvSource(msgspec.Struct, frozen=True):
    """Where one data-parallel rank of an engine publishes; ports are `None` where it does not. `topic` filters the
    events. `host` is that of the endpoint itself, whatever the engine says of it. `hello`: the publisher is one of ours
    and may be asked for its epoch and for snapshots; to others that is an invalid request."""

    host: str
    events_port: int | None = None
    replay_port: int | None = None
    load_port: int | None = None
    topic: str = ""
    curve: bool = False
    rank: int = 0
    hello: bool = False


class EngineInfo(msgspec.Struct, frozen=True):
    """What an engine serves. `epoch` is empty where it has none, `fingerprint` where it serves no tokenizer. `sources`
    are its publishers, one for each rank; `no_events` says why there are none, and what to do about it.
    `isolates_clients`: it reads from the edge's headers whose cache a request uses. `foreign_host`: another machine
    than its own, which the engine names as the place of its sockets; never connected to. `dials`: the endpoint of its
    `--kv-events-config`, if it is one that the engine may connect to instead of listening there. `engine` is the name
    of the adapter that asked. `adapters` are the LoRA adapters among `models`, with what its events call each.
    `wants_key`: without its key it does not list its models, so `models` is empty and it gets requests for any
    model."""

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

    @property
    def publishes(self) -> bool:
        """Whether it is known where its KV events come from."""
        return any(source.events_port is not None for source in self.sources)

    @property
    def encrypted(self) -> bool:
        """Whether one must have its key pair to listen to all of its publishers."""
        return any(source.curve for source in self.sources)


class EngineAdapter(Protocol):
    """How engines of one type are asked, and what their answers mean. Adapters have no state: one serves all engines of
    its type.

    - `probes`: the paths that may say whether it takes requests; the first that is there counts. One answer may take
      `probe_timeout_s`; a ready engine that pushes no load is asked every `probe_interval_s`.
    - `drains`: 503 from an engine that was ready means that it finishes what it has; elsewhere that it is dead.
    - `load`: how its load gets here. `metrics`: what its Prometheus page may call things, and where that page is; of an
      engine that pushes no load, it is looked at.
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
        """Its models, its publishers, and what else it says of itself. `told` is where discovery says that it
        publishes: it counts where the engine itself does not tell. Raises `EngineError`."""
        ...

    async def tokenizer(self, http: EngineHttp) -> TokenizerBundle:
        """Its tokenizer, where `EngineInfo.fingerprint` names one. Raises `EngineError`."""
        ...


def told_sources(host: str, told: KvPorts | None) -> tuple[KvSource, ...]:
    """The publishers at `host` that discovery tells of. Ports are those of rank 0; others follow it, as both vLLM and
    SGLang count."""
    if told is None:
        return ()
    ranks = range(told.first_rank, told.first_rank + min(told.ranks, MAX_RANKS))
    return sources_of(host, told.events_port, told.replay_port, None, told.topic, ranks)


def sources_of(
    host: str, events: int | None, replay: int | None, load: int | None, topic: str, ranks: range
) -> tuple[KvSource, ...]:
    """One publisher for each rank, at base ports + rank; those beyond the last port there is are left out."""

    def port(base: int | None, rank: int) -> int | None:
        return base + rank if base is not None and base + rank <= _LAST_PORT else None

    found = (
        KvSource(host, port(events, rank), port(replay, rank), port(load, rank), topic, rank=rank) for rank in ranks
    )
    return tuple(source for source in found if source.events_port is not None or source.load_port is not None)
