"""Flags of other endpoint pickers that are none of our settings: accepted, and mostly without effect.

The flags are those of the reference picker (lwepp 1.6), of GIE 1.5 and of llm-d's router (August 2026). Those of
`FOREIGN` have no effect, and a log line says so; with those of `REFUSED`, which would matter, the picker does
not start. Flags that have a meaning here are settings of `options.Options`; `-v` and the log level of zap become
`--log-level`.

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
from typing import Any, Literal

import msgspec

from treeline_epp.files import decode_yaml

TABLE = "docs/migrating.md#endpointpickerconfig"
UNFOLLOWED = f"the configuration is not followed; {TABLE} names flags with the same effect"
_MOST_CHARACTERS, _MOST_VALUES = 1024 * 1024, 20_000
"""The values are counted with the document's aliases expanded."""

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
"""Types of plugins that may be left out: the picker does the same anyway, or they only improve a choice. All others
are refused, unknown ones too: each could exclude endpoints that must not get requests."""


FLAGS = "docs/migrating.md#flags"
_FOREIGN = """
--allow-experimental-plugins --cache-info-metric --disable-endpoint-subset-filter --emit-endpoint-scores
--enable-cert-reload --enable-grpc-stream-metrics --enable-pprof --grpc-max-recv-msg-size --grpc-max-send-msg-size
--ha-enable-leader-election --kv-cache-usage-percentage-metric --lora-info-metric --metrics-endpoint-auth
--metrics-staleness-threshold --model-server-metrics-https-insecure-skip-verify --model-server-metrics-path
--model-server-metrics-port --refresh-metrics-interval --refresh-prometheus-metrics-interval
--total-queued-requests-metric --total-running-requests-metric --zap-devel --zap-encoder --zap-stacktrace-level
--zap-time-encoding
"""
FOREIGN = tuple(_FOREIGN.split())
"""Flags without effect."""
_AS_HERE = ("--health-checking", "--kubernetes")
"""Flags that ask for what the picker does anyway: no log line."""
_PLAIN = "/metrics is plain HTTP; leave the flag out, and let a NetworkPolicy say who may reach port 9090"
_HTTP = "engines are asked over plain HTTP only"
REFUSED: dict[str, tuple[str, str]] = {
    "--metrics-cert-dir": ("", _PLAIN),
    "--metrics-client-ca-file": ("", _PLAIN),
    "--model-server-metrics-scheme": ("http", _HTTP),
    "--tls-cipher-suites": ("", "TLS is spoken with OpenSSL's own suites; leave the flag out"),
    "--tls-min-version": (
        "VersionTLS10 VersionTLS11 VersionTLS12",
        "TLS 1.2 and 1.3 are spoken; have proxies refuse 1.2",
    ),
}
"""Flags with which the picker does not start, the values that it accepts all the same, and the reason."""
_CONFIGS = ("--config-file", "--config-text")
_BOOLEANS = {"1": "true", "t": "true", "true": "true", "0": "false", "f": "false", "false": "false"}
"""Values that Go's `strconv.ParseBool` accepts, in lower case."""
_LEVELS = {"debug": "debug", "info": "info", "error": "error", "panic": "error"}
_VERBOSITY_OF_DEBUG = 4
"""From this verbosity on GIE and llm-d log each decision."""


def add_foreign(parser: argparse._ActionsContainer) -> None:
    """Add the foreign flags to a parser; `ignored` then reads them."""
    for flag in (*FOREIGN, *_AS_HERE, *REFUSED, *_CONFIGS):
        parser.add_argument(flag, dest=flag, nargs="?", const="true", action="append", help=argparse.SUPPRESS)
    for flag in ("--zap-log-level", "-v", "--v"):
        parser.add_argument(flag, dest="verbosity", type=_level, default=None, help=argparse.SUPPRESS)


def ignored(given: argparse.Namespace) -> tuple[str, ...]:
    """Return sentences on the foreign flags that have no effect. Raises ValueError where the picker must not start."""
    sentences = []
    for flag, (as_here, why) in REFUSED.items():
        for value in getattr(given, flag) or ():
            if value and value not in as_here.split():
                raise ValueError(f"{flag} {value} is not known here: {why}")
    if found := [flag for flag in FOREIGN if getattr(given, flag)]:
        sentences.append(f"flags without effect: {', '.join(found)}; {FLAGS} says what is done here")
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


class _Plugin(msgspec.Struct):
    type: str
    name: str | None = None
    parameters: dict[str, Any] | None = None


class _Config(msgspec.Struct):
    kind: Literal["EndpointPickerConfig"]
    plugins: list[_Plugin] | None = None
    schedulingProfiles: list[dict[str, Any]] | None = None


class ConfigError(ValueError):
    """A configuration with which the picker must not start. The message says why and what to do."""


def check_config(text: str) -> None:
    """Check a configuration in YAML or JSON. Raises ConfigError."""
    if len(text) > _MOST_CHARACTERS:
        raise ConfigError(f"the configuration has more than {_MOST_CHARACTERS} characters")
    try:
        config = msgspec.convert(document := decode_yaml(text, dict[str, Any], _MOST_VALUES), _Config)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"no configuration: {error}") from None
    plugins, profiles = config.plugins or [], config.schedulingProfiles or []
    for one in plugins:
        scheme = (one.parameters or {}).get("scheme") or "http"
        if one.type == "metrics-data-source" and scheme != "http":
            raise ConfigError(f"metrics-data-source: scheme {scheme} is not known here: {_HTTP}")
    types = [(one.name or one.type, one.type) for one in plugins]
    twice = [name for name, count in Counter(name for name, _ in types).items() if count > 1]
    if twice:
        raise ConfigError(f"two of the plugins are called {twice[0]!r}")
    # A plugin that is not listed is referred to by its type.
    used = {kind for _, kind in types} | {dict(types).get(name, name) for name in _references(document)}
    if refused := sorted(used - UNNEEDED):
        raise ConfigError(f"{', '.join(refused)}: refused; {TABLE} says why, and what to use instead")
    if len(profiles) > 1:
        raise ConfigError(f"{len(profiles)} schedulingProfiles: leave one, or run a picker for each")


def _references(value: object) -> Iterator[str]:
    """Yield the names of plugins that the configuration refers to."""
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
    """Map a level of zap, or a number, to a log level."""
    if text.isascii() and text.isdecimal():
        return "debug" if int(text) >= _VERBOSITY_OF_DEBUG else "info"
    if text not in _LEVELS:
        raise argparse.ArgumentTypeError(f"{text!r} is neither debug, info, error, panic nor a number")
    return _LEVELS[text]


def flag_bool(text: str) -> bool:
    """Parse a boolean as Go's flags spell it, as a type of argparse."""
    if text.lower() not in _BOOLEANS:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return _BOOLEANS[text.lower()] == "true"


_DURATION = re.compile(r"(?:(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|μs|ms|s|m|h))", re.ASCII)
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def seconds(text: str) -> float:
    """Parse a number of seconds, or a duration as Go writes it: `30s`, `1m30s`, `500ms`. Raises ValueError."""
    try:
        value = float(text)
    except ValueError:
        parts = _DURATION.findall(text)
        if not parts or "".join(number + unit for number, unit in parts) != text:
            raise ValueError(f"{text!r} is no duration like 30s, 1m30s or 500ms") from None
        value = sum(float(number) * _UNITS_S[unit] for number, unit in parts)
    if not 0 <= value < float("inf"):
        raise ValueError(f"{text!r} is no duration: it must be finite and not negative")
    return value
