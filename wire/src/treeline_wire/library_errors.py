"""Errors of the `tokenizers` library as one exception type.

The library raises bare Exceptions, and for its own defects a panic, which is not an Exception.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class LibraryError(ValueError):
    """The library could not read a tokenizer or tokenize a text."""


@contextlib.contextmanager
def library_errors() -> Iterator[None]:
    """A context manager: the library's errors become `LibraryError`; our ValueErrors pass unchanged."""
    try:
        yield
    except ValueError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise LibraryError(str(error)[:200]) from error
        raise
