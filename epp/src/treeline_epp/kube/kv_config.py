"""Where a pod's engine publishes its KV events, as far as the pod's object tells. Pure.

Annotations come first; without them, the engine's own arguments: `--kv-events-config` of vLLM and SGLang, and how many
data-parallel ranks it has. Needed for engines that do not say it themselves (vLLM before 0.32). Arguments are guessed
from: what cannot be read, because a shell or a `$(VARIABLE)` makes it, counts as nothing said.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping

from treeline_epp.endpoints.kv_endpoints import ports_of
from treeline_epp.endpoints.spec import KvPorts
from treeline_epp.kube import objects

EVENTS_PORT = "treeline.dev/kv-events-port"
REPLAY_PORT = "treeline.dev/kv-replay-port"
TOPIC = "treeline.dev/kv-events-topic"
RANKS = "treeline.dev/data-parallel-size"

_CONFIG = frozenset({"--kv-events-config", "--kv_events_config"})
_SIZE = frozenset({"--data-parallel-size", "--data_parallel_size", "-dp", "--dp-size", "--dp"})
_NAMES = _CONFIG | _SIZE
_MOST_LINES = 16384
"""Characters of a pod's lines for shells that are split into words, all in all: each thousand takes a millisecond of
the event loop, at every change of the pod. Lines that start an engine have some hundreds."""
_MOST_RANKS = 4096


def kv_ports(annotations: Mapping[str, str], containers: Iterable[objects.Container]) -> KvPorts | None:
    """Where the pod's engine publishes; None if nothing says so."""
    options = _options(containers)
    ranks = _number(annotations.get(RANKS) or options.get("size"), _MOST_RANKS) or 1
    if (port := _number(annotations.get(EVENTS_PORT), 65535)) is not None:
        replay = _number(annotations.get(REPLAY_PORT), 65535)
        return KvPorts(port, replay, annotations.get(TOPIC, ""), ranks)
    return ports_of(options.get("config"), ranks)


def _options(containers: Iterable[objects.Container]) -> dict[str, str]:
    """The values of the options that matter, by "config" and "size"; the first of each."""
    found: dict[str, str] = {}
    room = _MOST_LINES
    for container in containers:
        arguments = [*(container.command or ()), *(container.args or ())]
        lines = sum(len(argument) for argument in arguments if _is_line(argument))
        if lines > room:
            continue
        room -= lines
        words = list(_words(arguments))
        for at, word in enumerate(words):
            name, equals, value = word.partition("=")
            what = "config" if name in _CONFIG else "size" if name in _SIZE else None
            if what is not None and (equals or at + 1 < len(words)):
                found.setdefault(what, value if equals else words[at + 1])
    return found


def _is_line(argument: str) -> bool:
    return argument[:1] not in ("-", "{") and any(map(argument.__contains__, _NAMES))


def _words(arguments: Iterable[str]) -> Iterator[str]:
    """The arguments; what is a line for a shell (`sh -c "vllm serve … --kv-events-config '{…}'"`) in its words."""
    for argument in arguments:
        if _is_line(argument):
            try:
                yield from shlex.split(argument.replace("\\\n", " "), comments=True)
            except ValueError:
                continue  # it is not a line that can be split
        else:
            yield argument


def _number(text: str | None, most: int) -> int | None:
    """A positive number that is not too large; None for anything else."""
    text = (text or "").strip()
    if not (text.isascii() and text.isdecimal() and len(text) <= 6):
        return None
    return int(text) if 0 < int(text) <= most else None
