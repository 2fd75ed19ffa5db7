"""The inference extension's rules for requests: InferenceObjectives and InferenceModelRewrites.

They follow GIE 1.5 (and llm-d): an objective, which a request names in a header, has a priority; a negative one is
sheddable. A rewrite replaces a model by another one, drawn by weight. Of the rules that match, one that names the model
counts before one for all models, then the older object's, then the first of an object. A rule counts before the header
that names a model, and that before the body. Headers count if they are trusted. A rewrite cannot take another pool's
name: it counts for names of its own pool, and for names that no pool serves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

import msgspec
from treeline_wire import headers as names
from treeline_wire.gateway_rules import ModelRewrite, Objective, RewriteRule

_OBJECTIVE: Final = (names.OBJECTIVE_LLMD, names.OBJECTIVE)
_REWRITE: Final = (names.MODEL_REWRITE_LLMD, names.MODEL_REWRITE)
_FAIRNESS: Final = (names.FAIRNESS_ID_LLMD, names.FAIRNESS_ID)
"""llm-d's spelling counts first, as in llm-d."""


class Asked(msgspec.Struct, frozen=True):
    """The model that a request is for, the only pool that may serve it, and a number in [0, 1) for further draws."""

    model: str
    pool: str | None
    draw: float


class GatewayRules:
    """The objectives and rewrites of our pools. Owner: discovery (`set`); read on every request.

    `fairness_header` (lower-case) is trusted, and replaces the inference extension's headers for it, trusted or not.
    """

    def __init__(self, *, trust_headers: bool = False, fairness_header: str | None = None) -> None:
        self._trust_headers = trust_headers
        self._fairness_header = fairness_header
        self._objectives: dict[tuple[str, str], int] = {}
        self._by_name: dict[str, int] = {}
        self._exact: dict[str, dict[str, RewriteRule]] = {}
        self._general: dict[str, RewriteRule] = {}

    def set(self, objectives: Iterable[Objective], rewrites: Iterable[ModelRewrite]) -> None:
        """Replace all rules. For each name (unique in a namespace) and pool, one rule counts."""
        self._objectives = {(one.pool, one.name): one.priority for one in objectives}
        self._by_name = {name: priority for (_, name), priority in self._objectives.items()}
        self._exact, self._general = {}, {}
        for rewrite in sorted(rewrites, key=lambda rewrite: rewrite.age):
            for rule in rewrite.rules:
                if not rule.targets:
                    continue
                for model in rule.models:
                    self._exact.setdefault(model, {}).setdefault(rewrite.pool, rule)
                if not rule.models:
                    self._general.setdefault(rewrite.pool, rule)

    def fairness_id(self, headers: Mapping[str, str]) -> str:
        """Return the flow that a trusted header names; "" without one."""
        if (name := self._fairness_header) is not None:
            return headers.get(name, "")
        return self._said(headers, _FAIRNESS)

    def priority(self, headers: Mapping[str, str], pool: str | None) -> int:
        """Return the priority of a request's objective; 0 if it names no known one (of its pool, once it has one)."""
        name = self._said(headers, _OBJECTIVE)
        if not name:
            return 0
        return self._by_name.get(name, 0) if pool is None else self._objectives.get((pool, name), 0)

    def asked(
        self,
        model: str,
        headers: Mapping[str, str],
        draw: float,
        pool: str | None,
        pool_of: Callable[[str], tuple[str | None, bool]],
    ) -> Asked:
        """Return the model and pool that a request for `model` gets. `pool`: the only one allowed; `pool_of` returns
        the pool of a model, and whether it is known by the name; it is called only if a rule may apply.
        """
        exact = self._exact.get(model, {})
        home, named = (pool, True) if pool is not None or not (exact or self._general) else pool_of(model)
        oldest = home if named else next(iter(exact), None)
        rule = exact.get(oldest or "")
        if rule is not None:
            home = oldest
        elif self._general:
            rule = self._general.get(home or "")
        if rule is not None:
            target, rest = rule.draw(draw)
            return Asked(target, home, rest)
        return Asked(self._said(headers, _REWRITE) or model, pool, draw)

    def _said(self, headers: Mapping[str, str], spellings: tuple[str, ...]) -> str:
        if not self._trust_headers:
            return ""
        return next((headers[name] for name in spellings if headers.get(name)), "")


NO_RULES: Final = GatewayRules()
"""No rules, and no trusted headers. Never set."""
