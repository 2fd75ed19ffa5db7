"""Which InferenceModels hold: the pure function that the picker, which serves them, and the operator, which says so,
agree on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final, Literal, NamedTuple

import msgspec

Criticality = Literal["Critical", "Standard", "Sheddable"]
RuleReason = Literal["Accepted", "PoolNotFound", "ModelNameInUse", "WeightsInvalid"]

_MAX_WEIGHT = 1_000_000

HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
"""A repository of the Hugging Face Hub."""
_REVISION: Final = re.compile(r"[\w.][\w.-]*(/[\w.][\w.-]*)*", re.ASCII)
_HUB_SCHEME: Final = "hf://"


class HubModel(NamedTuple):
    """A repository of the Hugging Face Hub, and a branch, tag or commit of it; None: its main branch."""

    repo: str
    revision: str | None = None

    @classmethod
    def parse(cls, uri: str) -> HubModel:
        """From `hf://org/name[@revision]`. Raises ValueError."""
        repo, at, revision = uri.removeprefix(_HUB_SCHEME).partition("@")
        good = uri.startswith(_HUB_SCHEME) and HUB_NAME.fullmatch(repo) is not None and ".." not in uri
        if not good or (at and not _REVISION.fullmatch(revision)):
            raise ValueError(f"{uri!r} is no model of the Hub; it looks like hf://org/name or hf://org/name@revision")
        return cls(repo, revision or None)


def served_name(name: str | None, uri: str) -> str:
    """The name under which a pool's engines serve their model: the one given, else the last part of the URI.

    The revision of a Hugging Face repository is not part of it.
    """
    if name:
        return name
    scheme, _, rest = uri.rpartition("://")
    if scheme == "hf":
        rest = rest.partition("@")[0]
    return rest.rstrip("/").rpartition("/")[2]


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


class ModelAcceptance(msgspec.Struct, frozen=True):
    """Whether a rule holds. `winner` is the rule that has the name instead; `message` says what to do."""

    accepted: bool
    reason: RuleReason
    message: str
    winner: str | None = None


def accept_models(rules: Iterable[ModelRule], pools: Mapping[str, str]) -> dict[str, ModelAcceptance]:
    """Which rules of a namespace hold, by the rules' names. `pools` maps each pool to the gateway it shares.

    A rule needs its pool and valid weights. Of those that ask for the same name behind the same gateway the oldest
    has it; when that one goes, or stops to be valid, the next oldest does.
    """
    accepted: dict[str, ModelAcceptance] = {}
    holders: dict[tuple[str, str], ModelRule] = {}
    for rule in sorted(rules, key=lambda rule: rule.age):
        verdict = _flaw(rule, pools)
        if verdict is None:
            holder = holders.setdefault((pools[rule.pool], rule.model_name), rule)
            verdict = _accepted(rule, pools) if holder is rule else _in_use(rule, holder, pools[rule.pool])
        accepted[rule.name] = verdict
    return accepted


def _flaw(rule: ModelRule, pools: Mapping[str, str]) -> ModelAcceptance | None:
    weights = [weight for _, weight in rule.targets if weight is not None]
    if weights and len(weights) < len(rule.targets):
        bare = ", ".join(f"`{name}`" for name, weight in rule.targets if weight is None)
        message = f"{bare} of spec.targetModels have no weight; give every target one, or none"
        return ModelAcceptance(False, "WeightsInvalid", message)
    odd = [f"`{name}` has {weight}" for name, weight in rule.targets if weight is not None and not _usable(weight)]
    if odd:
        message = f"a weight in spec.targetModels is a whole number from 1 to {_MAX_WEIGHT:,}, but {', '.join(odd)}"
        return ModelAcceptance(False, "WeightsInvalid", f"{message}; leave out a target that is to get nothing")
    if rule.pool not in pools:
        message = f"there is no InferencePool `{rule.pool}` in this namespace{_which(pools)}"
        return ModelAcceptance(False, "PoolNotFound", f"{message}; create it, or correct spec.poolRef.name")
    return None


def _usable(weight: int) -> bool:
    return isinstance(weight, int) and 1 <= weight <= _MAX_WEIGHT


def _which(pools: Mapping[str, str]) -> str:
    shown = sorted(pools)[:5]
    more = len(pools) - len(shown)
    there = ", ".join(f"`{pool}`" for pool in shown) + (f" and {more} more" if more else "")
    return f" (there is {there})" if shown else ""


def _accepted(rule: ModelRule, pools: Mapping[str, str]) -> ModelAcceptance:
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
    return ModelAcceptance(True, "Accepted", "; ".join(notes))


def _in_use(rule: ModelRule, holder: ModelRule, gateway: str) -> ModelAcceptance:
    message = (
        f"InferenceModel `{holder.name}` is older and has the model name `{rule.model_name}` behind gateway "
        f"`{gateway}`; choose another spec.modelName, or delete `{holder.name}`: this one then takes over"
    )
    return ModelAcceptance(False, "ModelNameInUse", message, winner=holder.name)
