"""The verdicts, levels and needs of cases."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any


class Level(enum.Enum):
    """The importance of a case. MUST: the protocol requires it, or no proxy would work without it. SHOULD: users of
    proxies and other pickers count on it. MAY: worth knowing.
    """

    MUST = "MUST"
    SHOULD = "SHOULD"
    MAY = "MAY"


class Verdict(enum.Enum):
    PASS = "pass"
    FAIL = "fail"
    NOT_APPLICABLE = "n/a"


class Need(enum.Enum):
    """A condition that a case needs; the value says why the case is not applicable without it."""

    KUBERNETES = "the picker does not follow the suite's Kubernetes API"
    STARTED = "the picker was not started by the suite (--start)"
    METRICS = "the address of its metrics is unknown (--metrics-port, or {metrics_port} in --start)"
    HEALTH = "the address of its gRPC health is unknown (--health-port, or {health_port} in --start)"


class When(enum.IntEnum):
    """The order of cases: those before the picker has seen any pod, most, those that end it."""

    BEFORE = 0
    RUNNING = 1
    END = 2


class Failed(Exception):
    """The picker does not behave as the case expects; the message says how it behaves."""


class NotApplicable(Exception):
    """The case does not apply to this picker; the message says why."""


@dataclass
class Outcome:
    """The outcome of a case. `gie15` is the verdict against GIE 1.5's behaviour, if that differs."""

    verdict: Verdict
    gie15: Verdict
    why: str = ""
    exchange: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
