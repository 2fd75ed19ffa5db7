"""Policies rank candidates. `predicted_ttft` takes the cheapest (see `score`) and is the default.

Every policy sees the request and ranks the same candidates: filters decide which endpoints may be picked at all. To add
one: a module with a `Policy`, and its place in `POLICIES`; `--policy` then lists it. docs/routing.md says which to use
when.
"""

from __future__ import annotations

import argparse
import logging
import zlib
from collections.abc import Mapping
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
    "PoolPolicies",
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
log = logging.getLogger(__name__)

ALIASES = {"treeline": PredictedTtft.name, "consistent_hashing": PrefixHash.name}
"""Other names of policies."""


def choice_of(text: str) -> Choice:
    """Parse `NAME[:key=value,…]`, and resolve aliases. Raises `PolicyError`, which lists the choices."""
    choice = Choice.parse(text)
    choice = Choice(ALIASES.get(choice.name, choice.name), choice.parameters)
    read_parameters(_policy(choice.name), choice.parameters)
    return choice


def create_policy(text: str, rng: Random) -> Policy:
    """Make the policy that a text chooses. Raises `PolicyError`."""
    choice = choice_of(text)
    policy = _policy(choice.name)
    return policy(read_parameters(policy, choice.parameters), rng)


def _policy(name: str) -> type[Policy]:
    try:
        return POLICIES[name]
    except KeyError:
        raise PolicyError(f"unknown policy {name!r}; valid: {', '.join(sorted(POLICIES))}") from None


def policy_flag(text: str) -> str:
    """Parse the value of `--policy`, and resolve aliases. Raises argparse's error, which lists the choices."""
    try:
        return str(choice_of(text))
    except PolicyError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def policy_help() -> str:
    """Return the help text: all policies with their parameters and defaults."""
    return (
        "how endpoints are chosen, for example cache_aware:cache_threshold=0.5 (default %(default)s): "
        f"{', '.join(map(_described, sorted(POLICIES)))}; see docs/routing.md"
    )


def _described(name: str) -> str:
    fields = msgspec.structs.fields(POLICIES[name].parameters)
    given = ", ".join(f"{field.name}={field.default}" for field in fields)
    return f"{name} ({given})" if given else name


class PoolPolicies:
    """The policy of each pool: one for all, and those that pools have chosen themselves, each with state of its own;
    `set` changes the pools' choices while the picker runs.
    """

    def __init__(self, default: str, seed: int) -> None:
        """Set the default policy. Raises `PolicyError` if it does not exist."""
        self.default = choice_of(default)
        self._seed = seed
        self._told: dict[str, str] = {}
        self._chosen: dict[str, Choice] = {}
        self._policies: dict[str | None, Policy] = {None: create_policy(str(self.default), Random(seed))}

    def of(self, pool: str | None) -> Policy:
        """Return the policy for requests of a pool; None: for requests without a pool. O(1)."""
        return self._policies.get(pool, self._policies[None])

    def name_of(self, pool: str | None) -> str:
        """Return the policy of a pool with its parameters, in the form of `--policy`."""
        return str(self._chosen.get(pool or "", self.default))

    def set(self, chosen: Mapping[str, str]) -> None:
        """Set the pools' choices; all other pools have the default. An unchanged choice keeps its state. A pool whose
        choice does not exist gets the default, too, and a log line says so once.
        """
        wanted: dict[str, Choice] = {}
        kept: dict[str | None, Policy] = {None: self._policies[None]}
        for pool, text in chosen.items():
            news = self._told.get(pool) != text
            try:
                choice = wanted[pool] = choice_of(text)
            except PolicyError as error:
                if news:
                    log.error("pool %s: %s; --policy's is used, %s", pool, error, self.default)
                continue
            if news:
                log.info("pool %s: policy %s", pool, choice)
            if choice == self._chosen.get(pool):
                kept[pool] = self._policies[pool]
            else:
                kept[pool] = create_policy(text, Random(self._seed ^ zlib.crc32(pool.encode())))
        self._told, self._chosen, self._policies = dict(chosen), wanted, kept
