"""`session_affinity`: a client comes back to the endpoint that served it, by a token that it was given.

As llm-d's session-affinity-scorer: the token is a cookie (`llm-d-session`), or as in its first releases a header
(`x-session-token`) of answers that the client sends again. It is set where the client has none, or another one. Here it
is a number made of the endpoint's name, so that nobody is told the names of pods; the pickers need not remember
anything, and all read each other's tokens.
"""

from __future__ import annotations

from random import Random
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta, Struct

from treeline_epp.picking.candidates import Candidates
from treeline_epp.picking.policies.base import Policy
from treeline_epp.picking.policies.predicted_ttft import cheapest_first
from treeline_epp.picking.policies.ranking import led_by
from treeline_epp.picking.request import PickRequest

_DIGITS = 13
"""Hexadecimal digits of 52 bits."""
_NAMES = {"cookie": "llm-d-session", "header": "x-session-token"}


class SessionAffinityParameters(Struct, frozen=True, forbid_unknown_fields=True):
    """How the token travels, and under which name (empty: llm-d's); `max_age` of the cookie in seconds, 0: until the
    browser is closed."""

    carrier: Literal["cookie", "header"] = "cookie"
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9!#$%&'*+.^_`|~-]*$", max_length=256)] = ""
    max_age: Annotated[int, Meta(ge=0)] = 0


class SessionAffinity(Policy):
    """Without a token, or where its endpoint is no candidate any more, `predicted_ttft` chooses, and the client gets a
    new token."""

    name = "session_affinity"
    parameters = SessionAffinityParameters

    def __init__(self, parameters: SessionAffinityParameters, rng: Random) -> None:
        self._set = parameters
        self._rng = rng
        self._name = parameters.name or _NAMES[parameters.carrier]

    @property
    def headers(self) -> tuple[str, ...]:
        return ("cookie",) if self._set.carrier == "cookie" else (self._name.lower(),)

    def rank(self, request: PickRequest, candidates: Candidates, count: int) -> list[int]:
        """O(n) at memory speed."""
        order = cheapest_first(candidates.cost_s, candidates, count, self._rng)
        identity = _identity(self._token(request))
        places = [] if identity is None else np.flatnonzero(candidates.identity == identity).tolist()
        return led_by(places[0], order, count) if places else order

    def tell(self, request: PickRequest, identity: float) -> tuple[str, str] | None:
        """The token, unless the client has it."""
        token = f"{int(identity):0{_DIGITS}x}"
        if self._token(request) == token:
            return None
        if self._set.carrier == "header":
            return self._name.lower(), token
        age = f"; Max-Age={self._set.max_age}" if self._set.max_age else ""
        return "set-cookie", f"{self._name}={token}; Path=/{age}; HttpOnly; SameSite=Lax"

    def _token(self, request: PickRequest) -> str:
        headers = request.headers or {}
        if self._set.carrier == "header":
            return headers.get(self._name.lower(), "")
        for word in headers.get("cookie", "").split(";"):
            name, _, value = word.strip().partition("=")
            if name == self._name:
                return value
        return ""


def _identity(token: str) -> float | None:
    if len(token) != _DIGITS or not all(char in "0123456789abcdef" for char in token):
        return None
    return float(int(token, 16))
