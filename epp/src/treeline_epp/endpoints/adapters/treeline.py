"""Our own runtime: it has a probe of its own, an epoch and a tokenizer to serve, answers hello, and reads the edge's
headers. Its load report beats, and says when it drains; `/ready` is 503 then, too.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
from msgspec import Meta
from treeline_wire.tokenizer import BundleError, TokenizerBundle

from treeline_epp.endpoints.adapters.base import EngineInfo, LoadReports
from treeline_epp.endpoints.adapters.openai import Model
from treeline_epp.endpoints.adapters.sglang import Port, ServerInfo, SGLangAdapter
from treeline_epp.endpoints.engine_http import EngineError, EngineHttp
from treeline_epp.endpoints.http_answer import HttpError
from treeline_epp.endpoints.spec import KvPorts
from treeline_epp.endpoints.transfer import Protocol, Transfer

_TOKENIZER_TIMEOUT_S, _TOKENIZER_BYTES = 30.0, 256 << 20
_Word = Annotated[str, Meta(max_length=64, pattern=r"\A[a-z_]+\Z")]


class _Tiers(msgspec.Struct):
    fingerprint: Annotated[str, Meta(max_length=64)] = ""


class _State(msgspec.Struct):
    tiers: _Tiers | None = None


class _OurServerInfo(ServerInfo):
    kv_transfer_port: Port | None = None
    internal_states: tuple[_State, ...] = ()
    epoch: int | str | None = None
    tokenizer_fingerprint: str | None = None
    isolates_clients: bool = False
    cache_sources_off: Annotated[tuple[_Word, ...], Meta(max_length=8)] = ()


class TreelineAdapter(SGLangAdapter):
    """The adapter of our own runtime; see the module."""

    name = "treeline"
    probes: tuple[str, ...] = ("/ready", "/health")
    probe_timeout_s = 2.0
    probe_interval_s = 1.0
    load = LoadReports.BEATS
    metrics = ()  # they have a port of their own, and add nothing to its load report
    paths = "treeline"
    owner = "treeline"
    signs = frozenset({"tokenizer_fingerprint", "isolates_clients"})

    def adapter_name(self, base: str, adapter: str) -> str:
        """Return the adapter's own name: our runtime lists none."""
        return adapter

    def event_name(self, adapter: Model) -> str:
        """Return the digest of its files."""
        return adapter.content or adapter.id

    async def info(self, http: EngineHttp, told: KvPorts | None) -> EngineInfo:
        """Return its models, epoch, tokenizer and sockets. Raises `EngineError`."""
        known, about = await self.known(http, told, _OurServerInfo)
        if about is None:
            return known
        return msgspec.structs.replace(
            known,
            epoch="" if about.epoch is None else str(about.epoch),
            fingerprint=about.tokenizer_fingerprint or "",
            sources=tuple(msgspec.structs.replace(source, hello=True) for source in known.sources),
            isolates_clients=about.isolates_clients,
            obeys_ranks=True,
            transfer=_transfer(about),
            cache_sources_off=about.cache_sources_off,
        )

    async def tokenizer(self, http: EngineHttp) -> TokenizerBundle:
        """Fetch its tokenizer. Raises `EngineError`."""
        path = "/treeline/tokenizer"
        try:
            status, content = await http.fetch(path, _TOKENIZER_TIMEOUT_S, _TOKENIZER_BYTES)
            if status != 200:
                raise EngineError(f"{http.base}{path} is answered {status}")
            return await asyncio.to_thread(TokenizerBundle.from_json, content)
        except (HttpError, BundleError) as error:
            raise EngineError(f"{http.base}{path}: {error!r}") from error


def _transfer(about: _OurServerInfo) -> Transfer | None:
    """Return how it gets pages of others, and gives its own if it has a port for that; None without a host cache."""
    tiers = about.internal_states[0].tiers if about.internal_states else None
    if tiers is None:
        return None
    return Transfer(Protocol.TREELINE, about.kv_transfer_port or 0, (("fingerprint of pages", tiers.fingerprint),))
