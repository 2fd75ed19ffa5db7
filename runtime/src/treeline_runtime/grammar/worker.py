"""The process that compiles grammars: `python -m treeline_runtime.grammar.worker`.

It is confined (`confined.child`). The first request is a `Vocabulary`, the others are `Grammar`s, in MessagePack. An
answer is one byte, an `Answer`, and the compiled grammar or the reason.
"""

from __future__ import annotations

import enum

import msgspec

from treeline_runtime.confined.child import serve
from treeline_runtime.grammar.backend import GrammarError
from treeline_runtime.grammar.backends import Backends, load_libraries
from treeline_runtime.grammar.vocabulary import Vocabulary
from treeline_runtime.messages import Grammar


class Answer(enum.IntEnum):
    """The first byte of an answer: what the rest is, a compiled grammar or a reason."""

    COMPILED = 0
    REFUSED = 1


_MOST_REASON = 1000
"""Characters of a quoted grammar."""
_UNFORESEEN = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Exceptions that a wrong grammar may cause; libraries raise others when memory ends."""


def _refused(reason: str) -> bytes:
    return bytes([Answer.REFUSED]) + reason[:_MOST_REASON].encode(errors="replace")


def main() -> None:
    load_libraries()
    decode = msgspec.msgpack.Decoder(Grammar).decode
    backend: Backends | None = None

    def answer(frame: bytearray) -> bytes:
        nonlocal backend
        if backend is None:
            backend = Backends(msgspec.msgpack.decode(frame, type=Vocabulary))
            return bytes([Answer.COMPILED])
        try:
            return bytes([Answer.COMPILED]) + backend.compile(decode(frame))
        except GrammarError as error:
            return _refused(str(error))
        except _UNFORESEEN as error:
            return _refused(f"the grammar cannot be read: {type(error).__name__}: {error}")

    serve(answer)


if __name__ == "__main__":
    main()
