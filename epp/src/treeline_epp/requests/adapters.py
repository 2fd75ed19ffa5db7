"""Which LoRA adapter and which salt a request names, as the engine that is asked reads it.

An adapter has one name in an engine's events (`lora_name`) and, with it, in the index's namespaces. Requests name it in
the engine's own way: at vLLM it is a model, at SGLang it is `base:adapter` or `lora_path`, at our runtime `lora_path`.
What an engine does not read is no part of the namespace there, however much a body says of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

_LORA_PATH, _EXTRA_KEY = "lora_path", "extra_key"
_UNREAD: Final[Mapping[str, frozenset[str]]] = {"vllm": frozenset({_LORA_PATH, _EXTRA_KEY})}
"""Members that engines of a type ignore. SGLang reads all of them, but an `extra_key` is in none of its events: what
such requests leave is in a namespace that only the picker's own history fills."""


class Adapters(msgspec.Struct, frozen=True):
    """The adapters of a pool: the name that its engines are asked for → the one that their events carry. `engine` is
    the type of its engines, empty where it is not known or they differ."""

    engine: str = ""
    names: Mapping[str, str] = {}

    def read(self, body: Mapping[str, Any], model: str | None, path: str) -> Mapping[str, Any]:
        """The body with the members that name a cache as our runtime would have them: the adapter in `lora_path`.

        `model` is the name that the engine is asked for, whatever the client has called it.
        """
        unread = _UNREAD.get(self.engine, frozenset())
        if not unread.isdisjoint(body):
            body = {name: value for name, value in body.items() if name not in unread}
        adapter = self.names.get(model) if model and not path.endswith("/generate") else None
        return body if adapter is None else {**body, _LORA_PATH: adapter}


NO_ADAPTERS: Final = Adapters()


class Alike(NamedTuple):
    """Endpoints of one pool that serve the same: their adapters, all names of `models` (adapters and base models), and
    how many endpoints they are."""

    adapters: Adapters
    models: Sequence[str]
    endpoints: int = 1


def union(groups: Sequence[Alike]) -> Adapters:
    """What the endpoints of one pool have, any of which may be asked.

    A name that is an adapter at some and a base model at others is what most call it, a base model where they are as
    many: an engine that tells it wrong must not take the pool's requests away from what the others hold.
    """
    engines = {one.adapters.engine for one in groups if one.adapters.engine}
    names: dict[str, str] = {}
    votes: Counter[str] = Counter()
    for one in groups:
        for asked, name in one.adapters.names.items():
            names[asked] = name
            votes[asked] += one.endpoints
    if names:
        for one in groups:
            for model in one.models:
                if model in names and model not in one.adapters.names:
                    votes[model] -= one.endpoints
    kept = {asked: name for asked, name in names.items() if votes[asked] > 0}
    return Adapters(engines.pop() if len(engines) == 1 else "", kept)
