"""The number of a Kubernetes quantity.

Not `kubernetes.utils.parse_quantity`: importing it loads the whole client, 1.5 s of every `treeline operate plan`.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

_SUFFIXES: Final = {
    **{suffix: Decimal(1000) ** place for place, suffix in enumerate(("n", "u", "m", "", "k", *"MGTPE"), -3)},
    **{f"{suffix}i": Decimal(1024) ** place for place, suffix in enumerate("KMGTPE", 1)},
}
_QUANTITY: Final = re.compile(
    r"([+-]?(?:\d+(?:\.\d*)?|\.\d+))(?:[eE]([+-]?\d{1,3})|(n|u|m|k|[KMGTPE]i|[MGTPE])?)", re.ASCII
)


def quantity(value: object) -> Decimal | None:
    """`200m` → 0.2, `1Gi` → 1073741824, 0.2 → 0.2; None if it is not a quantity."""
    match = None if isinstance(value, bool) else _QUANTITY.fullmatch(str(value))
    if match is None:
        return None
    number, exponent, suffix = match.groups()
    return Decimal(number) * (Decimal(f"1e{exponent}") if exponent else _SUFFIXES[suffix or ""])
