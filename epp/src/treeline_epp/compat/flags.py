"""Flags of other endpoint pickers that are none of ours, each with what becomes of it here.

They are those of the reference picker (lwepp 1.6), of GIE 1.5 and of llm-d's router (August 2026). What they mean is in
one of three ways: it is how things are here anyway, and nothing is said; it has no effect, and a warning says what is
done instead; or it would matter, and the picker does not start.

Flags that have a meaning here are settings of `options.Options`; `-v` and the log level of zap become `--log-level`.
A configuration of plugins is looked through (`config`), and never followed.

`EndpointPickerConfig` of GIE 1.5 and llm-d's router: looked through, and never followed.

A Deployment of theirs starts with it where leaving it out changes only how good a choice is. Where it decides who may
get a request, or asks for what something downstream reads, the picker does not start. The table in docs/migrating.md
says of each plugin what is done here, and which flag does what it did.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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


class Foreign(NamedTuple):
    """A flag of others. `told` says what is done here."""

    told: str
    boolean: bool = False
    as_here: frozenset[str] = frozenset()
    """Values that ask for what is done here anyway."""
    refused: bool = False
    """With any other value the picker does not start."""


_ON, _OFF = frozenset({"true"}), frozenset({"false"})
_JSON_LINES = "logs are JSON lines on standard error, from --log-level on"

FOREIGN: dict[str, Foreign] = {
    "--zap-devel": Foreign(_JSON_LINES, boolean=True, as_here=_OFF),
    "--zap-encoder": Foreign(_JSON_LINES, as_here=frozenset({"json"})),
    "--zap-stacktrace-level": Foreign("what fails unexpectedly is logged with its traceback, whatever the level"),
    "--zap-time-encoding": Foreign(
        "times in logs are ISO 8601 in UTC", as_here=frozenset({"iso8601", "rfc3339", "rfc3339nano"})
    ),
    "--enable-pprof": Foreign("there is no profiler on a port; `py-spy` profiles any process of Python", True, _OFF),
    "--enable-cert-reload": Foreign("the files of --cert-path are always read again when they change", True, _ON),
    "--metrics-endpoint-auth": Foreign(
        "/metrics asks for no token; who may reach port 9090 is for a NetworkPolicy to say", True, _OFF
    ),
    "--metrics-client-ca-file": Foreign(
        "/metrics is plain HTTP; leave the flag out, and let a NetworkPolicy say who may reach port 9090", refused=True
    ),
    "--metrics-cert-dir": Foreign(
        "/metrics is plain HTTP; leave the flag out, and let a NetworkPolicy say who may reach port 9090", refused=True
    ),
    "--ha-enable-leader-election": Foreign(
        "there is no leader: all replicas are ready and serve, each with an index of its own", True, _OFF
    ),
    "--lora-info-metric": Foreign(
        "adapters are known from /v1/models and from KV events, not from a metric", as_here=frozenset({""})
    ),
    "--refresh-metrics-interval": Foreign(
        "engines of Treeline push their load; the pages of others are read twice a second at most"
    ),
    "--refresh-prometheus-metrics-interval": Foreign("metrics are computed when they are read"),
    "--metrics-staleness-threshold": Foreign("load that was read from an engine's page counts for 3 seconds"),
    "--model-server-metrics-scheme": Foreign(
        "engines are asked over plain HTTP only; leave the flag out, and have them serve their metrics so",
        as_here=frozenset({"http"}),
        refused=True,
    ),
    "--model-server-metrics-https-insecure-skip-verify": Foreign("no engine is asked over HTTPS", boolean=True),
    "--grpc-max-recv-msg-size": Foreign("a message may be 4 MiB longer than --max-body-bytes"),
    "--grpc-max-send-msg-size": Foreign("answers are as long as the body that they give back"),
    "--enable-grpc-stream-metrics": Foreign(
        "open streams are always counted (treeline_epp_extproc_streams)", boolean=True, as_here=_ON
    ),
    "--disable-endpoint-subset-filter": Foreign(
        "endpoints that the proxy does not allow are never chosen", boolean=True, as_here=_OFF
    ),
    "--emit-endpoint-scores": Foreign(
        "the proxy is told no scores; /debug/decisions has the costs of each choice", boolean=True, as_here=_OFF
    ),
    "--tls-min-version": Foreign(
        "TLS 1.2 and 1.3 are spoken; leave the flag out, and have proxies refuse 1.2",
        as_here=frozenset({"VersionTLS10", "VersionTLS11", "VersionTLS12"}),
        refused=True,
    ),
    "--tls-cipher-suites": Foreign(
        "TLS is spoken with OpenSSL's own suites; leave the flag out", as_here=frozenset({""}), refused=True
    ),
    "--allow-experimental-plugins": Foreign("no plugins are loaded", True),
}

_LEVELS = {"debug": "debug", "info": "info", "error": "error", "panic": "error"}
_VERBOSITY_OF_DEBUG = 4
"""From here on GIE and llm-d log each decision."""


def add_foreign(parser: argparse._ActionsContainer) -> None:
    """Flags of others are taken, and remembered where something must be said of them."""
    for flag, meaning in FOREIGN.items():
        count = "?" if meaning.boolean else None
        parser.add_argument(flag, nargs=count, dest="ignored", action=_Taken, default=(), help=argparse.SUPPRESS)
    for flag in ("--config-file", "--config-text"):
        parser.add_argument(flag, dest="ignored", action=_Configuration, default=(), help=argparse.SUPPRESS)
    for flag in ("--zap-log-level", "-v", "--v"):
        parser.add_argument(flag, dest="verbosity", type=_level, default=None, help=argparse.SUPPRESS)


def _level(text: str) -> str:
    """The log level that a level of zap, or a number, comes to."""
    if text.isascii() and text.isdecimal():
        return "debug" if int(text) >= _VERBOSITY_OF_DEBUG else "info"
    if text not in _LEVELS:
        raise argparse.ArgumentTypeError(f"{text!r} is neither debug, info, error, panic nor a number")
    return _LEVELS[text]


class _Taken(argparse.Action):
    """Refuses a flag, or adds the sentence about it."""

    def __call__(
        self,
        _parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        assert option_string is not None
        meaning = FOREIGN[option_string]
        given = "true" if values is None else str(values)
        if meaning.boolean:
            given = {"1": "true", "t": "true", "0": "false", "f": "false"}.get(given.lower(), given.lower())
            if given not in ("true", "false"):
                raise argparse.ArgumentError(self, f"{values!r} is neither true nor false")
        if given in meaning.as_here:
            return
        if meaning.refused:
            raise argparse.ArgumentError(self, f"not known here: {meaning.told}")
        namespace.ignored = (*namespace.ignored, f"{option_string}: {meaning.told}")


class _Configuration(argparse.Action):
    """Refuses a configuration of plugins, or adds the sentence that it has no effect."""

    def __call__(
        self,
        _parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        try:
            text = str(values)
            if option_string == "--config-file":
                text = Path(text).read_text(encoding="utf-8")
            if text:
                check_config(text)
        except (OSError, ValueError) as error:
            raise argparse.ArgumentError(self, str(error)) from None
        if text:
            namespace.ignored = (*namespace.ignored, f"{option_string}: {UNFOLLOWED}")
