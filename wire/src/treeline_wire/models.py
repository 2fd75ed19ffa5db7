"""Which pool serves a model, under which name: the pure functions that the picker and the operator agree on.

A model can be asked for by the name that a pool's engines serve it under, and by the ``modelName`` of an accepted
InferenceModel (a `ModelRule`), which goes first. `accept_models` says which rules hold; `ModelTable` resolves names.
"""

from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

Criticality = Literal["Critical", "Standard", "Sheddable"]
RuleReason = Literal["Accepted", "PoolNotFound", "ModelNameInUse", "WeightsInvalid"]

_MAX_WEIGHT = 1_000_000


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
    """

    pool: str
    target: str
    criticality: Criticality = "Standard"
    fallback_pools: tuple[str, ...] = ()


class ModelRule(msgspec.Struct, frozen=True):
    """An InferenceModel. `name` is the object's, `model_name` what requests say, `created` its creationTimestamp.

    `targets` are names that the pool's engines know, or those of another pool behind the same gateway (to try another
    base model with a share of the requests), with weights on all or on none. Without targets the rule asks for
    `model_name` itself, or for the only model of the pool where that is another one: an alias.
    """

    name: str
    model_name: str
    pool: str
    criticality: Criticality = "Standard"
    targets: tuple[tuple[str, int | None], ...] = ()
    fallback_pools: tuple[str, ...] = ()
    created: str = ""
    uid: str = ""

    @property
    def age(self) -> tuple[str, str, str]:
        """Sorts the oldest first; Kubernetes' timestamps have whole seconds, so names decide within one."""
        return (self.created, self.name, self.uid)


class Verdict(msgspec.Struct, frozen=True):
    """Whether a rule holds. `winner` is the rule that has the name instead; `message` says what to do."""

    accepted: bool
    reason: RuleReason
    message: str
    winner: str | None = None


def accept_models(rules: Iterable[ModelRule], pools: Mapping[str, str]) -> dict[str, Verdict]:
    """Which rules of a namespace hold, by the rules' names. `pools` maps each pool to the gateway it shares.

    A rule needs its pool and valid weights. Of those that ask for the same name behind the same gateway the oldest
    has it; when that one goes, or stops to be valid, the next oldest does.
    """
    verdicts: dict[str, Verdict] = {}
    holders: dict[tuple[str, str], ModelRule] = {}
    for rule in sorted(rules, key=lambda rule: rule.age):
        verdict = _flaw(rule, pools)
        if verdict is None:
            holder = holders.setdefault((pools[rule.pool], rule.model_name), rule)
            verdict = _accepted(rule, pools) if holder is rule else _in_use(rule, holder, pools[rule.pool])
        verdicts[rule.name] = verdict
    return verdicts


class ModelTable:
    """Names of models → where they are served. Built anew when a rule, a pool or what an engine serves has changed.

    `served` maps a pool to the names that its engines answer to, `pools` a pool to the gateway it shares (all pools
    behind one picker share one). The result depends on `served`'s order of pools and on nothing else's order.
    """

    def __init__(
        self,
        served: Mapping[str, Iterable[str]],
        rules: Iterable[ModelRule] = (),
        pools: Mapping[str, str] | None = None,
    ) -> None:
        self._gateways = gateways = pools or {}
        everything = tuple(rules)
        self.verdicts = accept_models(everything, gateways)
        self._served = {pool: tuple(models) for pool, models in served.items()}
        self._engines: dict[str, str] = {}
        for pool, models in self._served.items():
            for model in models:
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
            home = self._home(rule.pool, target) if rule.targets else rule.pool
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


def _flaw(rule: ModelRule, pools: Mapping[str, str]) -> Verdict | None:
    weights = [weight for _, weight in rule.targets if weight is not None]
    if weights and len(weights) < len(rule.targets):
        bare = ", ".join(f"`{name}`" for name, weight in rule.targets if weight is None)
        message = f"{bare} of spec.targetModels have no weight; give every target one, or none"
        return Verdict(False, "WeightsInvalid", message)
    odd = [
        f"`{name}` has {weight}"
        for name, weight in rule.targets
        if weight is not None and not _usable(weight)
    ]
    if odd:
        message = (
            f"a weight in spec.targetModels is a whole number from 1 to {_MAX_WEIGHT:,}, but {', '.join(odd)}"
        )
        return Verdict(False, "WeightsInvalid", f"{message}; leave out a target that is to get nothing")
    if rule.pool not in pools:
        message = f"there is no InferencePool `{rule.pool}` in this namespace{_which(pools)}"
        return Verdict(False, "PoolNotFound", f"{message}; create it, or correct spec.poolRef.name")
    return None


def _usable(weight: int) -> bool:
    return isinstance(weight, int) and 1 <= weight <= _MAX_WEIGHT


def _which(pools: Mapping[str, str]) -> str:
    shown = sorted(pools)[:5]
    more = len(pools) - len(shown)
    there = ", ".join(f"`{pool}`" for pool in shown) + (f" and {more} more" if more else "")
    return f" (there is {there})" if shown else ""


def _accepted(rule: ModelRule, pools: Mapping[str, str]) -> Verdict:
    home = pools[rule.pool]
    notes = [f"requests for `{rule.model_name}` go to pool `{rule.pool}`"]
    for pool in rule.fallback_pools:
        if pool not in pools:
            notes.append(f"fallback pool `{pool}` is not used: there is no such InferencePool")
        elif pools[pool] != home:
            notes.append(
                f"fallback pool `{pool}` is not used: it is behind gateway `{pools[pool]}`, not `{home}`; "
                "give both the same spec.gateway.name"
            )
    return Verdict(True, "Accepted", "; ".join(notes))


def _in_use(rule: ModelRule, holder: ModelRule, gateway: str) -> Verdict:
    message = (
        f"InferenceModel `{holder.name}` is older and has the model name `{rule.model_name}` behind gateway "
        f"`{gateway}`; choose another spec.modelName, or delete `{holder.name}`: this one then takes over"
    )
    return Verdict(False, "ModelNameInUse", message, winner=holder.name)
