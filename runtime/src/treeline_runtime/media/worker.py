"""The process that decodes media: `python -m treeline_runtime.media.worker FOLDER KIND LIMIT`.

It is confined (`confined.child`) once it has loaded the processor of the model in FOLDER. A request is the most tokens
that an item may take, and its bytes; the answer is `Made` or `Unreadable`. Each empty request that follows is answered
by the next piece of the output, float32.
"""

from __future__ import annotations

import os
import sys
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from treeline_runtime.confined.child import serve
from treeline_runtime.media.protocol import MOST, PIECE_BYTES, Made, Refused, Unreadable


class Processor(Protocol):
    def read(self, data: bytes, most: int) -> tuple[Made, npt.NDArray[np.float32]]:
        """An item as the encoder takes it; it may take so many tokens. Raises Refused."""

    def examples(self) -> list[bytes]: ...


class Worker:
    """Raises MemoryError, which ends the process."""

    def __init__(self, processor: Processor) -> None:
        self._processor = processor
        self._left = memoryview(b"")

    def answer(self, frame: bytearray) -> bytes:
        if not frame:
            piece, self._left = bytes(self._left[:PIECE_BYTES]), self._left[PIECE_BYTES:]
            return piece
        (most,) = MOST.unpack_from(frame)
        self._left = memoryview(b"")
        try:
            made, output = self._processor.read(bytes(memoryview(frame)[MOST.size :]), most)
        except Refused as error:
            return msgspec.msgpack.encode(Unreadable(str(error)))
        self._left = memoryview(np.ascontiguousarray(output, "<f4").data).cast("B")
        return msgspec.msgpack.encode(made)


def _processor(folder: str, kind: str, limit: str) -> Processor:
    if kind == "image":
        from treeline_runtime.media.images import Images

        return Images(folder, int(limit))
    from treeline_runtime.media.recordings import Recordings

    return Recordings(folder, int(limit))


def main() -> None:
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    processor = _processor(*sys.argv[1:])
    worker = Worker(processor)
    for example in processor.examples():
        worker.answer(bytearray(MOST.pack(1 << 30) + example))
    serve(worker.answer)


if __name__ == "__main__":
    main()
