"""Conversion of InferenceObjectives and InferenceModelRewrites (v1alpha2) to the picker's rules. Pure."""

from __future__ import annotations

import msgspec
from treeline_wire.gateway_rules import ModelRewrite, Objective, RewriteRule

from treeline_epp.kube.objects import Specified

VERSION = "v1alpha2"
_DEFAULT_GROUP = "inference.networking.k8s.io"


class PoolRef(msgspec.Struct):
    """The pool of an object; its group defaults to the CRD's default."""

    name: str
    group: str = _DEFAULT_GROUP


class _ObjectiveSpec(msgspec.Struct, rename="camel"):
    pool_ref: PoolRef
    priority: int | None = None


class _Model(msgspec.Struct):
    value: str
    type: str = "Exact"


class _Match(msgspec.Struct):
    model: _Model


class _Target(msgspec.Struct, rename="camel"):
    model_rewrite: str
    weight: int | None = None


class _Rule(msgspec.Struct):
    matches: list[_Match] | None = None
    targets: list[_Target] = []


class _RewriteSpec(msgspec.Struct, rename="camel"):
    pool_ref: PoolRef
    rules: list[_Rule] | None = None


def read_objective(data: msgspec.Raw) -> tuple[PoolRef, Objective] | None:
    """Parse an objective; `None` while it is being deleted. Raises `msgspec.MsgspecError`."""
    found = _objective(data)
    if found.metadata.deletion_timestamp is not None:
        return None
    spec = found.spec
    return spec.pool_ref, Objective(found.metadata.name, spec.pool_ref.name, spec.priority or 0)


def read_rewrite(data: msgspec.Raw) -> tuple[PoolRef, ModelRewrite] | None:
    """Parse a rewrite; `None` while it is being deleted. A rule whose matches are of kinds that a later version adds is
    left out: it must not become one for all models. Raises `msgspec.MsgspecError`.
    """
    found = _rewrite(data)
    meta, spec = found.metadata, found.spec
    if meta.deletion_timestamp is not None:
        return None
    rules = tuple(rule for rule in map(_rule, spec.rules or ()) if rule is not None)
    return spec.pool_ref, ModelRewrite(meta.name, spec.pool_ref.name, rules, meta.creation_timestamp or "")


def _rule(rule: _Rule) -> RewriteRule | None:
    models = frozenset(match.model.value for match in rule.matches or () if match.model.type == "Exact")
    if rule.matches and not models:
        return None
    targets = tuple(
        (target.model_rewrite, max(0, target.weight or 0)) for target in rule.targets if target.model_rewrite
    )
    return RewriteRule(targets, models)


_objective = msgspec.json.Decoder(Specified[_ObjectiveSpec]).decode
_rewrite = msgspec.json.Decoder(Specified[_RewriteSpec]).decode
