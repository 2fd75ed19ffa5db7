"""A request in an engine, and what becomes of requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from treeline_wire.events import EventBatch

from treeline_sim.model.text import Prompt


class Phase(Enum):
    """Where a request is."""

    WAITING = "waiting"
    PREFILL = "prefill"
    RUNNING = "running"
    DONE = "done"


@dataclass(eq=False, slots=True)
class Work:
    """A request in an engine. `whole` is its prompt with its output after it; `tag` is the owner's.

    `computed` tokens have keys and values; `named` of its blocks have their names in the cache. `cached_tokens` is
    what it found there first, None until it was admitted."""

    prompt: Prompt
    whole: Prompt
    output_tokens: int
    tag: object = None
    phase: Phase = Phase.WAITING
    cached_tokens: int | None = None
    computed: int = 0
    named: int = 0
    uncached: int = 0
    target: int = 0
    written: int = 0
    began_step: int = 0
    ends_step: int = 0


@dataclass(slots=True)
class Happened:
    """What a step has brought: first tokens, ends, prompts too long for the memory; and the KV events of it."""

    first: list[Work] = field(default_factory=list)
    done: list[Work] = field(default_factory=list)
    refused: list[Work] = field(default_factory=list)
    batch: tuple[int, EventBatch] | None = None
