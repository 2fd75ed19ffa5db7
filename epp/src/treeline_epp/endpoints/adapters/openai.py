"""Any engine with an OpenAI-compatible server: it lists its models. The picker routes to it by history and load, and by
its events where discovery names their publishers.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Raw
from treeline_wire.tokenizer import TokenizerBundle

from treeline_epp.endpoints.adapters.base import EngineInfo, LoadReports, told_sources
from treeline_epp.endpoints.engine_http import EngineError, EngineHttp, RefusedError, UnusableError
from treeline_epp.endpoints.model_server_metrics import KNOWN, MetricNames
from treeline_epp.endpoints.spec import KvPorts
from treeline_epp.endpoints.transfer import Transfer

T = TypeVar("T")

_LONGEST_REASON = 300
_NO_EVENTS = "this engine does not name its port of KV events: name it in the pod's annotations or the endpoints file"

_LONGEST_NAME = 512
_NOTHING = Raw(b"null")


class Model(msgspec.Struct):
    """One entry of `/v1/models`. All but `id` are usually strings: other values are ignored. `digest`: of an adapter's
    files, from our runtime.
    """

    id: Annotated[str, Meta(min_length=1, max_length=_LONGEST_NAME)]
    root: Raw = _NOTHING
    owned_by: Raw = _NOTHING
    parent: Raw = _NOTHING
    digest: Raw = _NOTHING

    @property
    def owner(self) -> str:
        """The model's owner; empty where the engine does not say."""
        return _name(self.owned_by)

    @property
    def checkpoint(self) -> str:
        """The checkpoint from which it was loaded; empty where the engine does not say."""
        return _name(self.root)

    @property
    def content(self) -> str:
        """The digest of an adapter's files; empty where the engine does not say."""
        return _name(self.digest)

    @property
    def base(self) -> str:
        """The base model of an adapter; empty for a base model."""
        parent = _name(self.parent)
        return parent if parent != self.id else ""


def _name(value: Raw) -> str:
    """Return the string; empty for any other value, which is never built, however large."""
    if bytes(value)[:1] != b'"':
        return ""
    try:
        name = msgspec.json.decode(value, type=str)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""
    return name if len(name) <= _LONGEST_NAME else ""


class Models(msgspec.Struct):
    """The answer of `/v1/models`."""

    data: Annotated[list[Model], Meta(max_length=4096)]


class OpenAIAdapter:
    """The adapter of any OpenAI-compatible engine; see the module."""

    name = "openai"
    probes: tuple[str, ...] = ("/health",)
    probe_timeout_s = 2.0
    probe_interval_s = 1.0
    drains = True
    load = LoadReports.ASKED
    metrics: tuple[MetricNames, ...] = KNOWN
    paths = "custom"
    owner = ""
    signs: frozenset[str] = frozenset()

    async def models(self, http: EngineHttp) -> EngineInfo:
        """Return the models that it serves, and nothing else of it. A model with a parent is an adapter; vLLM and
        SGLang both list them so. Every engine has a base model: where all models have parents, these mean something
        else. Raises `EngineError`.
        """
        try:
            served = await http.document("/v1/models", Models)
        except RefusedError:  # clients have the key; health, metrics and events are answered without it
            return EngineInfo(engine=self.name, wants_key=True)
        if served is None:
            raise UnusableError(f"{http.base} has no /v1/models")
        bases = {one.id for one in served.data if not one.base} or {one.id for one in served.data}
        adapters = {
            self.adapter_name(one.base, one.id): self.event_name(one) for one in served.data if one.id not in bases
        }
        names = (one.id if one.id in bases else self.adapter_name(one.base, one.id) for one in served.data)
        return EngineInfo(tuple(dict.fromkeys(names)), engine=self.name, adapters=adapters)

    def adapter_name(self, base: str, adapter: str) -> str:
        """Return the model name that requests use for an adapter of `base`."""
        return adapter

    def event_name(self, adapter: Model) -> str:
        """Return the name of an adapter in the namespace of its events."""
        return adapter.id

    async def info(self, http: EngineHttp, told: KvPorts | None) -> EngineInfo:
        """Return its models. Raises `EngineError`."""
        return self._info(http, await self.models(http), told, _NO_EVENTS)

    async def transfer(self, http: EngineHttp) -> Transfer | None:
        """Return None: such an engine does not say it."""
        return None

    async def tokenizer(self, http: EngineHttp) -> TokenizerBundle:
        """Raise `EngineError`: such an engine serves no tokenizer."""
        raise EngineError(f"{http.base} serves no tokenizer")

    async def _told_of_events(self, http: EngineHttp, path: str, into: type[T]) -> tuple[T | None, str]:
        """Return a document about its publishers, or None, and why it cannot be used ("" if it can). A bad answer about
        events does not decide whether the engine serves. Raises `EngineError` if asking again may help.
        """
        try:
            return await http.document(path, into), ""
        except UnusableError as error:
            return None, f"its answer about KV events cannot be used: {error}"[:_LONGEST_REASON]

    def _info(self, http: EngineHttp, served: EngineInfo, told: KvPorts | None, why: str) -> EngineInfo:
        """Complete the facts of an engine that names no publishers; `why` counts if discovery names none either."""
        sources = told_sources(http.host, told)
        dials = told.dials if sources and told is not None else ""
        return msgspec.structs.replace(served, sources=sources, dials=dials, no_events="" if sources else why)
