"""Names of models → where they are served.

A model can be asked for by the name that a pool's engines serve it under, and by the `modelName` of an accepted
InferenceModel (a `ModelRule`). `treeline_wire.models.decide_names` says who has a name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
from treeline_wire.models import Criticality, ModelRule, PoolClaim, decide_names


class ModelNotFound(LookupError):
    """No pool serves the model. `name` is what the request asked for; a 404 `model_not_found`."""

    def __init__(self, name: str | None) -> None:
        self.name = name
        if name is None:
            super().__init__("the request names no model and more than one is served")
        else:
            super().__init__(f"The model `{name}` does not exist or you do not have access to it.")


class ModelTarget(msgspec.Struct, frozen=True):
    """Where a request for a model goes: the pool, and the model name that the pool's engines know.

    `fallback_pools` may take it, in this order, when the pool has no endpoint; `ModelTable.name_at` has the name there.
    `listed`: somebody has said that it is served; else engines of the pool take any name.
    """

    pool: str
    target: str
    criticality: Criticality = "Standard"
    fallback_pools: tuple[str, ...] = ()
    listed: bool = True


class ModelTable:
    """Names of models → where they are served. Built anew when a rule, a pool or what an engine serves has changed.

    `served` maps a pool to the names that its engines answer to, `pools` a pool to the gateway it shares (all pools
    behind one picker share one) and the names it is configured to serve. Of names that only engines tell, `served`'s
    order of pools decides; nothing depends on any other order.
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
        """Where a request for `name` goes. `random` in [0, 1) chooses among weighted targets. Raises `ModelNotFound`.

        A request without a model is served only where there is nothing to choose: one model in all.
        """
        if name is None:
            name = self._only_name()
        rule = self._rules.get(name)
        if rule is not None:
            target = _draw(rule.targets, random) if rule.targets else self.name_at(rule.pool, name)
            # A rule for a name that its own pool had before leads to no other pool, whatever engines tell there.
            holder = self._holders[self._gateways[rule.pool], name]
            leaves = bool(rule.targets) and holder.kind == "InferenceModel"
            home = self._home(rule.pool, target) if leaves else rule.pool
            return ModelTarget(home, target, rule.criticality, rule.fallback_pools)
        pool = self._engines.get(name)
        if pool is None:
            raise ModelNotFound(name)
        return ModelTarget(pool, name)

    def _home(self, pool: str, target: str) -> str:
        """The pool whose engines know `target`: the rule's own before another behind its gateway."""
        other = self._engines.get(target)
        if other is None or target in self._served.get(pool, ()):
            return pool
        return other if self._gateways.get(other) == self._gateways.get(pool) else pool

    def name_at(self, pool: str, target: str) -> str:
        """The name to ask a pool's engines for: `target`, unless they serve one model only, under another name."""
        models = self._served.get(pool, ())
        return models[0] if len(models) == 1 else target

    def names(self) -> list[str]:
        """All models that can be asked for, each once: what engines serve in the pools' order, then the rules'."""
        return list(dict.fromkeys([*self._engines, *self._rules]))

    def _only_name(self) -> str:
        served = {(pool, model) for pool, models in self._served.items() for model in models}
        pools = {pool for pool, _ in served} | {rule.pool for rule in self._rules.values()}
        if len(pools) == 1:
            if len(served) == 1:
                return next(model for _, model in served)
            if not served and len(self._rules) == 1:
                return next(iter(self._rules))
        raise ModelNotFound(None)


def _draw(targets: tuple[tuple[str, int | None], ...], random: float) -> str:
    """The target at the point `random` of the targets laid end to end, each as long as its weight (1 where none)."""
    point = random * sum(weight or 1 for _, weight in targets)
    end = 0
    for name, weight in targets:
        end += weight or 1
        if point < end:
            return name
    return targets[-1][0]


def _within_gateway(rule: ModelRule, gateways: Mapping[str, str]) -> ModelRule:
    """The rule without fallbacks that another picker serves: no request can get there."""
    home = gateways[rule.pool]
    reachable = tuple(pool for pool in rule.fallback_pools if gateways.get(pool) == home)
    return msgspec.structs.replace(rule, fallback_pools=reachable)
