"""The rules that decide which object owns a model name. Picker and operator share them."""

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
_COMMIT: Final = re.compile("[0-9a-f]{40}")
_COMMIT_LINE: Final = re.compile(r"(hf://\S+) (\w[\w.-]{0,127})", re.ASCII)


class HubModel(NamedTuple):
    """A Hugging Face repository, and a branch, tag or commit; None: its main branch."""

    repo: str
    revision: str | None = None

    @classmethod
    def parse(cls, uri: str) -> HubModel:
        """Parses `hf://org/name[@revision]`. Raises ValueError."""
        repo, at, revision = uri.removeprefix(_HUB_SCHEME).partition("@")
        good = uri.startswith(_HUB_SCHEME) and HUB_NAME.fullmatch(repo) is not None and ".." not in uri
        if not good or (at and not _REVISION.fullmatch(revision)):
            raise ValueError(f"{uri!r} is not a Hub model, which looks like hf://org/name or hf://org/name@revision")
        return cls(repo, revision or None)

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit, whose files never change."""
        return _COMMIT.fullmatch(self.revision or "") is not None


def commits_of(text: str) -> dict[str, str]:
    """Returns the commit of each `hf://` URI, from lines `URI COMMIT` as downloads write them. Other lines are
    skipped.
    """
    return {found[1]: found[2] for line in text.splitlines() if (found := _COMMIT_LINE.fullmatch(line))}


def commits_text(commits: Mapping[str, str]) -> str:
    """Returns the lines of `commits_of`."""
    return "\n".join(f"{uri} {commit}" for uri, commit in commits.items())


def served_name(name: str | None, uri: str) -> str:
    """Returns the name under which a pool's engines serve their model: the given one, else the last part of the URI,
    without a repository's revision or an image's tag.
    """
    if name:
        return name
    scheme, _, rest = uri.rpartition("://")
    if scheme == "hf":
        rest = rest.partition("@")[0]
    last = rest.rstrip("/").rpartition("/")[2]
    return re.split("[:@]", last)[0] if scheme == "oci" else last


class ModelRule(msgspec.Struct, frozen=True):
    """An InferenceModel. `name` is the object's, `model_name` what requests say, `created` its creationTimestamp.

    `targets`: names that the pool's engines know, or names of another pool behind the same gateway, with weights on all
    or none. Without targets the rule asks for `model_name` itself, or, as an alias, for the pool's only model.
    `adapter`: what the engines call the adapter that answers for the name; None if none does.
    """

    name: str
    model_name: str
    pool: str
    criticality: Criticality = "Standard"
    targets: tuple[tuple[str, int | None], ...] = ()
    fallback_pools: tuple[str, ...] = ()
    created: str = ""
    uid: str = ""
    adapter: str | None = None

    @property
    def age(self) -> tuple[str, str, str]:
        """Sort key, oldest first; names decide within a second, the resolution of Kubernetes' timestamps."""
        return (self.created, self.name, self.uid)


class PoolClaim(msgspec.Struct, frozen=True):
    """A pool: its gateway and the names it serves (`models`: its model's, `adapters`: its adapters'). `created` is its
    creationTimestamp."""

    gateway: str
    models: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    created: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.models, *self.adapters)


class Holder(NamedTuple):
    """The owner of a name: the object, and the pool for its requests."""

    kind: Literal["InferencePool", "InferenceModel"]
    name: str
    pool: str


class ModelAcceptance(msgspec.Struct, frozen=True):
    """Whether a rule is in effect. `winner` owns the name otherwise; `message` says what to do."""

    accepted: bool
    reason: RuleReason
    message: str
    winner: str | None = None


class Names(NamedTuple):
    """`holders`: gateway and name → owner; `verdicts`: rule name → whether it is in effect."""

    holders: Mapping[tuple[str, str], Holder]
    verdicts: Mapping[str, ModelAcceptance]


