"""A request in an engine, and the results of a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from treeline_wire.events import EventBatch

from treeline_sim.model.text import Prompt


class Phase(Enum):
    """The phase of a request."""

    WAITING = "waiting"
    PREFILL = "prefill"
    RUNNING = "running"
    DONE = "done"


@dataclass(eq=False, slots=True)
class Work:
    """A request in an engine. `whole` is its prompt with its output after it; `tag` is the owner's. `computed` tokens
    have keys and values; `named` of its blocks are in the cache under their hashes. `cached_tokens` were cached at its
    admission, None before.
    """

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
    """The results of a step: first tokens, ended requests, prompts too long for the memory; and its KV events."""

    first: list[Work] = field(default_factory=list)
    done: list[Work] = field(default_factory=list)
    refused: list[Work] = field(default_factory=list)
    batch: tuple[int, EventBatch] | None = None
