"""The process that decodes media: `python -m treeline_runtime.media.worker FOLDER LIMITS`.

It is confined (`confined.child`) once it has loaded the processors of the model in FOLDER: for the kinds of LIMITS, a
JSON object with the most pixels of an image, or seconds. A request is `HEAD` and an item's bytes; the answer is `Made`
or `Unreadable`. Each empty request that follows is answered by the next piece of the output, float32.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from treeline_runtime.confined.child import serve
from treeline_runtime.media.protocol import HEAD, KINDS, PIECE_BYTES, Made, Refused, Unreadable


class Processor(Protocol):
    def read(self, data: bytes, most: int) -> tuple[Made, npt.NDArray[np.float32]]:
        """An item as the encoder takes it; it may take so many tokens. Raises Refused."""

    def examples(self) -> list[bytes]: ...


class Worker:
    """Raises MemoryError, which ends the process."""

    def __init__(self, processors: dict[str, Processor]) -> None:
        """processors: by kind."""
        self._processors = processors
        self._left = memoryview(b"")

    def answer(self, frame: bytearray) -> bytes:
        if not frame:
            piece, self._left = bytes(self._left[:PIECE_BYTES]), self._left[PIECE_BYTES:]
            return piece
        kind, most = HEAD.unpack_from(frame)
        self._left = memoryview(b"")
        try:
            made, output = self._processors[KINDS[kind]].read(bytes(memoryview(frame)[HEAD.size :]), most)
        except Refused as error:
            return msgspec.msgpack.encode(Unreadable(str(error)))
        self._left = memoryview(np.ascontiguousarray(output, "<f4").data).cast("B")
        return msgspec.msgpack.encode(made)


def _processors(folder: str, limits: dict[str, int]) -> dict[str, Processor]:
    made: dict[str, Processor] = {}
    if "image" in limits:
        from treeline_runtime.media.images import Images

        made["image"] = Images(folder, limits["image"])
    if "video" in limits:
        from treeline_runtime.media.videos import Videos

        made["video"] = Videos(folder, limits["image"], limits["video"])
    if "audio" in limits:
        from treeline_runtime.media.recordings import Recordings

        made["audio"] = Recordings(folder, limits["audio"])
    return made


def main() -> None:
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    processors = _processors(sys.argv[1], json.loads(sys.argv[2]))
    worker = Worker(processors)
    for kind, processor in processors.items():
        for example in processor.examples():
            worker.answer(bytearray(HEAD.pack(KINDS.index(kind), 1 << 30) + example))
    serve(worker.answer)


if __name__ == "__main__":
    main()
