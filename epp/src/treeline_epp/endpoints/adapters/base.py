"""What the picker asks of an engine, whatever its type, and what it gets to know."""

from __future__ import annotations

from typing import Protocol

import msgspec
from treeline_wire.tokenizer import TokenizerBundle

from treeline_epp.endpoints.engine_http import EngineHttp


class KvSource(msgspec.Struct, frozen=True):
    """Where an engine publishes; ports are `None` where it does not. `topic` filters the events. `host` is that of the
    endpoint itself, whatever the engine says of it."""

    host: str
    events_port: int | None = None
    replay_port: int | None = None
    load_port: int | None = None
    topic: str = ""
    curve: bool = False


class EngineInfo(msgspec.Struct, frozen=True):
    """What an engine serves. `epoch` is empty where it has none, `fingerprint` where it serves no tokenizer.
    `isolates_clients`: it reads from the edge's headers whose cache a request uses. `foreign_host`: another machine
    than its own, which the engine names as the place of its sockets; never connected to. `adapters` are the LoRA
    adapters among `models`, with what its events call each."""

    models: tuple[str, ...] = ()
    epoch: str = ""
    fingerprint: str = ""
    source: KvSource | None = None
    isolates_clients: bool = False
    foreign_host: str | None = None
    adapters: dict[str, str] = {}


class EngineAdapter(Protocol):
    """How engines of one type are asked. Adapters have no state: one serves all engines of its type.

    `probes` are the paths that may say whether it takes requests; the first that is there counts.
    """

    name: str
    probes: tuple[str, ...]

    async def info(self, http: EngineHttp) -> EngineInfo:
        """Its models, and what else it says of itself. Raises `EngineError`."""
        ...

    async def tokenizer(self, http: EngineHttp) -> TokenizerBundle:
        """Its tokenizer, where `EngineInfo.fingerprint` names one. Raises `EngineError`."""
        ...
