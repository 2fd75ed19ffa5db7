"""The models of all pools, and the keyers that turn requests for them into prefix keys.

Written by the engines' watchers and by discovery, read on every request. Renderers are shared by tokenizer fingerprint,
so that a hundred replicas of a model keep one.

`ModelTable` maps names of models to pools.

A request can name a model by its name in a pool's engines, or by the `modelName` of an accepted InferenceModel (a
`ModelRule`). `treeline_wire.models.decide_names` decides conflicts between names.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
from treeline_wire.apis import ollama
from treeline_wire.live_adapters import is_version
from treeline_wire.models import Criticality, ModelRule, PoolClaim, decide_names
from treeline_wire.tokenizer import TokenizerBundle

from treeline_epp.keyers.base import Keyer
from treeline_epp.keyers.history import HistoryKeyer
from treeline_epp.keyers.prompt_keyer import PromptKeyer
from treeline_epp.requests.body import Immediate

_LORA_PATH, _EXTRA_KEY = "lora_path", "extra_key"
_UNREAD: Final[Mapping[str, frozenset[str]]] = {"vllm": frozenset({_LORA_PATH, _EXTRA_KEY})}
"""Members that engines of a type ignore. SGLang reads all of them, but its events never have an `extra_key`: only the
picker's own history fills the namespaces of such requests."""


class Adapters(msgspec.Struct, frozen=True):
    """The adapters of a pool: from the name in requests to its engines, to the name in their events' namespaces, of the
    last endpoint if they differ (see `Request.namespace_at`). `engine` is the type of its engines, empty if it is
    unknown or they differ.
    """

    engine: str = ""
    names: Mapping[str, str] = {}

    def read(self, body: Mapping[str, Any], model: str | None, path: str) -> Mapping[str, Any]:
        """Return the body with cache members in our runtime's form: the adapter in `lora_path`.

        `model` is the name in the request to the engine, not the client's name for it.
        """
        unread = _UNREAD.get(self.engine, frozenset())
        if not unread.isdisjoint(body):
            body = {name: value for name, value in body.items() if name not in unread}
        adapter = self.names.get(model) if model and not path.endswith("/generate") else None
        if adapter is None and isinstance(path_named := body.get(_LORA_PATH), str):
            adapter = self.names.get(path_named)
        return body if adapter is None else {**body, _LORA_PATH: adapter}


NO_ADAPTERS: Final = Adapters()
_LONGEST_NAME: Final = 512
"""Characters of a model's name in which a base model is looked for."""


class Alike(NamedTuple):
    """Endpoints of one pool that serve the same: their adapters, all names of `models` (adapters and base models), and
    the number of endpoints.
    """

    adapters: Adapters
    models: Sequence[str]
    endpoints: int = 1


def union(groups: Sequence[Alike]) -> Adapters:
    """Return the adapters of a pool, any of whose endpoints may get a request.

    If a name is an adapter at some endpoints and a base model at others, the majority decides, and a tie means base
    model: an engine that reports it wrongly must not take the pool's requests away from the others' caches.
    """
    engines = {one.adapters.engine for one in groups if one.adapters.engine}
    names: dict[str, str] = {}
    votes: Counter[str] = Counter()
    for one in groups:
        for asked, name in one.adapters.names.items():
            names[asked] = name
            votes[asked] += one.endpoints
    if names:
        for one in groups:
            for model in one.models:
                if model in names and model not in one.adapters.names:
                    votes[model] -= one.endpoints
    kept = {asked: name for asked, name in names.items() if votes[asked] > 0}
    return Adapters(engines.pop() if len(engines) == 1 else "", kept)


class ModelNotFound(LookupError):
    """No pool serves the model. `name` is the request's model; the status is 404, the code `model_not_found`."""

    def __init__(self, name: str | None) -> None:
        self.name = name
        if name is None:
            super().__init__("the request names no model and more than one is served")
        else:
            super().__init__(f"no pool serves the model {name!r}")


