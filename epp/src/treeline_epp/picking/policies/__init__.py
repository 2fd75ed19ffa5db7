"""Policies: from candidates to a ranking. `predicted_ttft` takes the cheapest (see `score`) and is the default.

Every policy sees the request and ranks the same candidates: who may be picked at all is the filters' business. To add
one: a module with a `Policy`, and its place in `POLICIES`; `--policy` then lists it. docs/routing.md says when which.
"""

from __future__ import annotations

import argparse
from random import Random

import msgspec

from treeline_epp.picking.policies.base import Candidates, Choice, Policy, PolicyError, read_parameters
from treeline_epp.picking.policies.bucket import Bucket
from treeline_epp.picking.policies.cache_aware import CacheAware
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
    "policy_flag",
    "policy_help",
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
        Bucket,
        LoraAffinity,
    )
}
ALIASES = {"treeline": PredictedTtft.name, "consistent_hashing": PrefixHash.name}
"""Other names of policies."""


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


def policy_flag(text: str) -> str:
    """The value of `--policy`, by the policy's own name. Raises argparse's complaint, which lists what there is."""
    try:
        return str(choice_of(text))
    except PolicyError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def policy_help() -> str:
    """All policies with their parameters and defaults."""
    return (
        "how endpoints are chosen, and with which parameters, for example cache_aware:cache_threshold=0.5 "
        f"(default %(default)s). There are {', '.join(map(_described, sorted(POLICIES)))}; see docs/routing.md"
    )


def _described(name: str) -> str:
    fields = msgspec.structs.fields(POLICIES[name].parameters)
    given = ", ".join(f"{field.name}={field.default}" for field in fields)
    return f"{name} ({given})" if given else name
