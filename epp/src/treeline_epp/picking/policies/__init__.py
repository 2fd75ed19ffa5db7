"""Policies: from candidates to a ranking. `predicted_ttft` takes the cheapest (see `score`) and is the default.

Every policy sees the request and ranks the same candidates: who may be picked at all is the filters' business. To add
one: a module with a `Policy`, and its place in `POLICIES`; `--policy` then lists it. docs/routing.md says when which.
"""

from __future__ import annotations

from random import Random

from treeline_epp.picking.candidates import Candidates
from treeline_epp.picking.policies.base import Choice, Policy, PolicyError, read_parameters
from treeline_epp.picking.policies.bucket import Bucket
from treeline_epp.picking.policies.cache_aware import CacheAware
from treeline_epp.picking.policies.consistent_hashing import ConsistentHashing
from treeline_epp.picking.policies.least_load import LeastLoad
from treeline_epp.picking.policies.lora_affinity import LoraAffinity
from treeline_epp.picking.policies.power_of_two import PowerOfTwo
from treeline_epp.picking.policies.predicted_ttft import PredictedTtft
from treeline_epp.picking.policies.prefix_hash import PrefixHash
from treeline_epp.picking.policies.random_choice import RandomChoice
from treeline_epp.picking.policies.round_robin import RoundRobin

__all__ = [
    "ALIASES",
    "POLICIES",
    "Candidates",
    "Choice",
    "Policy",
    "PolicyError",
    "choice_of",
    "create_policy",
]

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        PredictedTtft,
        CacheAware,
        RoundRobin,
        RandomChoice,
        PowerOfTwo,
        LeastLoad,
        PrefixHash,
        ConsistentHashing,
        Bucket,
        LoraAffinity,
    )
}
ALIASES = {"treeline": PredictedTtft.name}
"""Names that policies had before."""


def choice_of(text: str) -> Choice:
    """Read `NAME[:key=value,…]`, by the policy's own name. Raises `PolicyError` that says what there is."""
    choice = Choice.parse(text)
    choice = Choice(ALIASES.get(choice.name, choice.name), choice.parameters)
    read_parameters(_policy(choice.name), choice.parameters)
    return choice


def create_policy(text: str, rng: Random) -> Policy:
    """The policy that a text chooses. Raises `PolicyError`."""
    choice = choice_of(text)
    policy = _policy(choice.name)
    return policy(read_parameters(policy, choice.parameters), rng)


def _policy(name: str) -> type[Policy]:
    try:
        return POLICIES[name]
    except KeyError:
        raise PolicyError(f"unknown policy {name!r}; valid: {', '.join(sorted(POLICIES))}") from None
