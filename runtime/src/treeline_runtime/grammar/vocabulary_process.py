"""Reading a vocabulary in a process of its own: `python -m treeline_runtime.grammar.vocabulary_process`.

With 128 thousand tokens it takes a second, in parts of which no other thread of a process could run. The process is
confined (`confined.child`): one request, a `Source` in MessagePack; its answer is a `Read`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
from treeline_wire.tokenizer import BundleError, TokenizerBundle

from treeline_runtime.confined.child import ProcessLimits, serve
from treeline_runtime.confined.process import ConfinedProcess, Killed
from treeline_runtime.grammar.vocabulary import Vocabulary

_LIMITS: Final = ProcessLimits(seconds=120.0, memory_bytes=4 << 30)


class Source(msgspec.Struct, frozen=True):
    """What a vocabulary is made of; see `Vocabulary.of`."""

    bundle: TokenizerBundle
    size: int
    stop_ids: Sequence[int]


class Read(msgspec.Struct, frozen=True):
    """A vocabulary, or why there is none."""

    vocabulary: Vocabulary | None
    problem: str = ""


def read_vocabulary(bundle: TokenizerBundle, size: int, stop_ids: Sequence[int]) -> Vocabulary:
    """As `Vocabulary.of`; other threads go on meanwhile. Raises BundleError, and OSError where the process failed."""
    with ConfinedProcess(__name__, _LIMITS) as process:
        try:
            answer = process.ask(msgspec.msgpack.encode(Source(bundle, size, stop_ids)))
        except Killed as error:
            raise OSError(f"the vocabulary could not be read: {error}") from error
    read = msgspec.msgpack.decode(answer, type=Read)
    if read.vocabulary is None:
        raise BundleError(read.problem)
    return read.vocabulary


def _answer(frame: bytearray) -> bytes:
    source = msgspec.msgpack.decode(frame, type=Source)
    try:
        read = Read(Vocabulary.of(source.bundle, source.size, source.stop_ids))
    except BundleError as error:
        read = Read(None, str(error))
    return msgspec.msgpack.encode(read)


if __name__ == "__main__":
    serve(_answer)
