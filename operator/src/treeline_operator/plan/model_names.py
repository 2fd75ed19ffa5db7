"""The names that pools and InferenceModels claim, as the picker resolves them, and their owners."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC

from treeline_wire.models import ModelRule, Names, PoolClaim, decide_names

from treeline_operator.api.model import InferenceModel
from treeline_operator.api.parts import Resource
from treeline_operator.api.pool import InferencePool


def rule_of(model: InferenceModel) -> ModelRule:
    """An InferenceModel as the picker resolves names by it."""
    meta, spec = model.metadata, model.spec
    return ModelRule(
        name=meta.name,
        model_name=spec.model_name,
        pool=spec.pool_ref.name,
        criticality=spec.criticality,
        targets=tuple((target.name, target.weight) for target in spec.target_models),
        fallback_pools=tuple(ref.name for ref in spec.fallback_pools),
        created=_created(model),
        uid=meta.uid,
    )


def claim_of(pool: InferencePool) -> PoolClaim:
    """A pool's names as the picker resolves them."""
    adapters = tuple(adapter.name for adapter in pool.spec.engine.adapters)
    return PoolClaim(pool.spec.gateway.name, (pool.spec.model.served_name,), adapters, _created(pool))


def names_of(models: Iterable[InferenceModel], pools: Iterable[InferencePool]) -> Names:
    """Name → owner. An InferenceModel that is being deleted owns none."""
    rules = (rule_of(model) for model in models if not model.deleting)
    return decide_names(rules, {pool.name: claim_of(pool) for pool in pools})


def lost_names(pool: InferencePool, names: Names) -> tuple[str, ...]:
    """The names of a pool that belong to another object, each with its owner."""
    claim = claim_of(pool)
    held = ((name, names.holders.get((claim.gateway, name))) for name in claim.names)
    return tuple(
        f"requests for `{name}` go to pool `{holder.pool}`: {holder.kind} `{holder.name}` is older and has this name"
        for name, holder in held
        if holder is not None and holder.pool != pool.name
    )


def _created(resource: Resource) -> str:
    return f"{resource.born.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
