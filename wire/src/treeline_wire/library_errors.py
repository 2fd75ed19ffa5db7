"""What goes wrong in the `tokenizers` library, as one error.

It raises bare Exceptions for most things; and for a defect of its own a panic, which is no Exception and passes
handlers of those.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class LibraryError(ValueError):
    """The library could not read a tokenizer, or not tokenize a text."""


@contextlib.contextmanager
def library_errors() -> Iterator[None]:
    """While it lasts, what goes wrong in the library is a `LibraryError`; our own ValueErrors pass as they are."""
    try:
        yield
    except ValueError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise LibraryError(str(error)[:200]) from error
        raise
