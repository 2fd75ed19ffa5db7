"""vLLM: `GET /kv_event_sources` (0.32 and later) says where each data-parallel rank publishes; for older versions
discovery must say it. Its `/health` is 503 when the engine behind the server is dead, so 503 never means draining: on
SIGTERM the server stops listening.

No page of it shows `--kv-transfer-config`, but with a NixlConnector its metrics page has that connector's metrics, from
the start on, and the size of its blocks. Both ends must be of the same version.
"""

from __future__ import annotations

import re
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from treeline_epp.endpoints.adapters.base import MAX_RANKS, EngineInfo, KvSource
from treeline_epp.endpoints.adapters.openai import Models, OpenAIAdapter
from treeline_epp.endpoints.adapters.sglang import foreign_host
from treeline_epp.endpoints.engine_http import EngineError, EngineHttp
from treeline_epp.endpoints.http_answer import HttpError
from treeline_epp.endpoints.kv_endpoints import Topic, listens, place_of
from treeline_epp.endpoints.model_server_metrics import VLLM, MetricNames
from treeline_epp.endpoints.prometheus_text import series
from treeline_epp.endpoints.spec import KvPorts
from treeline_epp.endpoints.transfer import Protocol, Transfer

_SILENT = "it publishes no KV events: start it with --kv-events-config"
_OLD = (
    "vLLM before 0.32 does not say where it publishes KV events: tell it in the pod's annotations, or by "
    "kv_events in the endpoints file"
)


_PAGE_S: Final = 10.0
_PAGE_BYTES: Final = 4 << 20
_NIXL: Final = re.compile(rb"^vllm:nixl_", re.MULTILINE)


class _Version(msgspec.Struct):
    version: str


class _Publisher(msgspec.Struct):
    """The fields of a rank's `KVEventsConfig` that the picker reads; its ports include the rank's offset."""

    enable_kv_cache_events: bool = True
    publisher: str | None = "zmq"
    endpoint: str | None = None
    replay_endpoint: str | None = None
    topic: Topic | None = ""


_Rank = Annotated[str, Meta(max_length=6, pattern="^[0-9]+$")]
_Sources = Annotated[dict[_Rank, _Publisher], Meta(max_length=4096)]
"""The answer of `/kv_event_sources`, by rank."""


class VllmAdapter(OpenAIAdapter):
    """The adapter of vLLM; see the module."""

    name = "vllm"
    drains = False
    metrics: tuple[MetricNames, ...] = (VLLM,)
    paths = "vllm"
    owner = "vllm"
    signs = frozenset({"vllm_config"})

    async def info(self, http: EngineHttp, told: KvPorts | None) -> EngineInfo:
        """Return its models and publishers. Raises `EngineError`."""
        served = await self.models(http)  # one after the other, on one connection
        ranks, unusable = await self._told_of_events(http, "/kv_event_sources", _Sources)
        known = self._info(http, served, told, unusable or (_OLD if ranks is None else _SILENT))
        publishers = {int(rank): one for rank, one in (ranks or {}).items()}
        found = [source for rank in sorted(publishers) if (source := _source(http, rank, publishers[rank]))]
        if not found:
            return known
        hosts = (foreign_host(http, host) for one in publishers.values() if (host := place_of(one.endpoint)[0]))
        named = (one.endpoint or "" for one in publishers.values())
        return msgspec.structs.replace(
            known,
            sources=tuple(found[:MAX_RANKS]),
            # a server that has only some of the ranks counts those that requests may name from 0
            obeys_ranks=[source.rank for source in found] == list(range(min(len(found), MAX_RANKS))),
            unranked=frozenset({"/v1/responses"}),  # vLLM does not pass the header on there
            no_events="",
            foreign_host=next(filter(None, hosts), None),
            dials=next((endpoint for endpoint in named if place_of(endpoint)[1] and not listens(endpoint)), ""),
        )

    async def transfer(self, http: EngineHttp) -> Transfer | None:
        """Read it from the metrics page. Raises `EngineError`."""
        try:
            status, page = await http.fetch("/metrics", _PAGE_S, _PAGE_BYTES)
        except HttpError as error:
            raise EngineError(f"{http.base}/metrics: {error!r}") from error
        if status != 200 or not _NIXL.search(page):
            return None
        info = next((one.labels for one in series(page, b"vllm:cache_config_info")), {})
        about, served = await http.document("/version", _Version), await http.document("/v1/models", Models)
        facts = {
            "block size": info.get("block_size"),
            "type of cached values": info.get("cache_dtype"),
            "version of vLLM": None if about is None else about.version,
            "model": next((one.checkpoint or None for one in served.data if not one.base), None) if served else None,
        }
        return Transfer.told(Protocol.NIXL, facts)


def _source(http: EngineHttp, rank: int, publisher: _Publisher) -> KvSource | None:
    """Return the publisher at the endpoint's own address: an engine does not choose with whom the picker talks."""
    events = place_of(publisher.endpoint)[1]
    if not publisher.enable_kv_cache_events or publisher.publisher != "zmq" or events is None:
        return None
    return KvSource(http.host, events, place_of(publisher.replay_endpoint)[1], topic=publisher.topic or "", rank=rank)
