"""What can come of a case, how much it matters, and what it may need."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any


class Level(enum.Enum):
    """How much it matters. MUST: the protocol says so, or no proxy would work without it. SHOULD: users of proxies and
    other pickers count on it. MAY: worth knowing."""

    MUST = "MUST"
    SHOULD = "SHOULD"
    MAY = "MAY"


class Verdict(enum.Enum):
    PASS = "pass"
    FAIL = "fail"
    NOT_APPLICABLE = "n/a"


class Need(enum.Enum):
    """What a case needs of the run, in words that say why it is not applicable."""

    KUBERNETES = "the picker does not follow the suite's Kubernetes API"
    STARTED = "the picker was not started by the suite (--start)"
    METRICS = "nothing is said of where its metrics are (--metrics-port, or {metrics_port} in --start)"
    HEALTH = "nothing is said of where its gRPC health is (--health-port, or {health_port} in --start)"


class When(enum.IntEnum):
    """Cases are run in this order: those before the picker has seen any pod, most, those that end it."""

    BEFORE = 0
    RUNNING = 1
    END = 2


class Failed(Exception):
    """The picker does not do what the case expects; the message says what it does instead."""


class NotApplicable(Exception):
    """The case says nothing about this picker; the message says why."""


@dataclass
class Outcome:
    """What came of a case. `gie15` is the verdict against what GIE 1.5 does, where that is something else."""

    verdict: Verdict
    gie15: Verdict
    why: str = ""
    exchange: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
