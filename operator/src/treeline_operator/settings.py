"""Settings that are defined once: a field of a dataclass, with its flag and the words of `--help`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from typing import Any, Final

_PEER_FIELDS: Final = frozenset({"namespaceSelector", "podSelector", "ipBlock"})


def setting(default: Any, flag: str, text: str, **options: Any) -> Any:
    """A field that is set by a flag; `options` are what `add_argument` takes besides.

    With action `append` the field is a tuple of what was given, each once, or the default. `env` names the environment
    variable that holds the default of a cluster.
    """
    words = {"flag": flag, "help": text, "env": options.pop("env", None), "options": options}
    return dataclasses.field(default=default, metadata=words)


def add_flags(parser: argparse._ActionsContainer, kind: type) -> None:
    """The flags of a dataclass."""
    for field, words in _settings(kind):
        repeated = words["options"].get("action") == "append"
        default = os.environ.get(words["env"] or "", field.default)
        parser.add_argument(
            words["flag"], help=words["help"], default=[] if repeated else default, **words["options"]
        )


def values(kind: type, given: argparse.Namespace) -> dict[str, Any]:
    """Field → value, from a command line with the flags of a dataclass."""
    found = {field.name: (field, getattr(given, _name(words["flag"]))) for field, words in _settings(kind)}
    return {
        name: tuple(dict.fromkeys(value)) or field.default if isinstance(value, list) else value
        for name, (field, value) in found.items()
    }


def _settings(kind: type) -> list[tuple[dataclasses.Field[Any], Any]]:
    return [(field, field.metadata) for field in dataclasses.fields(kind) if "flag" in field.metadata]


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def peers(text: str) -> tuple[dict[str, Any], ...]:
    """Peers of a NetworkPolicy, or argparse's complaint."""
    try:
        found = json.loads(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"not JSON: {exc}") from None
    if not isinstance(found, list):
        raise argparse.ArgumentTypeError("not a list of NetworkPolicy peers")
    for peer in found:
        no_peer = f"{json.dumps(peer)} is no NetworkPolicy peer"
        if not isinstance(peer, dict) or not peer or peer.keys() - _PEER_FIELDS:
            raise argparse.ArgumentTypeError(f"{no_peer}: it has {', '.join(sorted(_PEER_FIELDS))}")
        if not all(isinstance(value, dict) for value in peer.values()):
            raise argparse.ArgumentTypeError(f"{no_peer}: its fields are objects")
    return tuple(found)


def port(text: str, least: int = 1) -> int:
    """A port, or argparse's complaint. `least` is 0 where any free one will do."""
    if not text.isdecimal() or not least <= int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text} is no port")
    return int(text)
