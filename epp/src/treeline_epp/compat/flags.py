"""Flags of other endpoint pickers that are none of ours, each with what becomes of it here.

They are those of the reference picker (lwepp 1.6), of GIE 1.5 and of llm-d's router (August 2026). What they mean is in
one of three ways: it is how things are here anyway, and nothing is said; it has no effect, and a warning says what is
done instead; or it would matter, and the picker does not start.

Flags that have a meaning here are settings of `options.Options`; `-v` and the log level of zap become `--log-level`.
A configuration of plugins is looked through (`config`), and never followed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from treeline_epp.compat.config import UNFOLLOWED, check_config


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
