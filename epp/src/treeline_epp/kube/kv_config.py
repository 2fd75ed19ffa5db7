"""The ports of a pod's KV events, from the pod's object. Pure.

Annotations come first; without them, the engine's own arguments: `--kv-events-config` of vLLM and SGLang, and the
number of data-parallel ranks. This is for engines that do not name their ports themselves (vLLM before 0.32). The
arguments are only a hint: one that cannot be read, because a shell or a `$(VARIABLE)` makes it, is ignored.
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
"""Most characters of a pod's shell lines that are split into words: each thousand takes a millisecond of the event
loop, at every change of the pod. Lines that start an engine have some hundreds."""
_MOST_RANKS = 4096


def kv_ports(annotations: Mapping[str, str], containers: Iterable[objects.Container]) -> KvPorts | None:
    """Return the ports where the pod's engine publishes; None if the object does not name them."""
    options = _options(containers)
    ranks = _number(annotations.get(RANKS) or options.get("size"), _MOST_RANKS) or 1
    if (port := _number(annotations.get(EVENTS_PORT), 65535)) is not None:
        replay = _number(annotations.get(REPLAY_PORT), 65535)
        return KvPorts(port, replay, annotations.get(TOPIC, ""), ranks)
    return ports_of(options.get("config"), ranks)


def _options(containers: Iterable[objects.Container]) -> dict[str, str]:
    """Return the values of the two options, by "config" and "size"; the first of each."""
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
    """Yield the arguments; a shell line (`sh -c "vllm serve … --kv-events-config '{…}'"`) is split into its words."""
    for argument in arguments:
        if _is_line(argument):
            try:
                yield from shlex.split(argument.replace("\\\n", " "), comments=True)
            except ValueError:
                continue  # it is not a line that can be split
        else:
            yield argument


def _number(text: str | None, most: int) -> int | None:
    """Parse a positive number that is not too large; None for any other text."""
    text = (text or "").strip()
    if not (text.isascii() and text.isdecimal() and len(text) <= 6):
        return None
    return int(text) if 0 < int(text) <= most else None
