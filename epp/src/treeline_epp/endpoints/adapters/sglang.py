"""SGLang: `/server_info` says where it publishes its KV events and its load: base ports, and how many ranks. Older
versions show only their start arguments there: `--kv-events-config` as text.

Its `/health` generates a token when the engine is idle, which takes a second: it is asked seldom, with a longer
timeout. It answers 503 while the engine starts, while it is stuck, and while it drains.

It also says whether the engine computes prompts, answers, or both (`disaggregation_mode`), and where its bootstrap
server is.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta
from treeline_wire.security import is_loopback

from treeline_epp.endpoints.adapters.base import MAX_RANKS, EngineInfo, KvSource, LoadReports, sources_of
from treeline_epp.endpoints.adapters.openai import OpenAIAdapter
from treeline_epp.endpoints.engine_http import EngineHttp
from treeline_epp.endpoints.kv_endpoints import Topic, listens, ports_of
from treeline_epp.endpoints.model_server_metrics import SGLANG, MetricNames
from treeline_epp.endpoints.spec import KvPorts, normal_ip
from treeline_epp.endpoints.transfer import BOOTSTRAP_PORT, Protocol, Role, Transfer

Port = Annotated[int, Meta(ge=1, le=65535)]

_NO_EVENTS = "it publishes no KV events: start it with --kv-events-config"
_WRONG_CONFIG = "its --kv-events-config makes no publisher to connect to: publisher must be zmq, endpoint tcp://*:PORT"


_ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE}


class KvEvents(msgspec.Struct):
    """The sockets of an engine, as it names them; ports of rank r are r higher."""

    publisher: str | None = None
    endpoint_host: str = "*"
    endpoint_port_base: Port | None = None
    replay_endpoint_port_base: Port | None = None
    load_endpoint_port_base: Port | None = None
    topic: Topic | None = ""
    dp_size: Annotated[int, Meta(ge=1)] = 1
    curve: bool = False


class ServerInfo(msgspec.Struct):
    """The members of `/server_info` that the picker reads."""

    kv_events: KvEvents | msgspec.UnsetType | None = msgspec.UNSET
    kv_events_config: Any = None
    dp_size: Any = 1
    disaggregation_mode: Any = None
    disaggregation_bootstrap_port: Any = None
    disaggregation_transfer_backend: Any = None
    model_path: Any = None
    page_size: Any = None
    kv_cache_dtype: Any = None


Info = TypeVar("Info", bound=ServerInfo)


class SGLangAdapter(OpenAIAdapter):
    """The adapter of SGLang; see the module. Without `/server_info` an engine is taken to publish nothing."""

    name = "sglang"
    probe_timeout_s = 5.0
    probe_interval_s = 5.0
    load = LoadReports.PUSHED
    metrics: tuple[MetricNames, ...] = (SGLANG,)
    paths = "sglang"
    owner = "sglang"
    signs = frozenset({"kv_events"})

    async def info(self, http: EngineHttp, told: KvPorts | None) -> EngineInfo:
        """Return its models and sockets. Raises `EngineError`."""
        known, _ = await self.known(http, told, ServerInfo)
        return known

    async def known(self, http: EngineHttp, told: KvPorts | None, into: type[Info]) -> tuple[EngineInfo, Info | None]:
        """Return its models and sockets, and `/server_info` itself. Raises `EngineError`."""
        served = await self.models(http)  # one after the other, on one connection
        about, unusable = await self._told_of_events(http, "/server_info", into)
        configured = about is not None and about.kv_events_config is not None
        events = None
        if about is not None and about.kv_events is not msgspec.UNSET:
            events = about.kv_events
        elif about is not None:
            ranks = about.dp_size if isinstance(about.dp_size, int) and about.dp_size > 0 else 1
            told = ports_of(about.kv_events_config, ranks) or told
        known = self._info(http, served, told, unusable or (_WRONG_CONFIG if configured else _NO_EVENTS))
        if about is not None and about.disaggregation_mode in _ROLES:
            known = msgspec.structs.replace(known, role=_ROLES[about.disaggregation_mode], transfer=_transfer(about))
        if events is None:
            return known, about
        known = msgspec.structs.replace(known, foreign_host=foreign_host(http, events.endpoint_host))
        if sources := _sources(http, events):
            endpoint = f"tcp://{events.endpoint_host}:{events.endpoint_port_base}"
            dials = "" if listens(endpoint, sglang=True) else endpoint
            known = msgspec.structs.replace(known, sources=sources, dials=dials, no_events="")
        return known, about

    def adapter_name(self, base: str, adapter: str) -> str:
        """Return `base:adapter`; the adapter's name alone gets the base model."""
        return f"{base}:{adapter}"


def _transfer(about: ServerInfo) -> Transfer:
    """Return how a server with a role hands over prompts."""
    port = about.disaggregation_bootstrap_port
    facts = {
        "model": about.model_path,
        "page size": about.page_size,
        "type of cached values": about.kv_cache_dtype,
        "transfer backend": about.disaggregation_transfer_backend,
    }
    return Transfer.told(Protocol.SGLANG, facts, port if type(port) is int and 0 < port < 65536 else BOOTSTRAP_PORT)


def _sources(http: EngineHttp, events: KvEvents) -> tuple[KvSource, ...]:
    """Return the publishers at the endpoint's own address: an engine does not choose with whom the picker talks."""
    if events.publisher != "zmq":
        return ()
    bases = events.endpoint_port_base, events.replay_endpoint_port_base, events.load_endpoint_port_base
    found = sources_of(http.host, *bases, events.topic or "", range(min(events.dp_size, MAX_RANKS)))
    return tuple(msgspec.structs.replace(source, curve=events.curve) for source in found)


def foreign_host(http: EngineHttp, named: str) -> str | None:
    """Return the host that the engine names, if it is neither its own nor a way to say "here"."""
    host = normal_ip(named) or named
    return None if host in ("", "*", "0.0.0.0", "::", http.host) or is_loopback(host) else host
