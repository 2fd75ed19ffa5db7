"""What a command line of another endpoint picker has that is none of our settings: taken, and mostly without effect.

The flags are those of the reference picker (lwepp 1.6), of GIE 1.5 and of llm-d's router (August 2026). `FOREIGN` says
what is done here instead: nothing is said where the value asks for just that, else a line of the log tells it; where it
would matter, the picker does not start. Flags that have a meaning here are settings of `options.Options`; `-v` and the
log level of zap become `--log-level`.

An `EndpointPickerConfig` is looked through and never followed: a Deployment of theirs starts with it where leaving it
out changes only how good a choice is. Where it decides who may get a request, or asks for what something downstream
reads, the picker does not start. docs/migrating.md says of each plugin what is done here.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterator
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


class Foreign(NamedTuple):
    """A flag of others. `told` says what is done here. `as_here` are the values, apart by blanks, that ask for it;
    `refused`: with any other value the picker does not start."""

    told: str
    as_here: str = ""
    refused: bool = False


_LOGS = "logs are JSON lines on standard error, from --log-level on"
_PLAIN = "/metrics is plain HTTP; leave the flag out, and let a NetworkPolicy say who may reach port 9090"
_METRICS = "the metrics of the engines in docs/engines.md are known by their names, at each endpoint's own port"
_HTTP = "engines are asked over plain HTTP only"
_SIZES = "a message may be 4 MiB longer than --max-body-bytes, and answers as long as the body that they give back"

FOREIGN: dict[str, Foreign] = {
    "--allow-experimental-plugins": Foreign("no plugins are loaded", "false"),
    "--cache-info-metric": Foreign(_METRICS, "vllm:cache_config_info"),
    "--disable-endpoint-subset-filter": Foreign("endpoints that the proxy does not allow are never chosen", "false"),
    "--emit-endpoint-scores": Foreign("/debug/decisions has the costs of each choice", "false"),
    "--enable-cert-reload": Foreign("the files of --cert-path are always read again when they change", "true"),
    "--enable-grpc-stream-metrics": Foreign("open streams are always counted (treeline_epp_extproc_streams)", "true"),
    "--enable-pprof": Foreign("`py-spy` profiles any process of Python", "false"),
    "--grpc-max-recv-msg-size": Foreign(_SIZES),
    "--grpc-max-send-msg-size": Foreign(_SIZES),
    "--ha-enable-leader-election": Foreign("all replicas are ready and serve, each with an index of its own", "false"),
    "--health-checking": Foreign("the ext_proc port always serves gRPC health, too", "true false"),
    "--kubernetes": Foreign("implied by --gateway, --pool-name and --endpoint-selector", "true"),
    "--kv-cache-usage-percentage-metric": Foreign(_METRICS, "vllm:kv_cache_usage_perc vllm:gpu_cache_usage_perc"),
    "--lora-info-metric": Foreign("adapters are known from /v1/models and from KV events", "vllm:lora_requests_info"),
    "--metrics-cert-dir": Foreign(_PLAIN, refused=True),
    "--metrics-client-ca-file": Foreign(_PLAIN, refused=True),
    "--metrics-endpoint-auth": Foreign("who may reach port 9090 is for a NetworkPolicy to say", "false"),
    "--metrics-staleness-threshold": Foreign("load that was read from an engine's page counts for 3 seconds"),
    "--model-server-metrics-https-insecure-skip-verify": Foreign("no engine is asked over HTTPS", "false"),
    "--model-server-metrics-path": Foreign(_METRICS, "/metrics"),
    "--model-server-metrics-port": Foreign(_METRICS),
    "--model-server-metrics-scheme": Foreign(_HTTP, "http", refused=True),
    "--refresh-metrics-interval": Foreign("load is pushed, or read from an engine's page twice a second at most"),
    "--refresh-prometheus-metrics-interval": Foreign("metrics are computed when they are read"),
    "--tls-cipher-suites": Foreign("TLS is spoken with OpenSSL's own suites; leave the flag out", refused=True),
    "--tls-min-version": Foreign(
        "TLS 1.2 and 1.3 are spoken; have proxies refuse 1.2", "VersionTLS10 VersionTLS11 VersionTLS12", refused=True
    ),
    "--total-queued-requests-metric": Foreign(_METRICS, "vllm:num_requests_waiting"),
    "--total-running-requests-metric": Foreign(_METRICS, "vllm:num_requests_running"),
    "--zap-devel": Foreign(_LOGS, "false"),
    "--zap-encoder": Foreign(_LOGS, "json"),
    "--zap-stacktrace-level": Foreign(_LOGS),
    "--zap-time-encoding": Foreign("times in logs are ISO 8601 in UTC", "iso8601 rfc3339 rfc3339nano"),
}
_CONFIGS = ("--config-file", "--config-text")
_BOOLEANS = {"1": "true", "t": "true", "true": "true", "0": "false", "f": "false", "false": "false"}
"""As Go's `strconv.ParseBool` reads them, but for their case."""
_LEVELS = {"debug": "debug", "info": "info", "error": "error", "panic": "error"}
_VERBOSITY_OF_DEBUG = 4
"""From here on GIE and llm-d log each decision."""