def decide_names(rules: Iterable[ModelRule], pools: Mapping[str, PoolClaim]) -> Names:
    """Decides the owner of each name behind each gateway of a namespace. The order of rules and pools does not matter.

    Pools claim the names of their model and adapters, rules their `model_name`. The oldest claim wins, and of equally
    old ones the pool's. When it goes or becomes invalid, the next oldest takes over. A rule for a name of its own pool
    is in effect beside the pool, unless its targets lead to another pool. Names that only engines report (an adapter
    loaded by hand) rank last.
    """
    claims: list[tuple[tuple[str, bool, str, str], Holder, ModelRule | None]] = [
        ((pool.created, False, name, ""), Holder("InferencePool", name, name), None) for name, pool in pools.items()
    ]
    for rule in rules:
        created, name, uid = rule.age
        claims.append(((created, True, name, uid), Holder("InferenceModel", name, rule.pool), rule))
    holders: dict[tuple[str, str], Holder] = {}
    ruled: dict[tuple[str, str], Holder] = {}
    verdicts: dict[str, ModelAcceptance] = {}
    for _, claim, one in sorted(claims, key=lambda claim: claim[0]):
        if one is None:
            for name in pools[claim.pool].names:
                holders.setdefault((pools[claim.pool].gateway, name), claim)
            continue
        verdict = _flaw(one, pools)
        if verdict is None:
            key = pools[one.pool].gateway, one.model_name
            holder = holders.setdefault(key, claim)
            if holder.kind == "InferencePool" and holder.pool == one.pool and not _leads_away(one, pools):
                holder = ruled.setdefault(key, claim)
            verdict = _accepted(one, pools) if holder is claim else _in_use(one, holder, key[0])
        verdicts[one.name] = verdict
    return Names(holders, verdicts)


def _leads_away(rule: ModelRule, pools: Mapping[str, PoolClaim]) -> bool:
    """Returns whether a target of the rule is a name of another pool."""
    home = pools[rule.pool]
    others = {name for pool in pools.values() if pool.gateway == home.gateway for name in pool.names}
    return any(target in others and target not in home.names for target, _ in rule.targets)


def _flaw(rule: ModelRule, pools: Mapping[str, PoolClaim]) -> ModelAcceptance | None:
    weights = [weight for _, weight in rule.targets if weight is not None]
    if weights and len(weights) < len(rule.targets):
        bare = ", ".join(f"`{name}`" for name, weight in rule.targets if weight is None)
        message = f"{bare} of spec.targetModels have no weight; give every target one, or none"
        return ModelAcceptance(False, "WeightsInvalid", message)
    odd = [f"`{name}` has {weight}" for name, weight in rule.targets if weight is not None and not _usable(weight)]
    if odd:
        message = f"a weight in spec.targetModels is a whole number from 1 to {_MAX_WEIGHT:,}, but {', '.join(odd)}"
        return ModelAcceptance(False, "WeightsInvalid", f"{message}; leave out a target that should get no requests")
    if rule.pool not in pools:
        message = f"there is no InferencePool `{rule.pool}` in this namespace{_which(pools)}"
        return ModelAcceptance(False, "PoolNotFound", f"{message}; create it, or correct spec.poolRef.name")
    return None


def _usable(weight: int) -> bool:
    return isinstance(weight, int) and 1 <= weight <= _MAX_WEIGHT


def _which(pools: Iterable[str]) -> str:
    there_are = sorted(pools)
    shown = there_are[:5]
    more = len(there_are) - len(shown)
    there = ", ".join(f"`{pool}`" for pool in shown) + (f" and {more} more" if more else "")
    return f" (there is {there})" if shown else ""


def _accepted(rule: ModelRule, pools: Mapping[str, PoolClaim]) -> ModelAcceptance:
    home = pools[rule.pool].gateway
    notes = [f"requests for `{rule.model_name}` go to pool `{rule.pool}`"]
    for pool in rule.fallback_pools:
        if pool not in pools:
            notes.append(f"fallback pool `{pool}` is not used: there is no such InferencePool")
        elif pools[pool].gateway != home:
            notes.append(
                f"fallback pool `{pool}` is not used: it is behind gateway `{pools[pool].gateway}`, not `{home}`; "
                "give both the same spec.gateway.name"
            )
    return ModelAcceptance(True, "Accepted", "; ".join(notes))


def _in_use(rule: ModelRule, holder: Holder, gateway: str) -> ModelAcceptance:
    has = (
        f"{holder.kind} `{holder.name}` is older and has the model name `{rule.model_name}` behind gateway `{gateway}`"
    )
    if holder.pool == rule.pool and holder.kind == "InferencePool":
        has += ", and spec.targetModels lead requests for it to another pool"
    message = f"{has}; choose another spec.modelName, or delete `{holder.name}`: this one then takes over"
    return ModelAcceptance(False, "ModelNameInUse", message, winner=holder.name)
