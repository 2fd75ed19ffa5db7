"""Safe reading of files that operators write and may replace while the picker runs.

YAML's parser fails in ways of its own: on a day that no calendar has, on `0x_`, on a number of thousands of digits. It
takes the last of two members with one name, a few lines of aliases stand for gigabytes, and its C part recurses as deep
as the text says. All of these become one clear error here.
"""

from __future__ import annotations

import datetime
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import msgspec
import yaml
from treeline_kube.yaml_depth import check_depth

T = TypeVar("T")

MOST_VALUES: Final = 1_000_000
"""Most values of a document with its aliases expanded."""

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_OF_VALUES = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError, yaml.YAMLError)
"""Errors that PyYAML raises itself, or lets through from values that it cannot make."""


def decode_yaml(text: str | bytes, kind: type[T], most_values: int = MOST_VALUES) -> T:
    """Decode a text (YAML or JSON). Raises msgspec.DecodeError or its ValidationError for every kind of bad text."""
    try:
        check_depth(text)
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            if root is None:
                raise msgspec.DecodeError("it is empty")
            if _values(root, "$", {}, most_values) > most_values:
                raise msgspec.DecodeError(f"more than {most_values} values")
            found = loader.construct_document(root)
        finally:
            loader.dispose()
        return msgspec.convert(found, kind, builtin_types=(datetime.datetime, datetime.date))
    except msgspec.MsgspecError:
        raise
    except _OF_VALUES as error:
        raise msgspec.DecodeError(f"no YAML: {error or type(error).__name__}") from error


def _values(node: yaml.Node, path: str, known: dict[int, int], most: int) -> int:
    """Count the values of a node and below it; `known` has the counts so far, and "too many" for nodes that are still
    open. Raises msgspec.ValidationError where a name occurs twice, or is not a text.
    """
    if (count := known.get(id(node))) is not None:
        return count
    known[id(node)] = most + 1
    count = 1
    if isinstance(node, yaml.SequenceNode):
        count += sum(_values(value, f"{path}[{at}]", known, most) for at, value in enumerate(node.value))
    elif isinstance(node, yaml.MappingNode):
        names = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise msgspec.ValidationError(f"a name must be a text - at `{path}`")
            inner = f"{path}.{key.value}"
            if key.value in names:
                raise msgspec.ValidationError(f"occurs twice - at `{inner}`")
            names.add(key.value)
            count += 1 + _values(value, inner, known, most)
    known[id(node)] = count
    return count


def read_file(file: Path, most_bytes: int) -> bytes:
    """Return a file's content. Raises OSError, also for one with more than `most_bytes` and for anything but a regular
    file: a pipe would block, a device would never end.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as opened:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(file))
        data = opened.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"more than {most_bytes} bytes", str(file))
    return data


class WatchedFile(Generic[T]):
    """A file that is polled, and parsed only when its bytes have changed."""

    def __init__(
        self,
        file: Path,
        most_bytes: int,
        parse: Callable[[bytes], T],
        read: Callable[[Path, int], bytes] = read_file,
    ) -> None:
        self._file = file
        self._most_bytes = most_bytes
        self._parse = parse
        self._read = read
        self._seen: tuple[bytes, T | Exception] | None = None

    def look(self) -> T:
        """Return the parsed file. Blocks. Raises OSError, and the ValueError or MsgspecError of `parse`."""
        data = self._read(self._file, self._most_bytes)
        if self._seen is None or self._seen[0] != data:
            try:
                self._seen = data, self._parse(data)
            except (ValueError, msgspec.MsgspecError) as error:
                self._seen = data, error
        found = self._seen[1]
        if isinstance(found, Exception):
            raise found.with_traceback(None)
        return found
