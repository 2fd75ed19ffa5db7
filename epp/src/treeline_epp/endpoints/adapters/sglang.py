"""SGLang: `/server_info` says where it publishes its KV events and its load."""

from __future__ import annotations

import asyncio
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta
from treeline_wire.security import is_loopback

from treeline_epp.endpoints.adapters.base import EngineInfo, KvSource
from treeline_epp.endpoints.adapters.openai import OpenAIAdapter
from treeline_epp.endpoints.engine_http import EngineHttp
from treeline_epp.endpoints.spec import normal_ip

Port = Annotated[int, Meta(ge=1, le=65535)]


class KvEvents(msgspec.Struct):
    """The sockets of an engine, as it names them."""

    publisher: str | None = None
    endpoint_host: str = "*"
    endpoint_port_base: Port | None = None
    replay_endpoint_port_base: Port | None = None
    load_endpoint_port_base: Port | None = None
    topic: str | None = ""
    curve: bool = False


class ServerInfo(msgspec.Struct):
    """What is read of `/server_info`."""

    kv_events: KvEvents | None = None


Info = TypeVar("Info", bound=ServerInfo)


class SGLangAdapter(OpenAIAdapter):
    """See the module. An engine without `/server_info` is taken for one that publishes nothing."""

    name = "sglang"

    async def info(self, http: EngineHttp) -> EngineInfo:
        """Its models and sockets. Raises `EngineError`."""
        known, _ = await self.known(http, ServerInfo)
        return known

    async def known(self, http: EngineHttp, into: type[Info]) -> tuple[EngineInfo, Info | None]:
        """The same, and `/server_info` itself. Raises `EngineError`."""
        served, about = await asyncio.gather(self.models(http), http.document("/server_info", into))
        known = EngineInfo(served.names, adapters=served.adapters)
        if about is None or about.kv_events is None:
            return known, about
        source, foreign = _source(http, about.kv_events), _foreign(http, about.kv_events)
        return msgspec.structs.replace(known, source=source, foreign_host=foreign), about

    def adapter_name(self, base: str, adapter: str) -> str:
        """`base:adapter`; the adapter's name alone gets the base model."""
        return f"{base}:{adapter}"


def _source(http: EngineHttp, events: KvEvents) -> KvSource | None:
    """Always at the endpoint's own address: an engine does not choose with whom the picker talks."""
    if events.publisher != "zmq":
        return None
    return KvSource(
        http.host,
        events.endpoint_port_base,
        events.replay_endpoint_port_base,
        events.load_endpoint_port_base,
        events.topic or "",
        events.curve,
    )


def _foreign(http: EngineHttp, events: KvEvents) -> str | None:
    """The host that the engine names, if it is neither its own nor a way to say "here"."""
    host = normal_ip(events.endpoint_host) or events.endpoint_host
    return None if host in ("", "*", "0.0.0.0", "::", http.host) or is_loopback(host) else host