class ModelTarget(msgspec.Struct, frozen=True):
    """The destination of requests for a model: the pool, and the model's name in the pool's engines.

    `fallback_pools` may take them, in this order, when the pool has no endpoint; `ModelTable.name_at` has the name
    there. `listed`: an engine or the configuration names the model; otherwise the pool's engines take any name.
    """

    pool: str
    target: str
    criticality: Criticality = "Standard"
    fallback_pools: tuple[str, ...] = ()
    listed: bool = True


class ModelTable:
    """The pools by names of models. Built again when a rule, a pool or an engine's list of models has changed.

    `served` maps a pool to the names that its engines answer to, `pools` a pool to the gateway it shares (all pools
    behind one picker share one) and the names it is configured to serve. For names that only engines report, the order
    of `served` decides; no other order matters.
    """

    def __init__(
        self,
        served: Mapping[str, Iterable[str]],
        rules: Iterable[ModelRule] = (),
        pools: Mapping[str, PoolClaim] | None = None,
    ) -> None:
        claims = pools or {}
        self._gateways = gateways = {pool: claim.gateway for pool, claim in claims.items()}
        everything = tuple(rules)
        decided = decide_names(everything, claims)
        self.verdicts, self._holders = decided.verdicts, decided.holders
        self._served = {pool: tuple(models) for pool, models in served.items()}
        claimed = {name for claim in claims.values() for name in claim.names}
        self._versions = {m for models in self._served.values() for m in models if is_version(m)} - claimed
        self._own = {pool: tuple(m for m in each if m not in self._versions) for pool, each in self._served.items()}
        """Without the versions of rules' adapters."""
        self._engines: dict[str, str] = {}
        for pool, models in self._served.items():
            for model in models:
                holder = self._holders.get((gateways.get(pool, ""), model))
                if holder is None or holder.pool == pool:
                    self._engines.setdefault(model, pool)
        self._rules: dict[str, ModelRule] = {}
        for rule in sorted(everything, key=lambda rule: (rule.model_name, rule.age)):
            if self.verdicts[rule.name].accepted:
                self._rules.setdefault(rule.model_name, _within_gateway(rule, gateways))

    def resolve(self, name: str | None, random: float = 0.0) -> ModelTarget:
        """Return the target of a request for `name`. `random` in [0, 1) chooses among weighted targets. Raises
        `ModelNotFound`. A request without a model is served only if there is one model in all.
        """
        if name is None:
            name = self._only_name()
        rule = self._rules.get(name)
        if rule is not None:
            if rule.adapter is not None:
                return ModelTarget(rule.pool, rule.adapter, rule.criticality)
            target = _draw(rule.targets, random) if rule.targets else self.name_at(rule.pool, name)
            if (other := self._rules.get(target)) is not None and other.adapter is not None:
                return ModelTarget(other.pool, other.adapter, rule.criticality)
            # A rule for a name that its own pool had before leads to no other pool, whatever its engines report.
            holder = self._holders[self._gateways[rule.pool], name]
            leaves = bool(rule.targets) and holder.kind == "InferenceModel"
            home = self._home(rule.pool, target) if leaves else rule.pool
            return ModelTarget(home, target, rule.criticality, rule.fallback_pools)
        pool = self._engines.get(name)
        if pool is not None:
            return ModelTarget(pool, name)
        if (adapter := self._without_base(name)) is not None:
            return self.resolve(adapter, random)
        raise ModelNotFound(name)

    def _without_base(self, name: str) -> str | None:
        """Return NAME of `BASE:NAME`, SGLang's way to name an adapter: both are names of one pool."""
        for at in (at for at, char in enumerate(name[:_LONGEST_NAME]) if char == ":"):
            base, adapter = name[:at], name[at + 1 :]
            rule = self._rules.get(adapter)
            pool = self._engines.get(adapter) if rule is None else rule.pool
            if base in self._served.get(pool or "", ()):
                return adapter
        return None

    def _home(self, pool: str, target: str) -> str:
        """Return the pool whose engines know `target`: the rule's own before another behind its gateway."""
        other = self._engines.get(target)
        if other is None or target in self._served.get(pool, ()):
            return pool
        return other if self._gateways.get(other) == self._gateways.get(pool) else pool

    def name_at(self, pool: str, target: str) -> str:
        """Return the name to use with a pool's engines: `target`, or that of the only model they serve."""
        models = self._own.get(pool, ())
        return models[0] if len(models) == 1 else target

    def names(self) -> list[str]:
        """Return all model names for requests, each once: those of engines in the pools' order, then the rules'. The
        versions of a rule's adapter are left out."""
        return list(dict.fromkeys([*(name for name in self._engines if name not in self._versions), *self._rules]))

    def _only_name(self) -> str:
        served = {(pool, model) for pool, models in self._own.items() for model in models}
        pools = {pool for pool, _ in served} | {rule.pool for rule in self._rules.values()}
        if len(pools) == 1:
            if len(served) == 1:
                return next(model for _, model in served)
            if not served and len(self._rules) == 1:
                return next(iter(self._rules))
        raise ModelNotFound(None)