def add_foreign(parser: argparse._ActionsContainer) -> None:
    """Let a command line have the flags of others; `ignored` then reads them."""
    for flag in (*FOREIGN, *_CONFIGS):
        parser.add_argument(flag, dest=flag, nargs="?", const="true", action="append", help=argparse.SUPPRESS)
    for flag in ("--zap-log-level", "-v", "--v"):
        parser.add_argument(flag, dest="verbosity", type=_level, default=None, help=argparse.SUPPRESS)


def ignored(given: argparse.Namespace) -> tuple[str, ...]:
    """A sentence for each flag of others that has no effect. Raises ValueError where the picker must not start."""
    sentences = []
    for flag, meaning in FOREIGN.items():
        for value in getattr(given, flag) or ():
            if not value or _BOOLEANS.get(value.lower(), value) in meaning.as_here.split():
                continue
            if meaning.refused:
                raise ValueError(f"{flag} {value} is not known here: {meaning.told}")
            sentences.append(f"{flag}: {meaning.told}")
    for flag in _CONFIGS:
        for value in getattr(given, flag) or ():
            try:
                text = Path(value).read_text(encoding="utf-8") if flag == "--config-file" else value
            except OSError as error:
                raise ValueError(f"{flag} {value}: {error.strerror}") from error
            if text:
                check_config(text)
                sentences.append(f"{flag}: {UNFOLLOWED}")
    return tuple(sentences)


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
    plugins, profiles = config.get("plugins") or [], config.get("schedulingProfiles") or []
    if not isinstance(plugins, list) or not isinstance(profiles, list):
        raise ConfigError("plugins and schedulingProfiles must be lists")
    if not all(isinstance(one, dict) and isinstance(one.get("type"), str) for one in plugins):
        raise ConfigError("each of the plugins must have a type")
    for one in plugins:
        given = one.get("parameters")
        scheme = given.get("scheme", "http") if isinstance(given, dict) else "http"
        if one["type"] == "metrics-data-source" and scheme != "http":
            raise ConfigError(f"metrics-data-source: scheme {scheme} is not known here: {_HTTP}")
    types = [(str(one.get("name") or one["type"]), str(one["type"])) for one in plugins]
    twice = [name for name, count in Counter(name for name, _ in types).items() if count > 1]
    if twice:
        raise ConfigError(f"two of the plugins are called {twice[0]!r}")
    # One that is not listed is referred to by its type.
    used = {kind for _, kind in types} | {dict(types).get(name, name) for name in _references(config)}
    if refused := sorted(used - UNNEEDED):
        raise ConfigError(f"{', '.join(refused)}: refused; {TABLE} says why, and what to use instead")
    if len(profiles) > 1:
        raise ConfigError(f"{len(profiles)} schedulingProfiles: leave one, or run a picker for each")


def _references(value: object) -> Iterator[str]:
    """The names of plugins that are referred to."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if isinstance(inner, str) and inner and str(key).lower().endswith(("pluginref", "policyref")):
                yield inner
            else:
                yield from _references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _references(inner)


def _level(text: str) -> str:
    """The log level that a level of zap, or a number, comes to."""
    if text.isascii() and text.isdecimal():
        return "debug" if int(text) >= _VERBOSITY_OF_DEBUG else "info"
    if text not in _LEVELS:
        raise argparse.ArgumentTypeError(f"{text!r} is neither debug, info, error, panic nor a number")
    return _LEVELS[text]


def flag_bool(text: str) -> bool:
    """A boolean as Go's flags spell it, as a type of argparse."""
    if text.lower() not in _BOOLEANS:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return _BOOLEANS[text.lower()] == "true"


_DURATION = re.compile(r"(?:(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|μs|ms|s|m|h))", re.ASCII)
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def seconds(text: str) -> float:
    """A number of seconds, or a duration as Go writes it: `30s`, `1m30s`, `500ms`. Raises ValueError."""
    try:
        value = float(text)
    except ValueError:
        parts = _DURATION.findall(text)
        if not parts or "".join(number + unit for number, unit in parts) != text:
            raise ValueError(f"{text!r} is no duration like 30s, 1m30s or 500ms") from None
        value = sum(float(number) * _UNITS_S[unit] for number, unit in parts)
    if not 0 <= value < float("inf"):
        raise ValueError(f"{text!r} is no duration: it must not be negative, nor endless")
    return value
