"""The keyer for an engine's events: with the tokenizer that a flag names, or else with the engine's own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from treeline_epp.endpoints.adapters.base import EngineInfo
from treeline_epp.endpoints.engine_http import EngineError
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.endpoints.watcher import EngineClient
from treeline_epp.keyers.prompt_keyer import PromptKeyer
from treeline_epp.requests.model_registry import ModelRegistry
from treeline_epp.requests.routing_ways import TokenizerFacts
from treeline_epp.tokenizers.watch import TokenizerSource, TokenizerSources

log = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0
_MOST_NAMED = 8
"""Most models named in a message."""


class EngineKeyers:
    """The keyers of all engines; see the module. Engines with the same tokenizer share a keyer."""

    def __init__(self, registry: ModelRegistry, sources: TokenizerSources) -> None:
        self._registry = registry
        self.sources = sources
        self._making: dict[str, asyncio.Lock] = {}

    def source(self, spec: EndpointSpec) -> TokenizerSource | None:
        """Return the tokenizer that a flag names for an endpoint."""
        return self.sources.of_models(spec.models or self._registry.configured(spec.pool))

    def known(self, spec: EndpointSpec, info: EngineInfo) -> PromptKeyer | None:
        """Return the keyer for an engine, if it exists already."""
        source = self.source(spec)
        bundle = source.bundle if source is not None else None
        return self._registry.keyer(info.fingerprint if bundle is None else bundle.fingerprint)

    async def keyer(
        self, spec: EndpointSpec, info: EngineInfo, client: EngineClient, on_problem: Callable[[str], None]
    ) -> PromptKeyer | None:
        """Return the keyer for an engine; None without a tokenizer, or before it has come: `run` reports when a flag's
        has. `on_problem` is called with the reason why the engine's own cannot be fetched, which is retried.
        """
        source = self.source(spec)
        while source is not None and (bundle := await source.first()) is not None:
            async with self._making.setdefault(bundle.fingerprint, asyncio.Lock()):
                keyer = await asyncio.to_thread(self._registry.add_keyer, bundle)
            if source.bundle is bundle:
                return keyer
        if not info.fingerprint:
            return None
        if (known := self._registry.keyer(info.fingerprint)) is not None:
            return known  # without the lock: a thousand engines would wait for it one by one
        return await self._own(spec, info, client, on_problem)

    async def _own(
        self, spec: EndpointSpec, info: EngineInfo, client: EngineClient, on_problem: Callable[[str], None]
    ) -> PromptKeyer | None:
        """Fetch the tokenizer that the engine serves, until it comes, and return its keyer."""
        pause = _FIRST_PAUSE_S
        while True:
            # Held for one try only: an engine that hangs must not block others with the same tokenizer.
            async with self._making.setdefault(info.fingerprint, asyncio.Lock()):
                if (known := self._registry.keyer(info.fingerprint)) is not None:
                    return known
                try:
                    bundle = await client.tokenizer()
                    if bundle.fingerprint == info.fingerprint:
                        return await asyncio.to_thread(self._registry.add_keyer, bundle)
                except EngineError as error:
                    log.warning("no tokenizer yet: %s", error)
                    on_problem(str(error))
                else:
                    text = f"tokenizer {info.fingerprint} was announced, {bundle.fingerprint} came"
                    log.error("endpoint %s: %s", spec.name, text)
                    on_problem(f"{text}: restart the engine")
                    return None
            await asyncio.sleep(pause)
            pause = min(_LONGEST_PAUSE_S, 2 * pause)

    def facts(
        self, spec: EndpointSpec, info: EngineInfo, keyer: PromptKeyer | None, problem: str | None
    ) -> TokenizerFacts:
        """Return the state of an endpoint's tokenizer. `problem`: that of its engine's own."""
        source = self.source(spec)
        if keyer is not None:
            return TokenizerFacts(known=True, has_keys=keyer.keys is not None, problem=keyer.problem)
        if source is not None:
            problem = source.problem or problem
        elif self.sources.named and not info.fingerprint:
            served = ", ".join(spec.models[:_MOST_NAMED]) or "unknown models"
            named = ", ".join(self.sources.named[:_MOST_NAMED])
            problem = f"the engine serves {served}, and --tokenizer is given for {named}: give it for the served models"
        return TokenizerFacts(problem=problem, awaited=source is not None or bool(info.fingerprint))
