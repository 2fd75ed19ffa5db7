"""How deep a YAML document is nested, found out before anything that recurses reads it.

libyaml's composer is recursive C: a hundred kilobytes of `[` end the process. Its parser of events is not, so these are
counted first. JSON is read here, too, as it is YAML.
"""

from __future__ import annotations

from typing import Any, Final

import yaml

MOST_DEPTH: Final = 100

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_OPENING = (yaml.SequenceStartEvent, yaml.MappingStartEvent)
_CLOSING = (yaml.SequenceEndEvent, yaml.MappingEndEvent)


class TooDeepError(yaml.YAMLError):
    """It is nested more than `MOST_DEPTH` deep."""


def check_depth(text: str | bytes) -> None:
    """Raises `TooDeepError`, and yaml.YAMLError for what is no YAML. O(text), and it stops where it is too deep."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, _OPENING):
            depth += 1
            if depth > MOST_DEPTH:
                raise TooDeepError(f"nested more than {MOST_DEPTH} deep")
        elif isinstance(event, _CLOSING):
            depth -= 1
