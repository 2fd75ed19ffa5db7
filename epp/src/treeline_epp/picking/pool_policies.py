"""Which policy chooses for which pool: one for all, and those that pools have chosen themselves."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping
from random import Random

from treeline_epp.picking.policies import Choice, Policy, PolicyError, choice_of, create_policy

log = logging.getLogger(__name__)


class PoolPolicies:
    """A policy for each pool, with state of its own; `set` changes what pools choose while the picker runs."""

    def __init__(self, default: str, seed: int) -> None:
        """Raises `PolicyError` for a default that there is not."""
        self.default = choice_of(default)
        self._seed = seed
        self._told: dict[str, str] = {}
        self._chosen: dict[str, Choice] = {}
        self._policies: dict[str | None, Policy] = {None: create_policy(str(self.default), Random(seed))}

    def of(self, pool: str | None) -> Policy:
        """The policy for requests of a pool; None: of no pool. O(1)."""
        return self._policies.get(pool, self._policies[None])

    def name_of(self, pool: str | None) -> str:
        """The policy of a pool with its parameters, as `--policy` takes it."""
        return str(self._chosen.get(pool or "", self.default))

    def set(self, chosen: Mapping[str, str]) -> None:
        """What pools have chosen; all others have the default. One that stays as it was keeps its state. A pool whose
        choice there is not gets the default, too, and a log line says so once."""
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
