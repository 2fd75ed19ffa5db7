"""Which policy chooses for which pool: one for all, and those that pools have chosen themselves."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Mapping
from random import Random

from treeline_epp.picking.policies import Choice, Policy, PolicyError, choice_of, create_policy

log = logging.getLogger(__name__)


class PoolPolicies:
    """A policy for each pool, with state of its own; `set` changes what pools choose while the picker runs."""

    def __init__(self, default: str, seed: int) -> None:
        """Raises `PolicyError` for a default that there is not."""
        self.default = choice_of(default)
        self._seed = seed
        self._chosen: dict[str, Choice] = {}
        self._policies: dict[str | None, Policy] = {None: create_policy(str(self.default), Random(seed))}

    def of(self, pool: str | None) -> Policy:
        """The policy for requests of a pool; None: of no pool. O(1)."""
        return self._policies.get(pool, self._policies[None])

    def name_of(self, pool: str | None) -> str:
        """The policy of a pool with its parameters, as `--policy` takes it."""
        return str(self._chosen.get(pool or "", self.default))

    def set(self, chosen: Mapping[str, str]) -> None:
        """What pools have chosen; all others have the default. One that stays as it was keeps its state. Raises
        `PolicyError`, and changes nothing, for one that there is not."""
        wanted = {pool: choice_of(text) for pool, text in chosen.items()}
        kept: dict[str | None, Policy] = {None: self._policies[None]}
        for pool, choice in wanted.items():
            if choice == self._chosen.get(pool):
                kept[pool] = self._policies[pool]
            else:
                kept[pool] = create_policy(str(choice), Random(self._seed ^ zlib.crc32(pool.encode())))
        self._chosen, self._policies = wanted, kept


def chosen_by_pools(policies: PoolPolicies) -> Callable[[Mapping[str, str]], None]:
    """What is to be called with all pools' choices. A pool whose choice there is not gets `--policy`'s, and a log line
    says so once."""
    told: dict[str, str] = {}

    def choose(chosen: Mapping[str, str]) -> None:
        valid: dict[str, str] = {}
        for pool, text in chosen.items():
            why = _refused(text)
            if not why:
                valid[pool] = text
            if told.get(pool) != text:
                told[pool] = text
                if why:
                    log.error("pool %s: %s; --policy's is used, %s", pool, why, policies.default)
                else:
                    log.info("pool %s: policy %s", pool, choice_of(text))
        for gone in told.keys() - chosen.keys():
            del told[gone]
        policies.set(valid)

    return choose


def _refused(text: str) -> str:
    try:
        choice_of(text)
    except PolicyError as error:
        return str(error)
    return ""