def _draw(targets: tuple[tuple[str, int | None], ...], random: float) -> str:
    """Return the target at the point `random` of the targets laid end to end, by their weights (default 1)."""
    point = random * sum(weight or 1 for _, weight in targets)
    end = 0
    for name, weight in targets:
        end += weight or 1
        if point < end:
            return name
    return targets[-1][0]


def _within_gateway(rule: ModelRule, gateways: Mapping[str, str]) -> ModelRule:
    """Return the rule without fallbacks in other pickers' pools: no request can get there."""
    home = gateways[rule.pool]
    reachable = tuple(pool for pool in rule.fallback_pools if gateways.get(pool) == home)
    return msgspec.structs.replace(rule, fallback_pools=reachable)


log = logging.getLogger(__name__)

_SPARE_KEYERS = 4
"""Most unused keyers that are kept, the newest: their engines may be starting. Each takes megabytes."""


class ModelRegistry:
    """The models of every pool, and their keyers. Written by the fleet, and by discovery for its configuration."""

    def __init__(self) -> None:
        self._endpoints: dict[str, tuple[str, tuple[str, ...], str | None, bool]] = {}
        self._adapters: dict[str, Adapters] = {}
        # One object for all endpoints that serve the same: a thousand may name a thousand adapters each.
        self._lists: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._maps: dict[tuple[object, ...], Adapters] = {}
        self._keyers: dict[str, PromptKeyer] = {}
        self._configured: Mapping[str, PoolClaim] = {}
        self._rules: tuple[ModelRule, ...] = ()
        self._served: dict[str, tuple[str, ...]] = {}
        self._by_pool: dict[str, PromptKeyer] = {}
        self._histories: dict[str, HistoryKeyer] = {}
        self._adapters_by_pool: dict[str, Adapters] = {}
        self._open_pools: set[str] = set()
        self._salted_pools: set[str] = set()
        self._tables: dict[str | None, ModelTable] = {}
        self._outdated = False
        self._started = int(time.time())
        self.version = 0
        """Grows with every change here: requests that were parsed before may be outdated then."""

    def keyer(self, fingerprint: str) -> PromptKeyer | None:
        """Return the keyer of a tokenizer that was added before."""
        return self._keyers.get(fingerprint)

    @property
    def keyers(self) -> Collection[PromptKeyer]:
        """The keyers in use."""
        return self._keyers.values()

    def add_keyer(self, bundle: TokenizerBundle) -> PromptKeyer:
        """Return the keyer for a bundle; make it if its fingerprint is new."""
        known = self._keyers.get(bundle.fingerprint)
        if known is None:
            known = self._keyers[bundle.fingerprint] = PromptKeyer(bundle)
            if known.problem is not None:
                log.warning(known.problem)
        return known

    def keep_keyer(self, keyer: PromptKeyer) -> None:
        """Keep a keyer that an endpoint is about to use, even if it was dropped since it was added."""
        self._keyers.setdefault(keyer.fingerprint, keyer)

    def set_endpoint(
        self,
        name: str,
        pool: str,
        models: tuple[str, ...],
        fingerprint: str | None,
        *,
        isolates_clients: bool = False,
        adapters: Adapters = NO_ADAPTERS,
    ) -> None:
        """Set an endpoint's models (none: it takes any name) and its tokenizer (`None`: unknown). `isolates_clients`:
        it keeps the caches of the edge's clients apart by itself. `adapters`: its type, its adapters among the models,
        and their names in requests.
        """
        before = self._endpoints.get(name)
        self._endpoints[name] = (pool, self._lists.setdefault(models, models), fingerprint, isolates_clients)
        self._adapters[name] = self._maps.setdefault(_spelled(adapters), adapters)
        if len(self._lists) + len(self._maps) > 4 * len(self._endpoints):  # for long times without a request
            self._forget_unused()
        self._change()
        old = before[2] if before is not None else None
        # A replaced tokenizer takes much memory.
        if old not in (None, fingerprint) and all(used != old for _, _, used, _ in self._endpoints.values()):
            self._keyers.pop(old or "", None)

    def remove_endpoint(self, name: str) -> None:
        """Remove an endpoint; its models go with the last endpoint that serves them."""
        self._adapters.pop(name, None)
        if self._endpoints.pop(name, None) is not None:
            self._change()

    def set_pools(self, pools: Mapping[str, PoolClaim], rules: Iterable[ModelRule]) -> None:
        """Set the configuration: the pools, oldest first, with the names they serve unless their engines say otherwise,
        and the rules that give models other names.
        """
        self._configured = pools
        self._rules = tuple(rules)
        self._change()
        self._table(None)  # now, in discovery's time, which is limited, and not in the next request's

    def configured(self, pool: str) -> Sequence[str]:
        """Return the names that a pool is configured to serve; empty if none are configured."""
        claim = self._configured.get(pool)
        return () if claim is None else claim.models

    def resolve(self, model: str | None, draw: float = 0.0, pool: str | None = None) -> ModelTarget:
        """Return the target of a request for a model. `draw` in [0, 1) chooses among weighted targets; `pool` is the
        only one allowed. Raises `ModelNotFound`.
        """
        try:
            return self._table(pool).resolve(model, draw)
        except ModelNotFound:
            willing = [name for name in self._served if name in self._open_pools and pool in (None, name)]
            if not willing or (model is None and len(self._served) > 1 and pool is None):
                raise
            return ModelTarget(willing[0], model or "", listed=False)

    def name_at(self, pool: str, target: str) -> str:
        """Return a model's name in a pool to which its requests fall back."""
        return self._table(None).name_at(pool, target)

    def keyer_of(self, pool: str) -> Keyer:
        """Return the keyer of a pool; its endpoints serve one base model, so they share one. Without a tokenizer, or
        without keys, it is a history keyer; `routing_ways` reports that for each endpoint.
        """
        self._refresh()
        keyer = self._by_pool.get(pool)
        if keyer is not None and keyer.keys is not None:
            return keyer
        return self._histories.setdefault(pool, HistoryKeyer())

    def adapters_of(self, pool: str) -> Adapters:
        """Return the adapters of a pool, with their names."""
        self._refresh()
        return self._adapters_by_pool.get(pool, NO_ADAPTERS)

    def engine_of(self, pool: str) -> str:
        """Return the type of a pool's engines; empty if it is unknown, or if they differ."""
        return self.adapters_of(pool).engine

    def isolates_clients(self, pool: str | None = None) -> bool:
        """Return whether every endpoint, of this pool or of all, keeps the edge's clients' caches apart by itself."""
        self._refresh()
        return not self._salted_pools if pool is None else pool not in self._salted_pools

    @property
    def empty(self) -> bool:
        """Whether neither an endpoint nor discovery has named a model yet, so that no name can be called unknown."""
        self._refresh()
        return not self._served and not self._rules

    def models(self, pool: str | None = None) -> list[str]:
        """Return every model name for requests, of this pool or of any."""
        return self._table(pool).names()

    def models_by_pool(self) -> dict[str, list[str]]:
        """Return every model name for requests, by pool."""
        self._refresh()
        found = {pool: list(models) for pool, models in self._served.items()}
        for pool in self._configured:
            found.setdefault(pool, [])
        verdicts = self._table(None).verdicts
        for rule in self._rules:
            if verdicts[rule.name].accepted and rule.model_name not in found[rule.pool]:
                found[rule.pool].append(rule.model_name)
        return found

    def models_answer(self) -> Immediate:
        """Return the answer to `GET /v1/models`: the union over all pools."""
        return _json({"object": "list", "data": [self._card(model) for model in self.models()]})

    def model_answer(self, model: str) -> Immediate | None:
        """Return the answer to `GET /v1/models/{model}`; `None` for an unknown one."""
        return _json(self._card(model)) if model in self.models() else None

    def ollama_answer(self) -> Immediate:
        """Return the answer to Ollama's `GET /api/tags`: the same list."""
        return _json(ollama.listed(self.models(), self._started))

    def _card(self, model: str) -> dict[str, object]:
        return {"id": model, "object": "model", "created": self._started, "owned_by": "treeline"}

    def _change(self) -> None:
        self._outdated = True
        self.version += 1

    def _refresh(self) -> None:
        """Derive the tables from the endpoints again, on demand: endpoints come by the thousand."""
        if not self._outdated:
            return
        self._outdated = False
        pools: dict[str, dict[str, None]] = {pool: {} for pool in self._configured}
        self._by_pool = {}
        self._open_pools = set()
        self._forget_unused()
        used = {fingerprint for _, _, fingerprint, _ in self._endpoints.values()}
        for spare in [fingerprint for fingerprint in list(self._keyers) if fingerprint not in used][:-_SPARE_KEYERS]:
            del self._keyers[spare]
        found: dict[str, dict[tuple[int, int], Alike]] = {}  # by last occurrence: the last one's names count
        for name, (pool, models, *_) in self._endpoints.items():
            each, one = found.setdefault(pool, {}), self._adapters[name]
            key = id(one), id(models)
            known = each.pop(key, None)
            each[key] = Alike(one, models, 1 if known is None else known.endpoints + 1)
        self._adapters_by_pool = {pool: union(list(each.values())) for pool, each in found.items()}
        self._salted_pools = {pool for pool, _, _, isolates in self._endpoints.values() if not isolates}
        seen: set[tuple[str, int]] = set()
        for pool, models, fingerprint, _ in self._endpoints.values():
            if (pool, id(models)) not in seen:
                seen.add((pool, id(models)))
                pools.setdefault(pool, {}).update(dict.fromkeys(models))
            if not models:
                self._open_pools.add(pool)
            keyer = self._keyers.get(fingerprint or "")
            if keyer is not None and (pool not in self._by_pool or self._by_pool[pool].keys is None):
                self._by_pool[pool] = keyer
        told = {pool: tuple(models or self.configured(pool)) for pool, models in pools.items()}
        self._served = {pool: models for pool, models in told.items() if models or pool in self._open_pools}
        self._histories = {pool: keyer for pool, keyer in self._histories.items() if pool in pools}
        self._tables = {}

    def _forget_unused(self) -> None:
        lists = {id(models): models for _, models, *_ in self._endpoints.values()}
        maps = {id(adapters): adapters for adapters in self._adapters.values()}
        self._lists = {models: models for models in lists.values()}
        self._maps = {_spelled(adapters): adapters for adapters in maps.values()}

    def _table(self, pool: str | None) -> ModelTable:
        """Return the table of all pools or of one. It is made on demand: changes come in bursts."""
        self._refresh()
        table = self._tables.get(pool)
        if table is None:
            known = {name: PoolClaim("here") for name in self._served}
            known |= {name: msgspec.structs.replace(one, gateway="here") for name, one in self._configured.items()}
            if pool is None:
                table = ModelTable(self._served, self._rules, known)
            else:
                rules = [rule for rule in self._rules if rule.pool == pool]
                claim = known.get(pool, PoolClaim("here"))
                table = ModelTable({pool: self._served.get(pool, ())}, rules, {pool: claim})
            self._tables[pool] = table
        return table


def _spelled(adapters: Adapters) -> tuple[object, ...]:
    return adapters.engine, *adapters.names.items()


def _json(body: object) -> Immediate:
    return Immediate(200, msgspec.json.encode(body), [("content-type", b"application/json")], "treeline_models")
