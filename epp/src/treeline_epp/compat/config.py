"""`EndpointPickerConfig` of GIE 1.5 and llm-d's router: looked through, and never followed.

A Deployment of theirs starts with it where leaving it out changes only how good a choice is. Where it decides who may
get a request, or asks for what something downstream reads, the picker does not start. The table in docs/migrating.md
says of each plugin what is done here, and which flag does what it did.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from treeline_epp.yaml_text import decode_yaml

TABLE = "docs/migrating.md#endpointpickerconfig"
UNFOLLOWED = f"the configuration is not followed; {TABLE} says which flags do what it asks for"
_KIND = "EndpointPickerConfig"
_MOST_CHARACTERS = 1024 * 1024
_MOST_VALUES = 20_000
"""Of the document with its aliases written out."""

_UNNEEDED = """
max-score-picker random-picker weighted-random-picker queue-scorer kv-cache-utilization-scorer
running-requests-size-scorer token-load-scorer load-aware-scorer active-request-scorer latency-scorer
predicted-latency-scorer prefix-cache-scorer precise-prefix-cache-scorer lora-affinity-scorer no-hit-lru-scorer
session-affinity-scorer mm-embeddings-cache-scorer prefix-cache-affinity-filter utilization-filter
approx-prefix-cache-producer precise-prefix-cache-producer burst-prefix-cache-producer inflight-load-producer
predicted-latency-producer token-producer tokenizer mm-embeddings-cache-producer session-id-producer
single-profile-handler probabilistic-admitter openai-parser anthropic-parser sglanghttp-parser vllmhttp-parser
passthrough-parser vllmgrpc-parser metrics-data-source core-metrics-extractor model-server-protocol-metrics
models-data-source models-data-extractor k8s-notification-source endpoint-notification-source dcgm-data-source
dcgm-extractor topology-extractor local-syncer utilization-detector concurrency-detector
global-strict-fairness-policy round-robin-fairness-policy program-aware-fairness fcfs-ordering-policy
edf-ordering-policy slo-deadline-ordering-policy static-usage-limit-policy priority-holdback-policy
soft-reflective-ceiling-policy eviction-sheddable-filter eviction-priority-then-time-ordering
sheddable-eviction-filter priority-then-time-eviction-order-policy
"""
UNNEEDED = frozenset(_UNNEEDED.split())
"""Types of plugins that may be left out: what they do is done here anyway, or only makes a choice better. All others
are refused, those that are not known, too: each could leave out endpoints that must not get requests."""


class ConfigError(ValueError):
    """With this configuration the picker must not start. The message says why and what to do."""


def check_config(text: str) -> None:
    """Look through a configuration in YAML or JSON. Raises ConfigError."""
    if len(text) > _MOST_CHARACTERS:
        raise ConfigError(f"the configuration has more than {_MOST_CHARACTERS} characters")
    try:
        config = decode_yaml(text, dict[str, Any], _MOST_VALUES)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"no configuration: {error}") from None
    if config.get("kind") != _KIND:
        raise ConfigError(f"kind must be {_KIND}, got {config.get('kind')!r}")
    types = _types(config)
    refused = sorted({name for name in _plugins(config, types) if name not in UNNEEDED})
    if refused:
        raise ConfigError(f"{', '.join(refused)}: refused; {TABLE} says why, and what to use instead")
    profiles = config.get("schedulingProfiles")
    if profiles is not None and not isinstance(profiles, list):
        raise ConfigError("schedulingProfiles must be a list")
    if profiles and len(profiles) > 1:
        raise ConfigError(f"{len(profiles)} schedulingProfiles: leave one, or run a picker for each")


def _types(config: dict[str, Any]) -> dict[str, str]:
    """The type of each plugin that the configuration lists, by its name."""
    found = {}
    listed = config.get("plugins") or []
    if not isinstance(listed, list):
        raise ConfigError("plugins must be a list")
    for plugin in listed:
        if not isinstance(plugin, dict) or not isinstance(plugin.get("type"), str):
            raise ConfigError("each of the plugins must have a type")
        name = str(plugin.get("name") or plugin["type"])
        if name in found:
            raise ConfigError(f"two of the plugins are called {name!r}")
        found[name] = plugin["type"]
    return found


def _plugins(config: dict[str, Any], types: dict[str, str]) -> Iterator[str]:
    """The types of all plugins that are listed or referred to; one that is not listed is referred to by its type."""
    yield from types.values()
    for name in _references(config):
        yield types.get(name, name)


def _references(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if isinstance(inner, str) and inner and str(key).lower().endswith(("pluginref", "policyref")):
                yield inner
            else:
                yield from _references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _references(inner)
