"""The process that compiles grammars: `python -m treeline_runtime.grammar.worker BACKEND`.

It is confined (`confined.child`). The first request is a `Vocabulary`, all others are `Grammar`s, in MessagePack; an
answer is one byte, an `Answer`, and what was compiled or why it was not.
"""

from __future__ import annotations

import enum
import sys

import msgspec

from treeline_runtime.confined.child import serve
from treeline_runtime.grammar.backend import GrammarBackend, GrammarError
from treeline_runtime.grammar.backends import load_backend
from treeline_runtime.grammar.vocabulary import Vocabulary
from treeline_runtime.messages import Grammar


class Answer(enum.IntEnum):
    """What the rest of an answer is."""

    COMPILED = 0
    REFUSED = 1


def main(name: str) -> None:
    """Serve requests from standard input until it ends."""
    new_backend = load_backend(name)
    decode = msgspec.msgpack.Decoder(Grammar).decode
    backend: GrammarBackend | None = None

    def answer(frame: bytearray) -> bytes:
        nonlocal backend
        if backend is None:
            backend = new_backend(msgspec.msgpack.decode(frame, type=Vocabulary))
            return bytes([Answer.COMPILED])
        try:
            return bytes([Answer.COMPILED]) + backend.compile(decode(frame))
        except GrammarError as error:
            return bytes([Answer.REFUSED]) + str(error).encode(errors="replace")

    serve(answer)


if __name__ == "__main__":
    main(sys.argv[1])
