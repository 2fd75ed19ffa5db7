"""The policies that pools choose, put into force while the picker runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from treeline_epp.picking.policies import PolicyError, choice_of
from treeline_epp.picking.pool_policies import PoolPolicies

log = logging.getLogger(__name__)


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
