"""Canonical form of Kubernetes data: equal where the API server means the same; for hashing and comparing."""

from __future__ import annotations

from typing import Any, Final

from treeline_operator.quantity import quantity

QUANTITY_MAPS: Final = frozenset({"requests", "limits", "capacity", "overhead"})
"""Fields whose values are all quantities."""
QUANTITY_FIELDS: Final = frozenset({"sizeLimit", "storage", "divisor", "averageValue", "size"})
STRING_MAPS: Final = frozenset(
    {"labels", "annotations", "nodeSelector", "matchLabels", "data", "stringData", "binaryData"}
)
"""Fields with keys of the user's choice: a label named `size` is not a quantity."""
_EMPTY_MAPS: Final = STRING_MAPS | QUANTITY_MAPS
_SAY_NOTHING: Final = _EMPTY_MAPS | {"metadata", "spec"}
_FALSE_IS_UNSET: Final = frozenset(
    {
        "hostNetwork",
        "hostPID",
        "hostIPC",
        "readOnly",
        "stdin",
        "stdinOnce",
        "tty",
        "paused",
        "publishNotReadyAddresses",
        "immutable",
    }
)
_ZERO_IS_UNSET: Final = frozenset({"initialDelaySeconds", "minReadySeconds", "hostPort"})


def is_quantity(path: tuple[str, ...]) -> bool:
    """Whether the field at this path of keys is a quantity."""
    if not path or any(key in STRING_MAPS for key in path[:-1]):
        return False
    parent = path[-2] if len(path) > 1 else ""
    if parent in QUANTITY_MAPS:
        return True
    return path[-1] in QUANTITY_FIELDS or (parent == "target" and path[-1] == "value")


def is_unset(key: str, value: object) -> bool:
    """Whether the API server drops a field with this value. `{}` often means something (`emptyDir: {}`, `podSelector:
    {}`), and so do `false` and 0 of optional fields."""
    if value is None or value == "" or value == []:
        return True
    if value == {}:
        return key in _EMPTY_MAPS
    if value is False:
        return key in _FALSE_IS_UNSET
    return value == 0 and key in _ZERO_IS_UNSET


def canonical(value: Any, path: tuple[str, ...] = (), *, keep_unset: bool = False) -> Any:
    """The same data with quantities as normalised numbers, and without what the API server drops.

    `keep_unset` is for patches, where null is an instruction. Empty maps are dropped there too, since removing the last
    label leaves one behind.
    """
    if isinstance(value, dict):
        if path and path[-1] in STRING_MAPS:
            return {k: v for k, v in value.items() if keep_unset or v is not None}
        inner = {k: canonical(v, (*path, k), keep_unset=keep_unset) for k, v in value.items()}
        if keep_unset:
            return {k: v for k, v in inner.items() if v != {} or k not in _SAY_NOTHING}
        return {k: v for k, v in inner.items() if not is_unset(k, v)}
    if isinstance(value, list | tuple):
        return [canonical(item, path, keep_unset=keep_unset) for item in value]
    if is_quantity(path):
        number = quantity(value)
        if number is not None:
            return format(number.normalize(), "f")
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
